"""`bench/serve_load.py` on the tiny server: it loads, leaves, and sees what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from servers import Running

PROGRAM = Path(__file__).parents[2] / "bench" / "serve_load.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_serve_load", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["serve_load", *arguments])
    return int(program.main())


def test_it_loads_and_reports(
    server: Running, program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", server.url, "--clients", "1,6", "--seconds", "0.4", "--max-tokens", "12", "--leave", "0.5"]
    options += ["--again", "2"]
    assert run(program, monkeypatch, *options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [s["clients"] for s in result["stages"]] == [1, 6]
    for stage in result["stages"]:
        assert stage["answers"] + stage["left"] > 0 and stage["failed"] == 0 and stage["rest_s"] < 10
        assert stage["first_s_p50"] > 0 and stage["asked_again"] > 0 and stage["differ"] == 0


def test_another_server_is_asked_without_our_fields(
    server: Running, program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", server.url, "--foreign", "--clients", "2", "--seconds", "0.3", "--max-tokens", "12"]
    options += ["--leave", "0"]
    assert run(program, monkeypatch, *options) == 0
    (stage,) = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    assert stage["answers"] > 0 and 0 < stage["tokens"] <= 12 * stage["answers"] and not stage["failed"]


def test_it_sees_what_fails_and_what_stays_held(
    server: Running, program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--url", server.url, "--clients", "1", "--seconds", "0.2", "--max-tokens", "4"]
    monkeypatch.setattr(program, "REST_S", 0.1)
    monkeypatch.setattr(program.Server, "held", lambda self: 1.0)
    assert run(program, monkeypatch, *options) == 1
    monkeypatch.undo()
    assert run(program, monkeypatch, *options, "--speculation", '{"draft": "nobody"}') == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    assert "nobody" in told[0]["failures"][0]
    monkeypatch.setattr(program, "ask_once", lambda *_: "another text")
    assert run(program, monkeypatch, *options, "--again", "1", "--leave", "0") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stages"][0]["differ"] == 1

"""`bench/chat_turns.py` on a tiny server with two keys: the second turn is warm for one and cold for the other."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import serving

ARGUMENTS = ["chat_turns", "--serve", "tiny", "--prefix", "200", "--rounds", "2", "--max-tokens", "3"]


def test_it_tells_warm_from_cold_and_sees_different_texts(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    program = importlib.import_module("chat_turns")
    monkeypatch.setattr("sys.argv", ARGUMENTS)
    with serving(folder, keys={key: key for key in program.KEYS.values()}) as running:
        there = SimpleNamespace(url=running.url, start=lambda: None, stop=lambda: None)
        monkeypatch.setattr(program, "Server", lambda url, command: there)
        assert program.main() == 0
        (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert result["equal"] and min(result["warm_cached"]) > 100 and max(result["cold_cached"]) == 0
        assert {arm: len(times) for arm, times in result["seconds"].items()} == {"first": 2, "warm": 2, "cold": 2}
        asked = program.ask
        monkeypatch.setattr(program, "ask", lambda c, turns, arm, n: replace(asked(c, turns, arm, n), text=arm))
        assert program.main() == 1

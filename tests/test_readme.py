"""What README and docs show is true: commands parse, files exist, the Python block runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line[2:] for line in lines if line.startswith("$ paceline ")]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_parses(command: str) -> None:
    build_parser().parse_args(shlex.split(command, comments=True)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\$ make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named and named <= targets


@pytest.mark.models
def test_the_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2

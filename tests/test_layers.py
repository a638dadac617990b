"""The house's layers, and that planning and `--help` load without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
ALLOWED = {
    "core": {"core"},
    "plan": {"core", "plan"},
    "decode": {"core", "plan", "decode"},
    "report": {"core", "plan", "report"},
    "serve": {"core", "plan", "decode", "report", "serve"},
    "bench": {"core", "plan", "decode", "report", "bench"},
}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_a_layer_imports_only_what_it_may(layer: str) -> None:
    wrong = []
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] == "paceline" and len(parts) > 1 and parts[1] != "errors" and parts[1] not in ALLOWED[layer]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}")
    assert not wrong, wrong


@pytest.mark.parametrize("layer", ["core", "plan", "report"])
def test_torch_is_named_nowhere_in(layer: str) -> None:
    named = [p for p in sorted((PACKAGE / layer).rglob("*.py")) for n, _ in imports(p) if n.split(".")[0] == "torch"]
    assert not named, named


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "import paceline.cli; paceline.cli.build_parser()",
        "import pkgutil, importlib, paceline.plan as p\n"
        "for m in pkgutil.walk_packages(p.__path__, 'paceline.plan.'): importlib.import_module(m.name)",
    ],
    ids=["package", "command line", "plan"],
)
def test_no_torch_is_loaded_by(code: str) -> None:
    check = f"{code}\nimport sys\nassert not any(m.split('.')[0] == 'torch' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)

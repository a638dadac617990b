"""Shared by the planner's tests: where the measurements lie, a command line, small scenarios."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.plan.config import find_model
from paceline.plan.cost import Layout, Precision
from paceline.plan.hardware import find_hardware
from paceline.plan.scenario import Load, Scenario

VERBS = ("plan", "explain", "whatif", "export", "calibrate", "validate")


def measurements() -> Path:
    """The folder of published measurements, or a skip with the reason."""
    root = Path(os.environ.get("PACELINE_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
    folder = root / "measurements"
    if not folder.is_dir():
        pytest.skip(f"no measurements at {folder}; set PACELINE_SHARED to the folder that holds them")
    return folder


def run_cli(argv: Sequence[str]) -> int:
    """The exit code of a planner's verb, dispatched as the package's entry point does."""
    parser = argparse.ArgumentParser(prog="paceline")
    subparsers = parser.add_subparsers(required=True)
    for verb in VERBS:
        importlib.import_module(f"paceline.cli.{verb}").add_parser(subparsers)
    args = parser.parse_args(list(argv))
    try:
        return int(args.func(args))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


def scenario(
    model: str = "llama-3.1-8b",
    hardware: str = "h100",
    dtype: str = "bf16",
    tensor: int = 1,
    expert: int = 1,
    prompt: float = 512,
    output: float = 256,
) -> Scenario:
    shape, layout = find_model(model), Layout(tensor, expert)
    load = Load(prompt, output)
    return Scenario(shape, find_hardware(hardware), load, Precision.of(shape, dtype), layout, layout.devices)

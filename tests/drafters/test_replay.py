"""On real texts: code edits are drafted in long chains, prose is left mostly alone."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKLOADS = Path(os.environ.get("PACELINE_SHARED", ROOT / "../shared")) / "workloads"


def row(name: str, texts: str, row_cost: float) -> dict[str, float]:
    path = WORKLOADS / texts
    if not path.exists():
        pytest.skip(f"{texts} is not there; set PACELINE_SHARED to the folder that holds workloads/")
    replay_file = runpy.run_path(str(ROOT / "bench/replay_drafters.py"), run_name="replay_drafters")[
        "replay_file"
    ]
    return replay_file(path, name, budget=16, limit=25, row_cost=row_cost).row()


@pytest.mark.parametrize("name", ["ngram", "suffix", "auto"])
def test_code_edits_keep_long_chains(name: str) -> None:
    result = row(name, "code_edit_humanevalfix/edit_prompts.jsonl", row_cost=0.05)
    assert result["tokens_per_round"] > 4.0
    assert result["acceptance"] > 0.65


def test_prose_is_not_slowed_by_auto_where_rows_are_dear() -> None:
    result = row("auto", "gsm8k/test.jsonl", row_cost=0.25)
    assert result["speedup"] > 0.99
    assert result["drafted"] * result["drafting_share"] < 0.75

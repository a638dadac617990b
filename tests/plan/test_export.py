"""Exports: golden files, engines' rules, traps, and the real parser where it is installed."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import Infeasible, InvalidParameter
from paceline.plan.export import ENGINE_MODULES, render
from paceline.plan.export.base import Advice, Step, advice_of
from paceline.plan.planner import PlanRequest, make_plan

GOLDEN = Path(__file__).parent / "golden"
DRAFTS = {
    "ngram": None,
    "suffix": None,
    "layer-skip": None,
    "model": "org/draft",
    "eagle3": "org/eagle3",
    "mtp": None,
    "dflash": "org/dflash",
    "dspark": "org/dspark",
}
LACKS = {
    "vllm": {"layer-skip"}, "sglang": {"layer-skip", "suffix"}, "trtllm": {"layer-skip"},
    "llamacpp": {"layer-skip", "suffix"}, "transformers": {"eagle3", "dspark", "suffix"},
    "openvino": {"layer-skip", "suffix", "dspark"},
}  # fmt: skip


def advice(kind: str = "eagle3", **changes) -> Advice:
    made = Advice(
        model="org/target",
        kind=kind,
        draft=DRAFTS[kind],
        steps=(Step(1, 4, 5), Step(5, 16, 2), Step(17, 64, 0)),
        tensor=2,
        expert=1,
        replicas=1,
        sequences=16,
        dtype="bf16",
        kv_dtype="bf16",
        skip_layer=16,
        on=True,
        block=8,
    )
    return replace(made, **changes)


def rendered(engine: str, made: Advice, version: str | None = None):
    import importlib

    return importlib.import_module(ENGINE_MODULES[engine]).render(made, version)


@pytest.mark.parametrize("engine", ENGINE_MODULES)
@pytest.mark.parametrize("kind", DRAFTS)
def test_golden_files(engine: str, kind: str) -> None:
    """Set PACELINE_WRITE_GOLDEN=1 to write them anew, then read the difference."""
    if kind in LACKS[engine]:
        with pytest.raises(Infeasible, match="cannot draft with"):
            rendered(engine, advice(kind))
        return
    made = rendered(engine, advice(kind))
    text = "".join(f"== {n}\n{t}" for n, t in made.files.items()) + "".join(
        f"-- {w}\n" for w in made.warnings
    )
    path = GOLDEN / f"{engine}-{kind}.txt"
    if os.environ.get("PACELINE_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_vllm_table_follows_its_rules() -> None:
    """First range starts at 1, ranges do not overlap, lengths are at most num_speculative_tokens."""
    config = json.loads(rendered("vllm", advice()).files["speculative_config.json"])
    table = config["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1
    assert all(a[1] < b[0] for a, b in itertools.pairwise(table))
    assert max(k for _, _, k in table) == config["num_speculative_tokens"] == 5
    assert any("K = 0" in w for w in rendered("vllm", advice()).warnings)
    parallel = rendered("vllm", advice(tensor=1, expert=4))
    assert any("data parallelism" in w for w in parallel.warnings)
    long = json.loads(rendered("vllm", advice(steps=(Step(1, 4, 200),))).files["speculative_config.json"])
    assert long["num_speculative_tokens"] == 128


def test_sglang_adaptive_file_gives_the_schedule_back() -> None:
    """The engine takes the closest key at or below its batch: the file must answer as the plan does."""
    made = advice()
    table = json.loads(rendered("sglang", made).files["adaptive.json"])
    for batch in range(1, 65):
        key = max(int(k) for k in table if int(k) <= batch)
        assert table[str(key)]["candidate_steps"] == [made.length_at(batch)]
    launch = rendered("sglang", made).files["launch.sh"]
    assert "--max-running-requests 16" in launch
    assert "--speculative-num-steps 5" in launch
    assert "--speculative-num-draft-tokens 6" in launch
    assert "adaptive" not in rendered("sglang", advice(tensor=1, expert=4)).files["launch.sh"]


def test_trtllm_schedule_follows_its_rules() -> None:
    """Smallest key has max_draft_len; past the last key the engine drafts nothing, so 0 is never written."""
    text = rendered("trtllm", advice()).files["config.yaml"]
    assert "max_draft_len: 5" in text
    assert "draft_len_schedule: {4: 5, 16: 2}" in text
    assert "max_concurrency" not in text
    assert "is_public_pool: false" in rendered("trtllm", advice("ngram")).files["config.yaml"]


def test_llamacpp_uses_no_removed_option() -> None:
    for kind in ("model", "mtp", "ngram"):
        text = rendered("llamacpp", advice(kind)).files["launch.sh"]
        assert "--draft-max" not in text
        assert "--draft-min" not in text
    assert "--spec-draft-p-min" in rendered("llamacpp", advice("model")).files["launch.sh"]
    assert "--spec-draft-n-max 2" in rendered("llamacpp", advice("model")).files["launch.sh"]


@pytest.mark.parametrize("engine", ENGINE_MODULES)
def test_no_speculation_is_exported_as_none(engine: str) -> None:
    made = rendered(engine, advice(on=False, kind="none" if engine == "none" else "eagle3", steps=()))
    text = "".join(made.files.values())
    assert "spec" not in text.replace("specif", "").replace("skip_special", "")
    assert any("no speculation" in w for w in made.warnings)


@pytest.mark.parametrize("engine", ENGINE_MODULES)
def test_other_versions_are_warned_of(engine: str) -> None:
    kind = "model"
    assert any("0.1.0" in w for w in rendered(engine, advice(kind), "0.1.0").warnings)
    with pytest.raises(InvalidParameter, match="version"):
        rendered(engine, advice(kind), "newest")


def test_transformers_takes_the_configuration() -> None:
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    for kind in sorted(set(DRAFTS) - LACKS["transformers"]):
        config = json.loads(rendered("transformers", advice(kind)).files["generation_config.json"])
        found = transformers.GenerationConfig(**config)
        found.validate()
        for key, value in config.items():
            assert getattr(found, key) == value
            assert hasattr(transformers.GenerationConfig(), key)


def test_shell_quoting() -> None:
    import shlex

    words = shlex.split(rendered("vllm", advice(model="my models/a b")).files["launch.sh"])
    assert words[2] == "my models/a b"
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "eagle3"


def test_a_plan_is_reduced_to_its_own_context_band() -> None:
    plan = make_plan(
        PlanRequest("llama-3.1-8b", "h100", drafts=(("eagle3:org/e", "AL:2.5@4"),), concurrency=64)
    )
    made = advice_of(plan)
    assert made.model == "meta-llama/Llama-3.1-8B"
    assert made.draft == "org/e"
    assert made.steps[0].first == 1
    assert made.sequences == 64
    assert set(render(plan, "vllm").files) == {"launch.sh", "speculative_config.json"}
    with pytest.raises(InvalidParameter, match="vllm"):
        render(plan, "ollama")

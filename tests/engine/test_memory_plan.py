"""What fits into memory: the arithmetic, what the machine says, and models that are given little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save_folder, tiny_backend, tiny_model
from toy import FAULTS, Lab, ToyModel, hashed

from paceline.core.sampling import SamplingParams
from paceline.decode.engine import EngineOptions
from paceline.decode.llm import LLM
from paceline.decode.memory import (
    LOGIT_COPIES,
    available_memory_bytes,
    cgroup_headroom_bytes,
    parse_bytes,
    plan_memory,
    workspace_bytes,
)
from paceline.errors import InvalidParameter, RequestTooLarge, UsageError

GB = 10**9
KV = 160_000  # bytes a token, of a target of 70 billion weights


@FAULTS
def test_pl_04_draft_weights_and_draft_cache_are_counted(lab: Lab, fault: bool) -> None:
    """80 GB, 60 GB of target, 6 GB of draft whose cache is an eighth. The fault sizes from the target alone."""

    def check() -> None:
        draft, eighth, workspace = (0, 0, 0) if fault else (6 * GB, KV // 8, GB)
        plan = plan_memory(
            int(80 * GB * 0.95), 60 * GB, draft, workspace, lambda t: (t * KV, t * eighth), 4096,
            lowest_context=4096, slots=10**6,
        )  # fmt: skip
        tokens = (80 * GB * 0.95 - 60 * GB - 6 * GB - GB) / (KV * 1.125)
        assert plan.cache is not None and plan.draft_cache is not None
        assert plan.cache // KV == int(tokens) and plan.sequences == int(tokens / 4096)
        assert plan.draft_cache == pytest.approx(plan.cache / 8, rel=1e-6)

    lab.judge(fault, check)


@FAULTS
def test_pl_05_the_workspace_is_that_of_full_draft_length(lab: Lab, fault: bool) -> None:
    """16 sequences, 248,320 ids, D = 16: 272 rows of float32 logits are 258 MiB a copy. The fault takes D = 1."""
    target: Any = ToyModel(hashed(8), 8)
    target.vocab_width = 248_320
    config = SimpleNamespace(hidden_size=64, intermediate_size=256)

    def check() -> None:
        options = EngineOptions(max_batch=16, max_draft=1 if fault else 16)
        none = workspace_bytes(target, config, replace(options, max_draft=-1))
        assert (workspace_bytes(target, config, options) - none) / LOGIT_COPIES / 2**20 == pytest.approx(258, abs=0.5)

    lab.judge(fault, check)


def test_the_context_is_lowered_only_where_it_was_not_asked_for() -> None:
    def plan(left: int, lowest: int) -> Any:
        return plan_memory(100 + left, 60, 30, 10, lambda t: (t, t), 4096, lowest_context=lowest, slots=4)

    assert plan(8192, 512).context == 4096 and plan(8192, 512).sequences == 1
    assert plan(8191, 512).context == 3584
    assert plan(10**6, 512).cache == 4 * 4096, "no more than there are slots"
    for left, lowest in ((8191, 4096), (1000, 512)):
        with pytest.raises(UsageError, match=r"one sequence of (4096|512) tokens needs .* leaves"):
            plan(left, lowest)
    assert "1 sequence of 3584 tokens" in str(plan(8191, 512))


def test_a_pass_stays_within_its_workspace() -> None:
    """PL-05's start-up at full draft length, counted: what one pass of a tiny model allocates at its peak."""
    from tiny_decoders import tiny_decoder

    from paceline.decode.model.step import Span, build_inputs

    decoder = tiny_decoder()
    options = EngineOptions(max_batch=4, max_draft=15, max_context=128)
    cache = decoder.new_cache(4, 128)
    slots = [cache.allocate(128) for _ in range(4)]
    for width, prefill in ((16, False), (96, True)):
        spans = [Span(slot, 0, [1] * width, prefill=prefill) for slot in slots]
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            decoder.forward(build_inputs(spans, cache.capacity, decoder.geometry, decoder.row_policy), cache)
        held = peak = 0
        for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        assert 0 < peak <= workspace_bytes(decoder, decoder.config, options)


def test_control_groups(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    own.write_text("0::/a/b\n")

    def limit(folder: Path, most: str, used: int, file_pages: int) -> None:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {file_pages}\n")

    limit(inner, "max", 10, 0)
    assert cgroup_headroom_bytes(own, root) is None
    limit(root / "a", "1000", 700, 50)
    assert cgroup_headroom_bytes(own, root) == 350, "the group above sets the limit"
    limit(inner, "200", 300, 0)
    assert cgroup_headroom_bytes(own, root) == 0
    old = root / "memory" / "x"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    (old / "memory.stat").write_text("total_inactive_file 20\n")
    own.write_text("4:cpu,memory:/x\n2:pids:/x\n")
    assert cgroup_headroom_bytes(own, root) == 420
    assert cgroup_headroom_bytes(tmp_path / "none", root) is None
    free = available_memory_bytes()
    assert free is None or free > 0


def test_bytes_as_people_write_them() -> None:
    assert [parse_bytes(t) for t in ("auto", "6GiB", "1.5kb", "800MB", "12")] == [None, 6 << 30, 1500, 8 * 10**8, 12]
    for text in ("", "much", "-1", "0", "6 GX", "0GB"):
        with pytest.raises(InvalidParameter, match="max-memory"):
            parse_bytes(text)


def test_a_model_given_little_memory(tmp_path: Path) -> None:
    """Two sequences' worth of cache among eight lanes: everything is answered; the too large is refused."""
    folder = str(save_folder(tmp_path / "m", tiny_model(max_position_embeddings=2048), tiny_backend()))
    roomy = LLM(folder, draft="ngram", dtype="float32", max_batch=3)
    memory = roomy.memory
    assert memory.cache is not None and "sequences of 2048 tokens" in str(memory)
    beside = memory.weights + memory.draft_weights + memory.workspace
    small = LLM(folder, draft="ngram", dtype="float32", max_batch=3, max_memory=beside + roomy.engine.cache.cost(1024))
    assert small.max_context == 1024 and small.memory.sequences == 1
    params = SamplingParams(max_tokens=40)
    prompts = [[3 + i] * (300 + 150 * i) for i in range(3)]
    outputs = [small.generate(prompts, params), roomy.generate(prompts, params)]
    assert [o.completions[0].token_ids for o in outputs[0]] == [o.completions[0].token_ids for o in outputs[1]]
    with pytest.raises(RequestTooLarge, match=r"1100 tokens .* holds 1024"):
        small.generate([[5] * 1000], SamplingParams(max_tokens=100))
    with pytest.raises(UsageError, match="--max-memory"):
        LLM(folder, draft="ngram", dtype="float32", max_batch=3, max_context=2048, max_memory=small.memory.limit)

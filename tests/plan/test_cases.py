"""Faults seen in public planners and engines (cases PL-xx), as far as they are planning.

Each test states what is right as a function of the result, holds the planner to it, and then turns the fault
on to see that the statement would catch it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import scenario

from paceline.errors import UsageError
from paceline.plan import importers, rounds
from paceline.plan.acceptance import Acceptance, Mixture, acceptance_from_share, constant_acceptance
from paceline.plan.config import find_model, shape_from_config
from paceline.plan.frontier import candidate
from paceline.plan.guidelines import layer_ratio
from paceline.plan.hardware import find_hardware
from paceline.plan.mechanisms import Mechanism
from paceline.plan.memory import cache_capacity_tokens, max_batch, verify_workspace_bytes
from paceline.plan.planner import PlanRequest, make_plan
from paceline.plan.rounds import Grid
from paceline.plan.scenario import Load, Scenario
from paceline.plan.schedule import HYSTERESIS, best_lengths, make_schedule


def holds_and_catches(right: Callable[[bool], None]) -> None:
    """`right(False)` passes; `right(True)`, with the fault injected, fails."""
    right(False)
    with pytest.raises(AssertionError):
        right(True)


def test_pl_01_fixed_draft_budget_at_high_concurrency() -> None:
    """Draft lengths never rise with load, and are 0 where every length loses."""
    s = scenario(prompt=1024, output=512)
    chat = candidate(
        s, Mechanism("suffix"), constant_acceptance(0.12, "low repeat"), range(1, 65), 16, [1280.0]
    )
    edit = candidate(
        s, Mechanism("suffix"), constant_acceptance(0.95, "high repeat"), range(1, 65), 16, [1280.0]
    )

    def right(fault: bool) -> None:
        for c in (chat, edit):
            (band,) = make_schedule(c.grid)
            chosen = [16 if fault else band.length_at(b) for b in (1, 4, 16, 32, 64)]
            assert all(b <= a for a, b in itertools.pairwise(chosen))
            for b, d in zip((1, 4, 16, 32, 64), chosen, strict=True):
                speed = c.grid.speedup[b - 1, :, 0]
                assert speed[d] >= 0.95 * speed.max()
                assert d == 0 or speed[d] > 1

    holds_and_catches(right)


def test_pl_02_hard_switch_at_a_threshold() -> None:
    """A load that hovers between 4 and 5 requests does not switch every round."""
    lengths, batches = np.array([0.0, 2.0]), np.arange(1.0, 33)
    round_s = np.stack([np.ones(32), np.where(batches <= 4, 1.5, 3.0)], axis=1)[:, :, None]
    tokens = np.array([1.0, 2.0])[None, :, None]
    zero = np.zeros((32, 2, 1))
    grid = Grid(
        batches, lengths, np.array([100.0]), round_s, round_s, zero, round_s[:, :1] * 1.2, tokens, zero, 1
    )
    (band,) = make_schedule(grid)
    assert [(e.first, e.last, e.length) for e in band.entries] == [(1, 4, 2), (5, 32, 0)]

    def right(fault: bool) -> None:
        first = band.entries[0]
        leave, back = (4, 5) if fault else (first.leave_above, first.return_below)
        length, switches = 2, 0
        for load in [4, 5] * 50:
            wanted = 0 if load > leave else 2 if load <= back else length
            switches += wanted != length
            length = wanted
        assert switches <= 1
        assert leave >= 4 * (1 + HYSTERESIS)

    holds_and_catches(right)


def test_pl_03_acceptance_from_random_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"dataset_name": "random", "accept_length": 1.4}), encoding="utf-8")

    def right(fault: bool) -> None:
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(importers, "_refuse_unreal", lambda value, name: None)
            try:
                importers.read_acceptance(f"{path}@3")
                refused = False
            except UsageError as error:
                refused = "real prompts" in str(error)
            assert refused

    holds_and_catches(right)


def test_pl_04_draft_memory_is_counted() -> None:
    """80 GB at .95, 60 GB of target, 6 GB of drafter, draft cache an eighth of the target's."""
    workspace, kv = 1e9, 327_680.0

    def right(fault: bool) -> None:
        draft = (0.0, 0.0) if fault else (6e9, kv / 8)
        tokens = cache_capacity_tokens(80e9, 0.95, 60e9, draft[0], workspace, kv, draft[1])
        assert tokens == pytest.approx((80e9 * 0.95 - 60e9 - 6e9 - workspace) / (kv * 9 / 8))

    holds_and_catches(right)
    s = scenario("llama-3.1-70b", "h200", "fp8")
    plain = max_batch(s, Mechanism("none"), 0, 4096)
    assert max_batch(s, Mechanism("model", model=find_model("llama-3.1-8b")), 4, 4096) < 0.8 * plain


def test_pl_05_workspace_at_the_full_draft_length() -> None:
    """16 sequences, D = 16, vocabulary 248,320: 272 rows, about 258 MiB a copy."""

    def right(fault: bool) -> None:
        size = verify_workspace_bytes(16, 1 if fault else 16, 248_320, copies=1)
        assert size == 272 * 248_320 * 4
        assert size / 2**20 == pytest.approx(258, abs=1)

    holds_and_catches(right)


def test_pl_06_active_parameters_not_total() -> None:
    """397 B with 17 B active, a 9 B drafter, D = 3, acceptance .7: at most .98 times, so off."""
    nine = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 12288, "vocab_size": 248320, "tie_word_embeddings": True}  # fmt: skip
    draft = shape_from_config("nine", nine, "test")
    shape = find_model("qwen3.5-397b-a17b")
    assert draft.active_parameters == pytest.approx(9e9, rel=0.12)
    hardware = dataclasses.replace(find_hardware("m3-ultra"), memory_bytes=1e12)
    s = Scenario(shape, hardware, Load(200, 400))
    c = candidate(s, Mechanism("model", model=draft), constant_acceptance(0.7, "test"), [1], 3, [400.0])

    def right(fault: bool) -> None:
        ratio = draft.parameters / shape.parameters if fault else layer_ratio(c.mechanism, c)
        assert ratio == pytest.approx(9 / 17, rel=0.15)
        assert 2.533 / (3 * ratio + 1) < 1.02

    holds_and_catches(right)
    assert float(c.grid.speedup[0, 3, 0]) < 1.0
    assert best_lengths(c.grid)[0] == 0


def test_pl_07_verification_is_not_flat() -> None:
    """Measured passes of 8.47, 13.49, 15.64, 20.67, 28.13 ms at D = 0, 1, 2, 4, 7: D = 2 is best."""
    lengths = np.array([0.0, 1, 2, 4, 7])
    costs = np.array([8.47, 13.49, 15.64, 20.67, 28.13])
    tokens = constant_acceptance(0.7, "test").lengths(7)[lengths.astype(int)]

    def right(fault: bool) -> None:
        shape = (1, 5, 1)
        seconds = (np.full(5, 8.47) if fault else costs).reshape(shape)
        zero = np.zeros(shape)
        grid = Grid(
            np.ones(1),
            lengths,
            np.ones(1),
            seconds,
            seconds,
            zero,
            seconds[:, :1],
            tokens.reshape(shape),
            zero,
            1,
        )
        np.testing.assert_allclose(grid.speedup[0, :, 0], [1.0, 1.07, 1.19, 1.14, 0.95], atol=0.012)
        assert best_lengths(grid)[0] == 2

    holds_and_catches(right)


def test_pl_08_share_length_and_acceptance_are_three_things() -> None:
    def right(fault: bool) -> None:
        found = constant_acceptance(0.416, "x") if fault else acceptance_from_share(0.416, 8, "x")
        assert found.conditional[0] == pytest.approx(0.8, abs=1e-3)
        assert float(found.lengths(2)[2]) - 1 == pytest.approx(1.44, abs=0.005)
        assert (float(found.lengths(2)[2]) - 1) / 2 == pytest.approx(0.72, abs=0.003)

    holds_and_catches(right)
    assert float(constant_acceptance(0.8, "x").lengths(8)[8]) == pytest.approx(4.33, abs=0.005)


def test_pl_09_time_to_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """8k prompts, 20 tokens of answer: the drafter's prefill and first round stand before the first token."""
    s = scenario("llama-3.1-8b", "h100", prompt=8192, output=20)
    draft = Mechanism("model", model=find_model("llama-3.2-3b"))

    def right(fault: bool) -> None:
        with monkeypatch.context() as patch:
            if fault:
                whole = rounds.prefill_seconds
                patch.setattr(rounds, "prefill_seconds", lambda s, m=None, b=1.0: whole(s, None, b))
            c = candidate(s, draft, constant_acceptance(0.7, "test"), [1, 16], 4, [8200.0])
            own = float(rounds.prefill_seconds(s, draft)) - float(rounds.prefill_seconds(s))
            assert own > 0.02
            assert c.first_token_s[0, 4, 0] - c.first_token_s[0, 0, 0] >= own
        ngram = candidate(s, Mechanism("ngram"), constant_acceptance(0.7, "test"), [1, 16], 4, [8200.0])
        assert ngram.first_token_s[0, 4, 0] - ngram.first_token_s[0, 0, 0] < 0.005

    holds_and_catches(right)
    limit = float(rounds.prefill_seconds(s)) * 1.15
    plan = make_plan(PlanRequest("llama-3.1-8b", "h100", context_tokens=8192, output_tokens=20, concurrency=1,
                                 max_ttft=limit, drafts=(("model:llama-3.2-3b", "0.7"),)))  # fmt: skip
    assert plan["answer"]["best"]["mechanism"] == "none"


def test_pl_11_prefill_bound_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(prompt: float, output: float):
        return make_plan(PlanRequest("llama-3.1-8b", "h100", context_tokens=prompt, output_tokens=output,
                                     drafts=(("ngram:0.3", "0.4,0.3"),)))  # fmt: skip

    def right(fault: bool) -> None:
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(rounds, "prefill_seconds", lambda s, m=None, b=1.0: np.zeros(np.shape(b)))
            long = plan(4000, 30)
            assert any("prefill is the limit" in w for w in long["warnings"])
            assert long["answer"]["best"]["draft_length"] == 0

    holds_and_catches(right)
    assert not any("prefill is the limit" in w for w in plan(100, 800)["warnings"])


def test_pl_14_acceptance_per_temperature(tmp_path: Path) -> None:
    """Greedy .8, temperature .7 .5, temperature 1 .01: the mixture counts them all, the last runs without
    drafts.
    """
    parts = ((0.5, 0.0, 0.8), (0.3, 0.7, 0.5), (0.2, 1.0, 0.01))

    def right(fault: bool) -> None:
        used = parts[:1] if fault else parts
        total = sum(p[0] for p in used)
        mixture = Mixture(tuple((w / total, Acceptance((a,), f"T={t}", temperature=t)) for w, t, a in used))
        merged = mixture.merged()
        assert len(merged.parts) == 3
        assert float(merged.lengths(4)[4]) < 2.0 < float(constant_acceptance(0.8, "x").lengths(4)[4])

    holds_and_catches(right)
    groups = [{"name": f"T={t}", "share": w, "temperature": t, "acceptance": [a] * 4} for w, t, a in parts]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": "paceline.acceptance/1", "groups": groups}), encoding="utf-8")
    plan = make_plan(PlanRequest("llama-3.1-8b", "h100", concurrency=8, drafts=(("eagle3", str(path)),)))
    assert any("T=1.0" in w and "without speculation" in w for w in plan["warnings"])
    assert not any("T=0.0" in w and "without speculation" in w for w in plan["warnings"])


def test_pl_15_acceptance_by_context() -> None:
    """.75 up to 2k tokens and .05 beyond: the draft length goes to 0 past the drafter's reach."""
    bands = ((2048.0, (0.75,) * 4), (float("inf"), (0.05,) * 4))

    def right(fault: bool) -> None:
        a = Acceptance((0.75,) * 4, "x", by_context=() if fault else bands)
        c = candidate(
            scenario(prompt=900, output=200), Mechanism("eagle3"), a, range(1, 17), 4, [1000.0, 16_000.0]
        )
        short, long = make_schedule(c.grid)
        assert short.length_at(4) > 0
        assert long.length_at(4) == 0

    holds_and_catches(right)

"""Faults seen in public engines: sampling options, seeds and log-probabilities. Each is seen red with its fault in.

Chi-square checks fail below p = 1e-4 and use fixed seeds: a false alarm had a chance of one in ten thousand each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import plain_decode, scores
from scipy import stats
from toy import FAULTS, Lab, ToyModel, following, hashed, request

import paceline.decode.engine as engine_module
import paceline.decode.judge as judge_module
import paceline.decode.outcome as outcome_module
import paceline.decode.stopping as stopping_module
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.engine import Engine
from paceline.decode.sequence import Request
from paceline.decode.verify import options as options_module
from paceline.decode.verify.prefix import PrefixState
from paceline.errors import RequestFailed

WIDTH, EOS = 16, 15
FALSE_ALARM = 1e-4
TARGET = hashed(WIDTH, seed=11)


def oracle(ask: Request, **options: Any) -> Any:
    logits = options.pop("logits", TARGET)
    return plain_decode(logits, ask.prompt, ask.params, **({"vocab_size": WIDTH} | options))


def knows(answers: dict[tuple[int, ...], list[int]], plan: Sequence[Any]) -> Callable[[SequenceView, int], list[int]]:
    """Follows the answer known for a prompt, as far as the plan says."""
    return following(lambda view: answers[tuple(view.tokens[: view.prompt_len])], plan, WIDTH)


def assert_law(counts: np.ndarray, law: np.ndarray) -> None:
    possible = law > 0
    assert counts[~possible].sum() == 0, "an impossible token"
    pvalue = stats.chisquare(counts[possible], law[possible] / law.sum() * counts.sum()).pvalue
    assert pvalue > FALSE_ALARM, f"counts {counts}, law {law}, p = {pvalue:.1e}"


@FAULTS
def test_sd_06_min_tokens_inside_a_block(lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """The target wants the end from index 5 on; it may have it from index 8, in the middle of a block."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = TARGET(prefix).copy()
        row[EOS] = 20.0 if len(prefix) - 1 >= 5 else -20.0
        return row

    if fault:  # the counter moves once a step
        steps: Counter[int] = Counter()
        commit = PrefixState.commit

        def counted(self: PrefixState, tokens: Sequence[int]) -> None:
            steps[id(self)] += 1
            commit(self, tokens)

        def early(row: torch.Tensor, params: SamplingParams, prefix: PrefixState, paths: Any) -> None:
            if steps[id(prefix)] < params.min_tokens:
                row[:, EOS] = -math.inf

        monkeypatch.setattr(PrefixState, "commit", counted)
        monkeypatch.setattr(options_module, "_forbid_ends", early)
        monkeypatch.setattr(options_module, "has_options", lambda params, prefix: True)
        monkeypatch.setattr(judge_module, "is_plain_greedy", lambda params, prefix: False)
        monkeypatch.setattr("paceline.decode.verify.probabilities.has_options", lambda params, prefix: True)
    ask = request([0], length=4, min_tokens=8, max_tokens=40)
    plain = oracle(ask, logits=logits, eos=[EOS])
    assert len(plain.tokens) == 9 and plain.tokens.index(EOS) == 8

    def check() -> None:
        engine = lab.engine(ToyModel(logits, WIDTH), knows({(0,): plain.tokens}, [(4, 4)]), eos=[EOS])
        ran = lab.one(engine, ask)
        assert (ran.tokens, ran.reason) == (plain.tokens, "stop")
        assert len(ran.deltas[-1].token_ids) > 1, "the end did not lie inside a block"

    lab.judge(fault, check)


@pytest.mark.parametrize("fault", [None, "last accepted only", "rejected drafts too", "nothing in the block"])
@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 1.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}], ids=str
)
def test_sd_11_penalties_see_accepted_drafts_and_nothing_rejected(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, options: dict[str, float], fault: str | None
) -> None:
    def loops(prefix: tuple[int, ...]) -> np.ndarray:
        """Wants x = 2 always; the others follow closely, so that a penalty counted wrongly shows."""
        row = hashed(WIDTH, seed=5, scale=0.3, order=1)(prefix).copy()
        row[2] = row.max() + 0.4
        return row + 3

    asks = [request([i], id=str(i), length=4, max_tokens=30, **options) for i in range(4)]
    answers = {r.prompt: oracle(r, logits=loops).tokens for r in asks}
    if fault == "last accepted only":
        commit = PrefixState.commit
        monkeypatch.setattr(PrefixState, "commit", lambda self, tokens: commit(self, tokens[-1:]))
    if fault == "nothing in the block":
        monkeypatch.setattr(judge_module, "row_paths", lambda proposal: [[]] * (1 + len(proposal)))
    if fault == "rejected drafts too":
        whole = lambda proposal: [list(proposal.tokens)] * (1 + len(proposal))  # noqa: E731
        monkeypatch.setattr(judge_module, "row_paths", whole)

    def check() -> None:
        def drafts(view: SequenceView, budget: int) -> list[int]:
            half = knows(answers, [2, (4, 4), 1])(view, budget)
            return [2, 2, 2, 2][:budget] if len(view.tokens) % 2 else half

        results = lab.run(lab.engine(ToyModel(loops, WIDTH), drafts), asks)
        for r in asks:
            assert results[r.request_id][0].tokens == answers[r.prompt]
        assert sum(results[r.request_id][0].sequence.stats.accepted for r in asks) > 20

    lab.judge(fault is not None, check)


HONOURED: dict[str, dict[str, Any]] = {
    "frequency -2": {"frequency_penalty": -2.0},
    "frequency +2": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.8},
    "min_p": {"min_p": 0.9, "temperature": 2.0},
    "bias": {"logit_bias": {7: 100.0}},
    "bad_words": {"bad_words": tuple((i,) for i in range(0, 14, 2))},
    "allowed": {"allowed_token_ids": (1, 4, 9)},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 9.0}},
}


@FAULTS
@pytest.mark.parametrize("name", HONOURED)
def test_sd_12_every_option_counts_with_drafts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str, fault: bool
) -> None:
    options = HONOURED[name]
    ask = request([3, 1], length=4, max_tokens=24, seed=1, **options)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = TARGET(prefix).copy()
        row[EOS] -= 6.0
        return row

    plain = oracle(ask, logits=logits, eos=[EOS])
    if fault and name == "ignore_eos":
        init = stopping_module.StopChecker.__init__
        dropped = lambda self, params, *rest: init(self, replace(params, ignore_eos=False), *rest)  # noqa: E731
        monkeypatch.setattr(stopping_module.StopChecker, "__init__", dropped)
    elif fault:  # the option is dropped where rows are judged
        keep = {"temperature": options.get("temperature", 0.0)}
        monkeypatch.setattr(judge_module, "is_plain_greedy", lambda params, prefix: False)
        draw = judge_module.draw
        monkeypatch.setattr(judge_module, "draw", lambda rows, params, *rest: draw(rows, SamplingParams(**keep), *rest))

    def check() -> None:
        engine = lab.engine(ToyModel(logits, WIDTH), knows({(3, 1): plain.tokens}, [3, (4, 4), 0]), eos=[EOS])
        ran = lab.one(engine, ask)
        assert (ran.tokens, ran.reason) == (plain.tokens, plain.reason)
        assert ran.sequence.stats.accepted >= 4

    lab.judge(fault, check)


@FAULTS
def test_sd_13e_nan_logits_end_one_request_of_four(lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = TARGET(prefix)
        return np.full_like(row, np.nan) if prefix[0] == 2 and len(prefix) > 6 else row

    temperatures = [0.0, 0.9, 0.0, 0.9]
    asks = [request([i], id=str(i), length=4, max_tokens=20, seed=i, temperature=t) for i, t in enumerate(temperatures)]
    plains = [oracle(r, logits=logits) for r in asks]
    answers = {r.prompt: plain.tokens for r, plain in zip(asks, plains, strict=True)}
    if fault:  # one failure is everybody's
        sound = engine_module.judge

        def together(*arguments: Any) -> Any:
            verdicts = sound(*arguments)
            failures = [v for v in verdicts if isinstance(v, RequestFailed)]
            return failures[:1] * len(verdicts) if failures else verdicts

        monkeypatch.setattr(engine_module, "judge", together)

    def check() -> None:
        engine = lab.engine(ToyModel(logits, WIDTH), knows(answers, [3, 1]))
        results = lab.run(engine, asks)
        for r, plain in zip(asks, plains, strict=True):
            (ran,) = results[r.request_id]
            assert (ran.tokens, ran.reason) == (plain.tokens, plain.reason)
            assert (ran.sequence.error is None) == (r.request_id != "2")
        assert "NaN" in str(results["2"][0].sequence.error) and results["2"][0].deltas[-1].error is not None

    lab.judge(fault, check)


@FAULTS
@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 2, 5], [6, 3, 0]], ids=str)
def test_sd_14_seeded_and_unseeded_in_one_batch(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, arrivals: list[int], fault: bool
) -> None:
    a = request([1], id="a", length=4, max_tokens=20)
    b = request([2], id="b", length=4, max_tokens=25, temperature=0.8, seed=7)
    c = request([3], id="c", length=4, max_tokens=30, temperature=0.8)
    answers = {r.prompt: oracle(r).tokens for r in (a, b)} | {(3,): [1] * 30}
    if fault:  # one stream for the batch, moved by whoever draws
        stream = iter(range(10**9))
        monkeypatch.setattr(judge_module, "position_key", lambda key, position, purpose: next(stream))

    def check() -> None:
        engine = lab.engine(ToyModel(TARGET, WIDTH), knows(answers, [2, (4, 4), 0]))
        results = lab.run(engine, [a, b, c], arrivals)
        assert results["a"][0].tokens == answers[1,] and results["b"][0].tokens == answers[2,]
        assert len(results["c"][0].tokens) == 30

    lab.judge(fault, check)


@FAULTS
def test_sd_15_unseeded_requests_have_streams_of_their_own(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """200 unseeded answers on two engines. The seeds are drawn afresh here too, from a generator of this test."""
    law = np.zeros(WIDTH, dtype=np.float32)
    law[8:] = -np.inf
    generator = np.random.default_rng(4)
    fresh = lambda bits: 12345 if fault else int(generator.integers(2**bits))  # noqa: E731
    monkeypatch.setattr(engine_module.secrets, "randbits", fresh)

    def answers() -> list[tuple[int, ...]]:
        engine = lab.engine(ToyModel(lambda prefix: law, WIDTH), lambda v, b: [1] * b)
        return [
            tuple(lab.one(engine, request([0], length=2, temperature=1.0, max_tokens=3)).tokens) for _ in range(200)
        ]

    def check() -> None:
        first, second = answers(), answers()
        for run in (first, second):
            assert_law(np.bincount([tokens[0] for tokens in run], minlength=WIDTH), (law == 0).astype(float))
        assert first != second
        pairs = 200 * 199 / 2
        twins = sum(count * (count - 1) / 2 for count in Counter(first).values())
        assert abs(twins - pairs / 512) < 6 * math.sqrt(pairs / 512), "more equal answers than plain decoding gives"

    lab.judge(fault, check)


def test_sd_15_the_engine_asks_the_system_for_seeds(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH))
    ids = [str(i) for i in range(50)]
    keys = {engine.add(request([0], id=i, draft="none", temperature=1.0))[0].noise_key for i in ids}
    assert len(keys) == 50
    for i in ids:
        engine.cancel(i)
    engine.step()


@pytest.mark.parametrize("fault", [None, -1, 0, WIDTH - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sd_21_ragged_drafts_have_no_placeholder(lab: Lab, temperature: float, fault: int | None) -> None:
    """0, 2 and 5 drafts and a row without a drafter in one step; ids 0 and the last are ordinary words.

    The fault pads every row to the longest with a placeholder: looked up, accepted or counted as drafted.
    """
    lengths = {1: 0, 2: 2, 3: 5}
    asks = [
        request([i], id=str(i), length=5, max_tokens=24, temperature=temperature, seed=i, repetition_penalty=1.3)
        for i in lengths
    ]
    asks.append(request([4], id="4", draft="none", max_tokens=24, temperature=temperature, seed=4))
    plains = {r.prompt: oracle(r).tokens for r in asks}
    drafted: Counter[int] = Counter()

    class Padded(Engine):
        def _propose(self, batch: Any) -> Any:
            made = super()._propose(batch)
            longest = max(len(p) for p in made)
            chain = type(made[0]).chain
            return [chain([*p.tokens, *[fault] * (longest - len(p))], "scripted") if len(p) else p for p in made]

    def drafts(view: SequenceView, budget: int) -> list[int]:
        made = knows(plains, [(3, lengths[view.tokens[0]])])(view, budget)
        drafted[view.tokens[0]] += len(made)
        return made

    def check() -> None:
        engine = lab.engine(ToyModel(TARGET, WIDTH), drafts, kind=Engine if fault is None else Padded)
        results = lab.run(engine, asks)
        for r in asks:
            (ran,) = results[r.request_id]
            assert ran.tokens == plains[r.prompt]
            assert ran.sequence.stats.drafted == drafted[r.prompt[0]], "a placeholder counts as drafted"
        assert {0, WIDTH - 1} & {t for tokens in plains.values() for t in tokens}

    lab.judge(fault is not None, check)


@FAULTS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sd_28_logprobs_of_accepted_drafts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, temperature: float, fault: bool
) -> None:
    ask = request([5], length=4, max_tokens=64, temperature=temperature, seed=3, logprobs=5)
    plain = oracle(ask)
    if fault:
        sound = outcome_module.token_logprobs

        def filled(logits: torch.Tensor, *rest: Any) -> Any:
            values = sound(logits, *rest)
            chosen = values.chosen.clone()
            chosen[:-1] = 0.0
            return replace(values, chosen=chosen)

        monkeypatch.setattr(outcome_module, "token_logprobs", filled)

    def check() -> None:
        ran = lab.one(lab.engine(ToyModel(TARGET, WIDTH), knows({(5,): plain.tokens}, [2, (4, 4), 0, 1])), ask)
        assert ran.tokens == plain.tokens and len(ran.logprobs) == 64
        assert 15 < ran.sequence.stats.accepted < 64
        for i, entry in enumerate(ran.logprobs):  # the teacher-forced scoring pass
            chosen, ranked = scores(TARGET((5, *ran.tokens[:i])), ran.tokens[i])
            assert abs(entry.logprob - chosen) < 1e-4
            assert [t for t, _ in entry.top] == [t for t, _ in ranked[:5]]
            assert max(abs(a - b) for (_, a), (_, b) in zip(entry.top, ranked, strict=False)) < 1e-4

    lab.judge(fault, check)


@FAULTS
@pytest.mark.parametrize("length", range(1, 6))
def test_marginals_at_first_and_later_positions(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, length: int, fault: bool
) -> None:
    """The law of each of seven output positions, exact for a target that looks at one token, over 300 choices.

    Blocks begin at every position, since drafts are right about half the time. 7 positions and 5 lengths: some
    false alarm in 35 tests had a chance below 0.4 %. The fault takes every draft of an
    odd id.
    """
    width = 6
    one = hashed(width, seed=21, scale=1.0, order=1)
    step = np.stack([_softmax(one((token,))) for token in range(width)])
    if fault:
        sound = judge_module.walk

        def lenient(proposal: Any, draws: Any) -> Any:
            taken = [d if d % 2 else t for d, t in zip(proposal.tokens, draws[:-1], strict=True)]
            return sound(proposal, [*taken, draws[-1]])

        monkeypatch.setattr(judge_module, "walk", lenient)

    def check() -> None:
        engine = lab.engine(
            ToyModel(one, width), lambda v, b: [(v.tokens[-1] + i + v.key) % width for i in range(b)], max_batch=64
        )
        ask = request([2], length=length, temperature=1.0, seed=31 + length, n=100 if fault else 300, max_tokens=7)
        tokens = np.array([ran.tokens for ran in lab.run(engine, [ask])["r"]])
        law = np.eye(width)[2]
        for position in range(7):
            law = law @ step
            assert_law(np.bincount(tokens[:, position], minlength=width), law)
        accepted = sum(r.accepted for r in lab.records)
        assert accepted > 50

    lab.judge(fault, check)


def _softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64))
    return weights / weights.sum()

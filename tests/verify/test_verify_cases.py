"""Faults seen in public engines, as far as they lie between logits and verdicts. Each is also injected.

Every check runs twice: on this package, where it must pass, and with the fault in place, where it must fail.
Chi-square checks use fixed seeds and fail below p = 1e-4: a false alarm had a chance of one in ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import verify_twins as twins
from scipy import stats
from torch import Tensor

from paceline.core.proposal import Proposal
from paceline.core.sampling import SamplingParams
from paceline.decode.verify.coupled import verify_coupled
from paceline.decode.verify.noise import Purpose, exponential_noise, position_keys, request_key, uniform_noise
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.probabilities import draw, greedy_tokens, to_probs
from paceline.decode.verify.rules import row_paths, walk
from paceline.errors import RequestFailed

FALSE_ALARM = 1e-4
T1 = SamplingParams(temperature=1.0)
FAULTS = pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])


def judge(fault: bool, check: Callable[[], None]) -> None:
    """The check passes, or, with its fault injected, fails."""
    if not fault:
        check()
        return
    with pytest.raises(AssertionError):
        check()


def assert_law(tokens: Sequence[int] | np.ndarray, law: Sequence[float]) -> None:
    counts = np.bincount(np.asarray(tokens), minlength=len(law))
    expected = np.asarray(law) / np.sum(law) * len(tokens)
    possible = expected > 0
    assert counts[len(law) :].sum() == 0 and counts[: len(law)][~possible].sum() == 0, "an impossible token"
    pvalue = stats.chisquare(counts[possible], expected[possible]).pvalue
    assert pvalue > FALSE_ALARM, f"frequencies {counts / len(tokens)}, law {law}, p = {pvalue:.1e}"


def request_keys(count: int) -> Tensor:
    return torch.tensor([request_key(seed, 0) for seed in range(count)])


def draws_at(
    probs: Sequence[float], keys: Tensor, params: SamplingParams, vocab: int | None = None
) -> list[int]:
    """One draw for each key from the same probabilities."""
    logits = torch.tensor(probs, dtype=torch.float32).log().expand(len(keys), -1)
    prefix = PrefixState([], params, vocab or len(probs), frozenset())
    return draw(logits, params, prefix, [()] * len(keys), keys).tolist()


def rejection(
    p: np.ndarray, q: np.ndarray, drafts: np.ndarray, accept: np.ndarray, rest: np.ndarray
) -> np.ndarray:
    """Rejection with whatever p, q and noise it is given: the rule faults are injected into."""
    residual = np.maximum(p - q, 0)
    with np.errstate(divide="ignore"):
        recovered = (rest / residual).argmin(-1)
        return np.where(accept < p[drafts] / q[drafts], drafts, recovered)


SETTINGS = [
    (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_k=2)),
    (SamplingParams(temperature=1.0, top_p=0.65), SamplingParams(temperature=1.0, top_p=0.75)),
    (SamplingParams(temperature=0.6), SamplingParams(temperature=0.6)),
    (SamplingParams(temperature=0.6, top_k=3, min_p=0.3), SamplingParams(temperature=1.4)),
    (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=0.0)),
]


@FAULTS
@pytest.mark.parametrize(("target", "drafter"), SETTINGS)
def test_sd_08_the_law_is_the_targets_after_all_options(
    target: SamplingParams, drafter: SamplingParams, fault: bool
) -> None:
    p, q = [0.30, 0.40, 0.20, 0.10], [0.50, 0.30, 0.15, 0.05]
    law, _ = twins.to_probs(np.log(np.array(p)), target)
    if target.top_k == 2 and target.min_p == 0:
        np.testing.assert_allclose(law, [0.4286, 0.5714, 0, 0], atol=5e-5)
    keys = position_keys(request_keys(20_000), torch.full((20_000,), 9), Purpose.TARGET)
    drafts = draws_at(q, keys, drafter)

    def check() -> None:
        if fault:  # the drafts themselves are taken for the target's tokens where raw p / raw q accepts them
            accept = uniform_noise(keys).numpy()
            rest = exponential_noise(keys + 1, torch.arange(4)).numpy()
            first = rejection(law, np.array(q), np.array(drafts), accept, rest)
        else:
            draws = draws_at(p, keys, target)
            first = np.array(
                [_first(Proposal.chain([d], "toy"), [t, 0]) for d, t in zip(drafts, draws, strict=True)]
            )
        assert_law(first, law)

    judge(fault, check)


def _first(proposal: Proposal, draws: list[int]) -> int:
    return walk(proposal, draws).tokens(proposal)[0]


def _two_children(q: list[float], keys: Tensor) -> list[tuple[int, int]]:
    """Two siblings drawn from q without replacement: the first two to arrive in the race."""
    races = exponential_noise(keys, torch.arange(len(q))) / torch.tensor(q)
    return [tuple(pair) for pair in races.topk(2, largest=False).indices.tolist()]


@FAULTS
@pytest.mark.parametrize("shape", ["chain", "two children", "same token twice"])
def test_sd_09_first_token_marginals(shape: str, fault: bool) -> None:
    p, q = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]
    count = 100_000 if shape == "chain" else 30_000
    keys = position_keys(request_keys(count), torch.zeros(count, dtype=torch.int64), Purpose.TARGET)
    siblings = _two_children(q, keys)
    draws = draws_at(p, keys, T1)

    def check() -> None:
        if fault:  # after a rejection only the rejected entry is lowered: 0.50 / 0.32 / 0.18
            drafts = np.array([pair[0] for pair in siblings])
            accept = uniform_noise(keys + 1).numpy() < np.minimum(
                1, np.array(p)[drafts] / np.array(q)[drafts]
            )
            lowered = np.tile(np.array(p), (count, 1))
            lowered[np.arange(count), drafts] = np.maximum(np.array(p)[drafts] - np.array(q)[drafts], 0)
            rest = exponential_noise(keys + 2, torch.arange(3)).numpy()
            with np.errstate(divide="ignore"):
                first = np.where(accept, drafts, (rest / lowered).argmin(-1))
        else:
            first = np.array(
                [_of_shape(shape, pair, token) for pair, token in zip(siblings, draws, strict=True)]
            )
        assert_law(first, p)

    judge(fault, check)


def _of_shape(shape: str, pair: tuple[int, int], token: int) -> int:
    if shape == "chain":
        return _first(Proposal.chain(pair[:1], "toy"), [token, 0])
    children = pair if shape == "two children" else (pair[0], pair[0])
    return _first(Proposal(children, (None, None)), [token, 0, 0])


@FAULTS
@pytest.mark.parametrize("seeds", ["many seeds", "one seed"])
def test_sd_10_shared_noise_never_biases_an_emitted_token(seeds: str, fault: bool) -> None:
    """130,000 rounds of D = 3; under `coupled` the drafter shares the noise on purpose."""
    p, q, count, draft_length = [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], 130_000, 3
    if seeds == "one seed":
        base, start = torch.full((count,), request_key(11, 0)), torch.arange(count) * (draft_length + 1)
    else:
        base, start = request_keys(count), torch.full((count,), 20)
    keys = [position_keys(base, start + i, Purpose.TARGET) for i in range(draft_length + 1)]

    def check() -> None:
        if fault:  # the noise that chose the draft also judges it and draws what replaces it
            noise = exponential_noise(keys[0], torch.arange(3)).numpy()
            drafts = (noise / np.array(q)).argmin(-1)
            accept = 1 - np.exp(-noise[np.arange(count), drafts])
            assert_law(rejection(np.array(p), np.array(q), drafts, accept, noise), p)
            return
        drafts = list(zip(*(draws_at(q, k, T1) for k in keys[:-1]), strict=True))
        draws = list(zip(*(draws_at(p, k, T1) for k in keys), strict=True))
        emitted: list[list[int]] = []
        for chain, target in zip(drafts, draws, strict=True):
            proposal = Proposal.chain(chain, "toy")
            emitted.append(walk(proposal, target).tokens(proposal))
        for place in range(draft_length + 1):
            assert_law([tokens[place] for tokens in emitted if len(tokens) > place], p)

    judge(fault, check)


NEAR = [0.0, 0.5, 0.5 - 1e-7, 1e-7]
EDGES = {
    "a: p equals q up to 1e-7": (NEAR, [0.0, 0.5 + 1e-7, 0.5, 0.0], 2),
    "b: one-hot on different ids": ([0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], 1),
    "c: q zero where p is positive": ([0.0, 0.3, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0], 2),
    "d: one finite logit": ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], 3),
}


@FAULTS
@pytest.mark.parametrize("edge", EDGES)
def test_sd_13_every_step_commits_a_token_of_p(edge: str, fault: bool) -> None:
    """Two padding ids (4, 5) have large logits. The fault: the residual p - q as it comes out of rounding."""
    p, q, draft = EDGES[edge]
    logits = torch.tensor([math.log(x) if x else -math.inf for x in p] + [50.0, 60.0]).expand(2, -1)
    prefix = PrefixState([], T1, 4, frozenset())
    proposal = Proposal.chain([draft], "toy")

    def check() -> None:
        for seed in range(300):
            keys = position_keys(request_key(seed, 0), torch.arange(2), Purpose.TARGET)
            probs = to_probs(logits, T1, prefix, row_paths(proposal))
            if fault:
                residual = torch.tensor(p) - torch.tensor(q) - 1e-7
                tokens = [
                    int((exponential_noise(keys[:1], torch.arange(4)) / residual).nan_to_num().argmin())
                ]
            else:
                verdict = verify_coupled(proposal, probs, keys)
                assert verdict == walk(proposal, draw(logits, T1, prefix, [[], [draft]], keys).tolist())
                tokens = verdict.tokens(proposal)
            assert 1 <= len(tokens) <= 2
            assert all(0 <= token < 4 and p[token] > 0 for token in tokens)

    judge(fault, check)


@FAULTS
@pytest.mark.parametrize("params", [SamplingParams(), T1, SamplingParams(temperature=1.0, top_p=0.9)])
def test_sd_13_e_nan_logits_fail_their_own_request_only(params: SamplingParams, fault: bool) -> None:
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    keys = position_keys(1, torch.arange(4), Purpose.TARGET)
    prefix = PrefixState([], params, 12, frozenset())
    sound = [draw(logits[i : i + 1], params, prefix, [[]], keys[i : i + 1]).item() for i in range(4)]
    logits[2, 5] = math.nan

    def check() -> None:
        outcome: list[object] = []
        for i in range(4):
            try:
                row = logits[i : i + 1]
                token = row.argmax() if fault else draw(row, params, prefix, [[]], keys[i : i + 1])
                outcome.append(token.item())
            except RequestFailed as error:
                assert "NaN" in str(error)
                outcome.append("failed")
        assert outcome == [sound[0], sound[1], "failed", sound[3]]
        if params.greedy:
            tokens, usable = greedy_tokens(logits, 12)
            assert usable.tolist() == [True, True, False, True]
            assert tokens[usable].tolist() == [sound[0], sound[1], sound[3]]

    judge(fault, check)


@FAULTS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("target_width", "drafter_width"), [(104, 100), (100, 104), (104, 90)])
def test_sd_26_padding_and_unequal_widths(
    target_width: int, drafter_width: int, temperature: float, fault: bool
) -> None:
    """98 real ids, padding with large logits. Ids that the drafter's head lacks are never proposed."""
    generator = torch.Generator().manual_seed(8)
    params = SamplingParams(temperature=temperature)
    vocab = 104 if fault else 98
    count = 10_000
    target = torch.randn(target_width, generator=generator)
    drafter = torch.randn(drafter_width, generator=generator)
    drafter[: min(98, drafter_width)] += 0.9 * target[: min(98, drafter_width)]
    target[98:], drafter[98:] = 20 + target[98:], 25 + drafter[98:]
    law, _ = twins.to_probs(target[:98].numpy(), params)
    prefix = PrefixState([], params, vocab, frozenset())
    keys = position_keys(3, torch.arange(count), Purpose.TARGET)

    def check() -> None:
        drafts = draw(drafter.expand(count, -1), params, prefix, [()] * count, keys).tolist()
        draws = draw(target.expand(count, -1), params, prefix, [()] * count, keys).tolist()
        assert max(drafts) < min(98, drafter_width)
        proposals = [Proposal.chain([draft], "toy") for draft in drafts]
        emitted = [_first(proposal, [token, 0]) for proposal, token in zip(proposals, draws, strict=True)]
        assert emitted == draws
        if temperature:
            assert_law(emitted, law)
            assert 0.3 < np.mean(np.array(drafts) == np.array(draws)) < 1, "the coupling has no effect"
        else:
            assert set(emitted) == {int(law.argmax())}

    judge(fault, check)


# Whole texts: options inside a block ------------------------------------------------------------------------

X, EOS, VOCAB = 3, 0, 8
Logits = Callable[[list[int]], Tensor]


def plain_text(model: Logits, params: SamplingParams, length: int) -> list[int]:
    """Decoding token by token with the slow twin."""
    text: list[int] = []
    while len(text) < length and (not text or text[-1] != EOS):
        row = twins.processed_logits(model(text).numpy(), params, [X], text, VOCAB, frozenset([EOS]))
        text.append(int(row.argmax()))
    return text


def speculative_text(
    model: Logits,
    params: SamplingParams,
    length: int,
    drafter: Callable[[list[int]], list[int]],
    sees: Callable[[list[int]], list[int]] = lambda path: path,
    remembers: Callable[[list[int]], list[int]] = lambda emitted: emitted,
) -> list[int]:
    """Rounds of propose, draw, walk, commit. `sees` and `remembers` are where faults go in."""
    text: list[int] = []
    prefix = PrefixState([X], params, VOCAB, frozenset([EOS]))
    while len(text) < length:
        proposal = Proposal.chain(drafter(text), "toy")
        paths = row_paths(proposal)
        logits = torch.stack([model(text + path) for path in paths])
        keys = torch.zeros(len(paths), dtype=torch.int64)
        draws = draw(logits, params, prefix, [sees(path) for path in paths], keys).tolist()
        emitted = walk(proposal, draws).tokens(proposal)
        prefix.commit(remembers(emitted))
        for token in emitted:
            text.append(token)
            if token == EOS:
                return text
    return text[:length]


@FAULTS
def test_sd_06_min_tokens_counts_tokens(fault: bool) -> None:
    """EOS is the target's first choice from index 5 on and becomes possible at index 8, inside a block."""
    params = SamplingParams(min_tokens=8)

    def model(text: list[int]) -> Tensor:
        logits = torch.zeros(VOCAB)
        logits[1 + len(text) % 5] = 1.0
        logits[EOS] = 2.0 if len(text) >= 5 else -2.0
        return logits

    expected = plain_text(model, params, 40)
    assert len(expected) == 9 and EOS not in expected[:8] and expected[8] == EOS

    def drafter(text: list[int]) -> list[int]:
        ahead = [1 + (len(text) + i) % 5 for i in range(4)]
        return [EOS if len(text) + i >= 8 else token for i, token in enumerate(ahead)]

    def check() -> None:
        counted = (lambda emitted: emitted[-1:]) if fault else (lambda emitted: emitted)
        assert speculative_text(model, params, 40, drafter, remembers=counted) == expected

    judge(fault, check)


@pytest.mark.parametrize("fault", ["none", "sees the committed tokens only", "remembers the last token only"])
@pytest.mark.parametrize(
    "option", [{"frequency_penalty": 1.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}], ids=str
)
def test_sd_11_penalties_count_the_drafts_before_each_position(option: dict[str, float], fault: str) -> None:
    """The target loops on x, so do the drafts, half of which are wrong by construction."""
    params = SamplingParams(**option)

    def model(text: list[int]) -> Tensor:
        logits = torch.tensor([-9.0, 2.2, 2.0, 2.6, 1.9, 1.5, 1.2, 1.0])
        logits[1 + (7 * len(text)) % 7] += 0.05
        logits[1 + sum(text) % 7] += 0.3
        return logits

    def drafter(text: list[int]) -> list[int]:
        right = plain_text(model, params, len(text) + 4)[len(text) :]
        return [X] * 4 if len(text) % 2 else right

    def check() -> None:
        seen = (lambda path: []) if fault.startswith("sees") else (lambda path: path)
        kept = (lambda emitted: emitted[-1:]) if fault.startswith("remembers") else (lambda emitted: emitted)
        expected = plain_text(model, params, 30)
        assert speculative_text(model, params, 30, drafter, seen, kept) == expected

    judge(fault != "none", check)

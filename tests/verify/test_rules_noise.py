"""`rejection` and `block` with the package's noise, many rounds of many requests: the law of whole texts.

Target and drafter draw every position from the same p and q, so a text of n tokens has the law of n draws from p. The
noise of all requests comes at once (`Prepared`; held equal to `RoundNoise`), the rules are the ones that run.
Chi-square checks have fixed seeds and fail below p = 1e-4: some false alarm among the 5 here had a chance of 0.05 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import verify_twins as twins
from scipy import stats

from paceline.core.proposal import Dense, Proposal, TargetToken
from paceline.decode.verify.block import verify_block
from paceline.decode.verify.chances import RoundNoise, first_to_arrive, positive_part
from paceline.decode.verify.noise import (
    Purpose,
    exponential_noise,
    position_key,
    position_keys,
    request_key,
    uniform_noise,
)
from paceline.decode.verify.rejection import verify_rejection

P, Q = np.array([0.02, 0.48, 0.5]), np.array([0.4, 0.45, 0.15])
P_AFTER, Q_AFTER = np.array([0.7, 0.3]), np.array([0.3, 0.7])  # drafts behind decide much under `block`
FALSE_ALARM = 1e-4
RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block], ids=["rejection", "block"])


def keys_at(requests: np.ndarray, purpose: Purpose, position: int, start: int | None) -> torch.Tensor:
    """`position_key` of many requests at once, by the twin's hash."""
    state = requests.copy()
    for value in (int(purpose), position, *([] if start is None else [start])):
        state = twins.mix(state ^ twins.mix(np.array([value], dtype=np.uint64) + twins.GOLDEN))
    return torch.from_numpy(state.view(np.int64).copy())


@dataclass
class Prepared:
    """The noise of all requests, made once for each (purpose, position, round). `keyed`: rounds have their own."""

    requests: np.ndarray
    width: int
    keyed: bool = True
    known: dict[tuple[Purpose, int, int | None], np.ndarray] = field(default_factory=dict)

    def noise(self, purpose: Purpose, position: int, start: int) -> np.ndarray:
        first = start if self.keyed and purpose is not Purpose.TARGET else None
        at = (purpose, position, first)
        if at not in self.known:
            self.known[at] = exponential_noise(keys_at(self.requests, *at), torch.arange(self.width)).numpy()
        return self.known[at]

    def of(self, request: int, start: int) -> One:
        return One(self, request, start)


@dataclass
class One:
    """The `Chances` of one request in one round."""

    noise: Prepared
    request: int
    start: int

    def accept(self, ahead: int, token: int, chance: Any) -> bool:
        row = self.noise.noise(Purpose.ACCEPT, self.start + ahead, self.start)[self.request]
        return bool(np.exp(-row[token]) < chance)

    def draw(self, ahead: int, weights: Any, kind: TargetToken) -> int:
        purpose = Purpose.TARGET if kind == "bonus" else Purpose.RESIDUAL
        row = self.noise.noise(purpose, self.start + ahead, self.start)[self.request]
        with np.errstate(divide="ignore"):
            return int((row / weights).argmin())


def requests_of(count: int) -> np.ndarray:
    return np.array([request_key(seed, 0) for seed in range(count)], dtype=np.int64).view(np.uint64)


def texts(
    rule: Any,
    drawn_by: Purpose = Purpose.DRAFT,
    *,
    keyed: bool = True,
    p: np.ndarray = P,
    q: np.ndarray = Q,
    says: np.ndarray | None = None,
    length: int = 3,
    count: int = 2500,
) -> np.ndarray:
    """[count, length] tokens of rounds of `length` drafts; `says` is what the drafter reports of q."""
    prepared = Prepared(requests_of(count), len(p), keyed)
    rows, reported = [p] * (1 + length), np.tile(q if says is None else says, (length, 1))
    result = np.zeros((count, length), dtype=np.int64)
    for request in range(count):
        text: list[int] = []
        while len(text) < length:
            start = len(text)
            noise = [prepared.noise(drawn_by, start + i, start)[request] for i in range(length)]
            proposal = Proposal.chain([int((row / q).argmin()) for row in noise], "toy", Dense(reported))
            text += rule(proposal, rows, prepared.of(request, start)).tokens(proposal)
        result[request] = text[:length]
    return result


def pvalue(tokens: np.ndarray, p: np.ndarray = P) -> float:
    """The smaller of two chi-squares, doubled: over the tokens of each position, and over whole texts in which only
    the most probable token is told from the others.
    """
    count, length = tokens.shape
    seen = np.concatenate([np.bincount(tokens[:, i], minlength=len(p)) for i in range(length)])
    expected = np.tile(p * count, length)
    single = stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), length * (len(p) - 1))
    best = (tokens == p.argmax()) @ 2 ** np.arange(length)
    ones = np.array([int(cell).bit_count() for cell in range(2**length)])
    law = p.max() ** ones * (1 - p.max()) ** (length - ones) * count
    assert law.min() > 5
    whole = stats.chisquare(np.bincount(best, minlength=2**length), law).pvalue
    return float(2 * min(single, whole))


CASES = {"first": (P, Q, 3), "behind": (P_AFTER, Q_AFTER, 5)}


@RULES
@pytest.mark.parametrize("case", CASES)
def test_texts_of_several_rounds_have_the_law_of_p(rule: Any, case: str) -> None:
    p, q, length = CASES[case]
    assert pvalue(texts(rule, p=p, q=q, length=length), p) > FALSE_ALARM


FAULTS: dict[str, dict[str, Any]] = {
    "SD-08 q was another": {"says": Q**0.5 / (Q**0.5).sum()},
    "SD-10 drafts by the noise of the test": {"drawn_by": Purpose.ACCEPT},
    "SD-10 drafts by the noise of the residual": {"drawn_by": Purpose.RESIDUAL},
}


@RULES
@pytest.mark.parametrize("name", FAULTS)
def test_faults_show(rule: Any, name: str) -> None:
    assert pvalue(texts(rule, **FAULTS[name])) < FALSE_ALARM


def test_block_without_the_rounds_first_position_in_its_keys_shows() -> None:
    """Noise by position alone: a later round uses again what decided how far an earlier one went."""
    tokens = texts(verify_block, keyed=False, p=P_AFTER, q=Q_AFTER, length=5, count=6000)
    assert pvalue(tokens, P_AFTER) < FALSE_ALARM


def test_rejection_would_not_need_it() -> None:
    """It looks at nothing behind the token it commits."""
    tokens = texts(verify_rejection, keyed=False, p=P_AFTER, q=Q_AFTER, length=5)
    assert pvalue(tokens, P_AFTER) > FALSE_ALARM


# The noise itself -------------------------------------------------------------------------------------------


def test_prepared_noise_is_the_noise_of_a_round() -> None:
    prepared = Prepared(requests_of(40), 4)
    weights = torch.tensor([0.0, 0.2, 0.5, 0.3], dtype=torch.float64)
    for request in range(40):
        real, fast = RoundNoise(request_key(request, 0), 7), prepared.of(request, 7)
        for ahead in range(3):
            assert real.draw(ahead, weights, "bonus") == fast.draw(ahead, weights.numpy(), "bonus")
            assert real.draw(ahead, weights, "recovered") == fast.draw(ahead, weights.numpy(), "recovered")
            for token in range(4):
                for chance in (0.1, 0.5, 0.9):
                    assert real.accept(ahead, token, chance) == fast.accept(ahead, token, chance)


def test_answers_are_those_of_the_slow_twin() -> None:
    key = request_key(11, 2)
    noise = RoundNoise(key, 5)
    weights = torch.tensor([0.1, 0.0, 0.4, 0.5], dtype=torch.float64)
    for ahead in range(4):
        accept = twins.position_key(np.uint64(key % 2**64), 5 + ahead, 2, 5)
        residual = twins.position_key(np.uint64(key % 2**64), 5 + ahead, 3, 5)
        target = twins.position_key(np.uint64(key % 2**64), 5 + ahead, 0)
        for token in (0, 3, 40):
            number = np.exp(-twins.exponential(accept, token))
            assert noise.accept(ahead, token, number + 1e-9) and not noise.accept(ahead, token, number - 1e-9)
        assert noise.draw(ahead, weights, "recovered") == twins.draw(weights.numpy(), residual)[0]
        assert noise.draw(ahead, weights, "bonus") == twins.draw(weights.numpy(), target)[0]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2500, 5000])
@pytest.mark.parametrize("kind", ["flat", "peaked", "few", "one"])
def test_the_first_to_arrive_is_found_without_looking_at_all(vocab: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(vocab, generator=generator, dtype=torch.float64)
    if kind == "peaked":
        weights = weights.pow(40)
    elif kind != "flat":
        kept = torch.randperm(vocab, generator=generator)[: 1 if kind == "one" else 7]
        weights = torch.zeros_like(weights).index_copy_(0, kept, weights[kept] + 0.1)
    for key in position_keys(5, torch.arange(40), Purpose.RESIDUAL):
        noise = exponential_noise(key.unsqueeze(0), torch.arange(vocab))[0]
        assert first_to_arrive(weights, key.unsqueeze(0)) == int((noise / weights).argmin())


def test_no_number_is_used_for_two_things() -> None:
    """Keys of all purposes, positions and rounds of a request are different, and so are their first numbers."""
    keys = [
        position_key(3, position, purpose, start)
        for purpose in Purpose
        for position in range(12)
        for start in (None, *range(position + 1))
    ]
    assert len(set(keys)) == len(keys)
    assert len(set(uniform_noise(torch.tensor(keys)).tolist())) == len(keys)


def test_what_is_left_has_no_negative_zero() -> None:
    """Noise divided by it would be minus infinity, and an impossible token the first to arrive."""
    left = positive_part(torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64))
    assert not torch.signbit(left).any() and not np.signbit(positive_part(np.array([0.1, -0.3]))).any()


def test_a_certain_draft_is_kept_for_certain_and_an_impossible_one_never() -> None:
    noise = RoundNoise(1, 0)
    assert all(noise.accept(ahead, 0, 1.0) and noise.accept(ahead, 0, 7.5) for ahead in range(500))
    assert not any(noise.accept(ahead, 0, 0.0) for ahead in range(500))

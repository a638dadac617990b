"""Noise: equal to its twin bit for bit, a function of its key alone, uniform and independent.

Chi-square tests use fixed keys and fail below p = 1e-4: were the keys drawn anew, each would raise a false
alarm once in ten thousand runs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import verify_twins as twins
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.decode.verify.noise import (
    BLOCK,
    Purpose,
    block_members,
    block_minima,
    exponential_noise,
    position_key,
    position_keys,
    request_key,
    uniform_noise,
)

FALSE_ALARM = 1e-4
SEEDS = st.one_of(
    st.integers(-(2**200), 2**200), st.sampled_from([0, 1, -1, 2**63, -(2**63), 2**64 - 1, 2**64])
)


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    return position_keys(request_key(seed, 0), torch.arange(count), Purpose.TARGET)


@given(
    SEEDS,
    st.integers(0, 1000),
    st.integers(0, 2**40),
    st.sampled_from(Purpose),
    st.none() | st.integers(0, 99),
)
def test_keys_equal_their_twin(
    seed: int, choice: int, position: int, purpose: Purpose, start: int | None
) -> None:
    key = request_key(seed, choice)
    assert -(2**63) <= key < 2**63
    assert key % 2**64 == int(twins.request_key(seed, choice))
    fast = position_key(key, position, purpose, start)
    assert fast % 2**64 == int(twins.position_key(twins.request_key(seed, choice), position, purpose, start))
    if start is None:
        assert position_keys(key, torch.tensor([position]), purpose).tolist() == [fast]


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=5))
def test_noise_equals_its_twin(key: int, tokens: list[int]) -> None:
    fast = exponential_noise(torch.tensor([key]), torch.tensor(tokens))[0]
    slow = [twins.exponential(np.uint64(key % 2**64), token) for token in tokens]
    # The bits are equal; the two logarithms may differ in the last place.
    np.testing.assert_allclose(fast.numpy(), slow, rtol=1e-15 * 8)
    assert uniform_noise(torch.tensor([key])).item() == twins.uniform(twins.bits(np.uint64(key % 2**64), 0))


def test_seeds_choices_purposes_and_rounds_have_their_own_keys() -> None:
    seeds = [0, 1, -1, 2**64 - 1, 2**64, 2**63, -(2**63), 2**128, -(2**64)]
    keys = {request_key(seed, choice) for seed in seeds for choice in range(3)}
    assert len(keys) == 3 * len(seeds)
    key = request_key(7, 0)
    positions = {position_key(key, p, purpose) for p in range(50) for purpose in Purpose}
    positions |= {
        position_key(key, p, purpose, s) for p in range(50) for purpose in Purpose for s in range(9)
    }
    assert len(positions) == 50 * 4 * 10


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 700), st.data())
def test_one_token_is_the_same_entry_of_any_row(rows: int, width: int, data: st.DataObject) -> None:
    keys = keys_of(rows, seed=data.draw(st.integers(0, 9)))
    full = exponential_noise(keys, torch.arange(width))
    row, token = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    assert exponential_noise(keys[row : row + 1], torch.tensor([token])).item() == full[row, token].item()
    wider = exponential_noise(keys.flip(0), torch.arange(width + 50)).flip(0)
    assert torch.equal(wider[:, :width], full)
    blocks = torch.arange(-(-width // BLOCK)).flip(0).expand(rows, -1)
    ids, members = block_members(keys, blocks)
    assert torch.equal(members, exponential_noise(keys, ids))
    minima = block_minima(keys, blocks.shape[1]).flip(1)
    assert torch.equal(members.unflatten(1, (-1, BLOCK)).amin(-1), minima)


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    expected = np.broadcast_to(expected, counts.shape)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, counts.size - 1))


def exponential_cells(noise: np.ndarray, cells: int) -> np.ndarray:
    """Which of `cells` equally likely cells of Exp(1) each number lies in."""
    return np.minimum((np.exp(-noise) * cells).astype(int), cells - 1)


@pytest.mark.parametrize(
    ("axis", "noise"),
    [
        ("tokens", lambda: exponential_noise(keys_of(4), torch.arange(50_000)).flatten()),
        ("positions", lambda: exponential_noise(keys_of(200_000), torch.tensor([17])).flatten()),
        ("small tokens", lambda: exponential_noise(keys_of(60_000), torch.arange(3)).flatten()),
        (
            "seeds",
            lambda: exponential_noise(
                torch.tensor([position_key(request_key(s, 0), 5, Purpose.TARGET) for s in range(20_000)]),
                torch.arange(10),
            ).flatten(),
        ),
        ("uniform", lambda: -uniform_noise(keys_of(200_000)).log()),
    ],
)
def test_noise_is_exponential_along(axis: str, noise: object) -> None:
    cells = exponential_cells(noise().numpy(), 256)
    counts = np.bincount(cells, minlength=256)
    assert chi_square(counts, len(cells) / 256) > FALSE_ALARM, axis


def neighbours(axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = keys_of(20_001)
    ids = torch.arange(2 * BLOCK)
    noise = exponential_noise(keys, ids)
    other = position_keys(request_key(0, 0), torch.arange(20_001), Purpose.DRAFT)
    choice = position_keys(request_key(0, 1), torch.arange(20_001), Purpose.TARGET)
    return {
        "next token, same block": (noise[:, 3], noise[:, 4]),
        "next token, next block": (noise[:, BLOCK - 1], noise[:, BLOCK]),
        "same place in two blocks": (noise[:, 3], noise[:, BLOCK + 3]),
        "next position": (noise[:-1, 3], noise[1:, 3]),
        "other purpose": (noise[:, 3], exponential_noise(other, ids)[:, 3]),
        "other choice": (noise[:, 3], exponential_noise(choice, ids)[:, 3]),
        "uniform of the same key": (noise[:, 3], -uniform_noise(keys).log()),
    }[axis]


@pytest.mark.parametrize(
    "axis",
    [
        "next token, same block",
        "next token, next block",
        "same place in two blocks",
        "next position",
        "other purpose",
        "other choice",
        "uniform of the same key",
    ],
)
def test_noise_is_independent_of(axis: str) -> None:
    """256 cells of pairs, 20,000 pairs."""
    first, second = (exponential_cells(part.numpy(), 16) for part in neighbours(axis))
    counts = np.bincount(first * 16 + second, minlength=256)
    assert chi_square(counts, len(first) / 256) > FALSE_ALARM


def test_the_smallest_of_a_block_is_as_often_anyones() -> None:
    noise = exponential_noise(keys_of(64_000), torch.arange(BLOCK))
    counts = np.bincount(noise.argmin(-1).numpy(), minlength=BLOCK)
    assert chi_square(counts, 64_000 / BLOCK) > FALSE_ALARM
    second = noise.topk(2, largest=False).indices[:, 1]
    assert chi_square(np.bincount(second.numpy(), minlength=BLOCK), 64_000 / BLOCK) > FALSE_ALARM


def test_one_flipped_bit_of_a_key_flips_half_the_bits() -> None:
    """1000 keys, 64 bits: the share flipped for each input bit is one half within 5 deviations."""
    keys = keys_of(1000)
    base = uniform_noise(keys)
    for bit in range(64):
        flipped = uniform_noise(keys ^ (-(2**63) if bit == 63 else 1 << bit))
        changed = ((base * 2**52).long() ^ (flipped * 2**52).long()).numpy()
        share = np.unpackbits(changed.astype("<i8").view(np.uint8)).sum() / (1000 * 52)
        assert abs(share - 0.5) < 5 * 0.5 / (1000 * 52) ** 0.5, bit

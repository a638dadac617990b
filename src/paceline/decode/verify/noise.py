"""Counter-based noise: any single number can be had from its key, none depends on what was drawn before.

A number is named by (request seed, choice index, absolute position, purpose, token id), for rules that need
it also by the first position of the round. There is no generator and no state, so batch-mates, preemption,
draft lengths and rejected drafts cannot move a request's noise, and drafting never shares it with the test
that judges the draft (`coupled` apart, whose point it is: see `coupled.py`).

A draw from probabilities p is `argmin E / p` with E ~ Exp(1), the Gumbel-max trick in its exponential form.

The exponentials of a row come in blocks of `BLOCK` neighbouring ids. The smallest of a block is one number,
Exp(1) / BLOCK, its owner is uniform in the block, and every other member is that minimum plus a fresh Exp(1).
Exponentials have no memory, so the members are exactly independent Exp(1); and the minimum of a block bounds
all its members, so a draw looks into few blocks only (`draw.py`).

Positions are absolute: the index in prompt + output, from 0, of the token that is drawn.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "Purpose",
    "block_members",
    "block_minima",
    "exponential_noise",
    "position_key",
    "position_keys",
    "request_key",
    "uniform_noise",
]

BLOCK = 32
_BLOCK_BITS = 5

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's finaliser (Stafford's mix 13)


class Purpose(IntEnum):
    """What a number is drawn for; streams of different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def request_key(seed: int, choice: int) -> int:
    """64-bit key of one choice of one request, as a signed integer; any whole number is a seed."""
    key = 0
    limbs = seed.bit_length() // 64 + 1  # two's complement with its sign bit: no two seeds share their limbs
    data = seed.to_bytes(limbs * 8, "little", signed=True)
    for start in range(0, len(data), 8):
        key = _absorb(key, int.from_bytes(data[start : start + 8], "little"))
    return _signed(_absorb(key, choice))


def position_key(key: int, position: int, purpose: Purpose, round_start: int | None = None) -> int:
    """64-bit key of all noise of one purpose at one absolute position, as a signed integer.

    `round_start` is the first position of the round, for rules whose accepted length depends on later drafts.
    """
    assert position >= 0, f"position {position} is negative"
    value = _absorb(_absorb(key & _MASK, int(purpose)), position)
    return _signed(value if round_start is None else _absorb(value, round_start))


def position_keys(
    key: int | Tensor,  # one request's key, or [rows] int64
    positions: Tensor,  # [rows] int64
    purpose: Purpose,
) -> Tensor:
    """`position_key` for many rows at once: [rows] int64."""
    start = torch.as_tensor(key, dtype=torch.int64, device=positions.device)
    by_purpose = _mix(start ^ _signed(_mix_int(int(purpose) + _GOLDEN)))
    return _mix(by_purpose ^ _mix(positions + _signed(_GOLDEN)))


def exponential_noise(
    keys: Tensor,  # [rows] int64, from `position_key`
    token_ids: Tensor,  # [n] or [rows, n] int64
) -> Tensor:
    """Exp(1) noise of the given tokens, above 0: [rows, n] float64. Depends on key and id alone."""
    blocks = token_ids >> _BLOCK_BITS
    bits = _bits(keys, torch.cat([2 * blocks + 2, 2 * token_ids + 1], dim=-1))
    minimum, rest = _exponential(bits).chunk(2, dim=-1)
    owner = bits[:, : token_ids.shape[-1]] & (BLOCK - 1)
    return torch.where(token_ids & (BLOCK - 1) == owner, 0.0, rest).add_(minimum, alpha=1 / BLOCK)


def block_minima(
    keys: Tensor,  # [rows] int64
    blocks: int,
) -> Tensor:
    """The smallest noise of each of the first `blocks` blocks of ids: [rows, blocks] float64."""
    counters = torch.arange(2, 2 * blocks + 2, 2, device=keys.device)
    return _exponential(_bits(keys, counters)).mul_(1 / BLOCK)


def block_members(
    keys: Tensor,  # [rows] int64
    blocks: Tensor,  # [rows, n] int64
) -> tuple[Tensor, Tensor]:
    """All ids of the given blocks and their `exponential_noise`, both [rows, n * BLOCK]."""
    rows, n = blocks.shape
    member = torch.arange(BLOCK, device=keys.device)
    ids = (blocks.unsqueeze(-1) * BLOCK + member).flatten(1)
    bits = _bits(keys, torch.cat([2 * blocks + 2, 2 * ids + 1], dim=-1))
    noise = _exponential(bits)
    owner = (bits[:, :n] & (BLOCK - 1)).unsqueeze(-1)
    rest = torch.where(member == owner, 0.0, noise[:, n:].view(rows, n, BLOCK))
    return ids, rest.add_(noise[:, :n].unsqueeze(-1), alpha=1 / BLOCK).flatten(1)


def uniform_noise(keys: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), one for each key: [rows] float64."""
    return _uniform(_mix(keys.clone()))


def _bits(keys: Tensor, counters: Tensor) -> Tensor:
    """splitmix64 from the state `keys` at the given counters: odd ones for tokens, even ones for blocks.

    Counter 0 is the key's own uniform number. The upper 52 bits of a block's number make its smallest noise,
    the lowest ones say whose it is.
    """
    return _mix(keys.unsqueeze(-1) + counters * _signed(_GOLDEN))


def _exponential(bits: Tensor) -> Tensor:
    return _uniform(bits).log_().neg_()


def _uniform(bits: Tensor) -> Tensor:
    """The upper 52 bits as the midpoints of 2^52 equal cells: never 0, never 1, exact in float64."""
    return ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)


def _mix(value: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, in place (multiplication wraps; the shifts are made logical)."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value.bitwise_xor_(_shift_right(value, shift)).mul_(_signed(multiplier))
    return value.bitwise_xor_(_shift_right(value, 31))


def _shift_right(value: Tensor, shift: int) -> Tensor:
    return (value >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix_int(value: int) -> int:
    value &= _MASK
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> 31)


def _absorb(state: int, value: int) -> int:
    """For a given state, different values give different results: both steps are bijections."""
    return _mix_int(state ^ _mix_int((value & _MASK) + _GOLDEN))


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    return value - (1 << 64) if value >> 63 else value

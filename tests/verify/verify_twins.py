"""Slow, obvious twins of the verification package: NumPy and Python, written from the definitions.

Nothing here calls the code under test. Hashes are equal bit for bit; floating numbers up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.proposal import Proposal
from paceline.core.sampling import SamplingParams

BLOCK = 32
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """splitmix64's finaliser, with unsigned arithmetic."""
    value = np.atleast_1d(np.asarray(value, dtype=np.uint64))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def absorb(state: np.uint64, value: int) -> np.uint64:
    inner = mix(np.array([value % 2**64], dtype=np.uint64) + GOLDEN)
    return mix(np.array([state], dtype=np.uint64) ^ inner)[0]


def request_key(seed: int, choice: int) -> np.uint64:
    limbs = [(seed >> (64 * i)) % 2**64 for i in range(seed.bit_length() // 64 + 1)]
    key = np.uint64(0)
    for limb in [*limbs, choice]:
        key = absorb(key, limb)
    return key


def position_key(key: np.uint64, position: int, purpose: int, round_start: int | None = None) -> np.uint64:
    value = absorb(absorb(key, purpose), position)
    return value if round_start is None else absorb(value, round_start)


def bits(key: np.uint64, counter: int) -> int:
    return int(mix(np.array([(int(key) + counter * int(GOLDEN)) % 2**64], dtype=np.uint64))[0])


def uniform(number: int) -> float:
    return ((number >> 12) + 0.5) / 2**52


def exponential(key: np.uint64, token: int) -> float:
    """The block's smallest noise, for all but its owner plus a number of the token's own."""
    block = bits(key, 2 * (token // BLOCK) + 2)
    smallest = -math.log(uniform(block)) / BLOCK
    if block % BLOCK == token % BLOCK:
        return smallest
    return smallest - math.log(uniform(bits(key, 2 * token + 1)))


def processed_logits(
    logits: np.ndarray,  # [width]
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],  # committed and drafts on the row's path
    vocab_size: int,
    eos: frozenset[int],
) -> np.ndarray:
    """One row, token by token, in the order `core/sampling.py` gives."""
    result = np.array(logits, dtype=np.float32)
    for token in range(len(result)):
        value = result[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = np.float32(-np.inf)
        if len(output) < params.min_tokens and (token in eos or token in params.stop_token_ids):
            value = np.float32(-np.inf)
        for word in params.bad_words:
            start = list(word[:-1])
            if word[-1] == token and list(output)[len(output) - len(start) :] == start:
                value = np.float32(-np.inf)
        value = value + np.float32(params.logit_bias.get(token, 0.0))
        if token in prompt or token in output:
            factor = np.float32(params.repetition_penalty)
            value = value / factor if value > 0 else value * factor
        count = list(output).count(token)
        value = value - np.float32(params.frequency_penalty) * np.float32(count)
        value = value - np.float32(params.presence_penalty) * np.float32(count > 0)
        result[token] = value if token < vocab_size else -np.inf
    return result


def to_probs(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, float]:
    """Probabilities of processed logits [width], and how far the nearest cut was from going the other way."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    result = np.zeros(len(logits))
    if params.temperature == 0:
        result[order[0]] = 1.0
        return result, math.inf
    top = float(logits[order[0]])
    weights = {t: math.exp((float(logits[t]) - top) / params.temperature) for t in order}
    order = [t for t in order if logits[t] > -np.inf]
    if params.top_k is not None:
        order = order[: params.top_k]
    distance = math.inf
    if params.top_p < 1:
        total = math.fsum(weights[t] for t in order)
        kept, mass = [], 0.0
        for token in order:
            distance = min(distance, abs(mass / total - params.top_p))
            if mass < params.top_p * total:
                kept.append(token)
            mass += weights[token]
        order = kept
    if params.min_p > 0:
        distance = min([distance, *(abs(weights[t] - params.min_p) for t in order if weights[t] < 1)])
        order = [t for t in order if weights[t] >= params.min_p]
    total = math.fsum(weights[t] for t in order)
    for token in order:
        result[token] = weights[token] / total
    return result, distance


def draw(probs: np.ndarray, key: np.uint64) -> tuple[int, float]:
    """argmin of noise over probability, and by what factor the next one is behind."""
    races = sorted((exponential(key, t) / p, t) for t, p in enumerate(probs.tolist()) if p > 0)
    behind = races[1][0] / races[0][0] if len(races) > 1 else math.inf
    return races[0][1], behind


def walk(proposal: Proposal, draws: Sequence[int]) -> tuple[list[int], int, bool]:
    """Path of nodes, next token, and whether the path ends in a leaf; by searching the children each time."""
    path: list[int] = []
    here: int | None = None
    while True:
        want = draws[0 if here is None else 1 + here]
        children = [n for n in range(len(proposal)) if proposal.parents[n] == here]
        matching = [n for n in children if proposal.tokens[n] == want]
        if not matching:
            return path, want, not children
        here = min(matching)
        path.append(here)


def rejection(
    proposal: Proposal, target: np.ndarray, draft: np.ndarray, key: np.uint64, start: int
) -> tuple[list[int], int]:
    """Path and next token; `draft` [nodes, vocab] as reported, siblings tried in order and taken out of q."""
    path: list[int] = []
    while True:
        p = target[0 if not path else 1 + path[-1]].copy()
        position = start + len(path)
        children = [n for n, parent in enumerate(proposal.parents) if parent == (path[-1] if path else None)]
        tried: list[int] = []
        for node in children:
            token = proposal.tokens[node]
            if token in tried:
                continue
            q = np.array([0.0 if t in tried else x for t, x in enumerate(draft[node])])
            q /= q.sum()
            uniform_number = math.exp(-exponential(position_key(key, position, 2, start), token))
            if uniform_number < p[token] / q[token]:
                path.append(node)
                break
            left = np.maximum(p - q, 0)
            p = left / left.sum() if left.sum() > 0 else p
            tried.append(token)
        else:
            purpose = (3, start) if children else (0, None)
            return path, draw(p, position_key(key, position, *purpose))[0]


def block(tokens: Sequence[int], target: np.ndarray, draft: np.ndarray, key: np.uint64, start: int) -> tuple[int, int]:
    """How many drafts are kept, and the next token; every chance first, then the last that holds."""
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * target[i][token] / draft[i][token]))
    kept = 0
    for i in range(1, 1 + len(tokens)):
        if i == len(tokens):
            chance = weights[i]
        else:
            rest = np.maximum(weights[i] * target[i] - draft[i], 0).sum()
            chance = rest / (rest + 1 - weights[i]) if rest + 1 - weights[i] > 0 else 1.0
        noise = exponential(position_key(key, start + i - 1, 2, start), tokens[i - 1])
        if math.exp(-noise) < chance:
            kept = i
    if kept == len(tokens):
        return kept, draw(target[kept], position_key(key, start + kept, 0))[0]
    left = np.maximum(weights[kept] * target[kept] - draft[kept], 0)
    return kept, draw(left if left.sum() > 0 else target[kept], position_key(key, start + kept, 3, start))[0]


def relaxed(
    proposal: Proposal, target: np.ndarray, draws: Sequence[int], enough: Callable[[np.ndarray, int], bool]
) -> tuple[list[int], int]:
    """All paths whose every draft is kept, the longest and then likeliest of them, and the draw behind it."""
    best: tuple[int, float, int, list[int]] = (0, 0.0, 0, [])
    for node in range(len(proposal)):
        path, row, likelihood = proposal.path_to(node), 0, 0.0
        for step in path:
            token = proposal.tokens[step]
            if draws[row] != token and not enough(target[row], token):
                break
            likelihood += math.log(max(target[row][token], 1e-300))
            row = 1 + step
        else:
            best = max(best, (len(path), likelihood, -node, path))
    path = best[3]
    return path, draws[1 + path[-1] if path else 0]

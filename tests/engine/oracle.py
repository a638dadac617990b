"""Plain decoding, slow and obvious: one token at a time, NumPy and the twins of verification, no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import verify_twins as twins

from paceline.core.sampling import SamplingParams

_TARGET = 0  # the purpose number of the target's draws


@dataclass
class Plain:
    """tokens, reason, text   as the engine must give them
    logprobs   per token: its own, and all ids best first with theirs
    margin     how far the closest decision was from going the other way (ratios and logit gaps)
    """

    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    text: str = ""
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    margin: float = math.inf


def plain_decode(
    logits: Callable[[tuple[int, ...]], np.ndarray],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    eos: Iterable[int] = (),
    context: int = 4096,
    choice: int = 0,
    pieces: Mapping[int, str] | None = None,
) -> Plain:
    """What one choice of a request must be. Ends are looked for at every token, stops before the cap."""
    plain, ends = Plain(), frozenset(eos)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else ends)
    while True:
        row = np.asarray(logits((*prompt, *plain.tokens)), dtype=np.float32)
        token, margin = next_token(row, params, prompt, plain.tokens, vocab_size, ends, choice)
        if token is None:
            plain.reason = "error"
            return plain
        plain.margin = min(plain.margin, margin)
        plain.tokens.append(token)
        plain.logprobs.append(scores(row[:vocab_size], token))
        silent = token in stops and token in ends | set(params.stop_token_ids)
        if pieces is not None and not silent:
            plain.text += pieces.get(token, f"<{token}>")
        found = [plain.text.find(s) for s in params.stop if s in plain.text]
        if found:
            plain.text = plain.text[: min(found)]
        if found or token in stops:
            plain.reason = "stop"
            return plain
        full = len(prompt) + len(plain.tokens) >= context
        if full or (params.max_tokens is not None and len(plain.tokens) >= params.max_tokens):
            plain.reason = "length"
            return plain


def next_token(
    row: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    vocab_size: int,
    ends: frozenset[int],
    choice: int,
) -> tuple[int | None, float]:
    """The token of one position (None where there is none to be had) and its margin."""
    if np.isnan(row[:vocab_size]).any():
        return None, math.inf
    processed = twins.processed_logits(row, params, prompt, output, vocab_size, ends)
    if np.all(processed == -np.inf):
        return None, math.inf
    if params.temperature == 0:
        best = sorted(((-value, token) for token, value in enumerate(processed.tolist())))[:2]
        gap = best[1][0] - best[0][0] if len(best) > 1 else math.inf
        return best[0][1], gap
    assert params.seed is not None, "the oracle needs a seed"
    probs, distance = twins.to_probs(processed, params)
    key = twins.request_key(params.seed, choice)
    position = twins.position_key(key, len(prompt) + len(output), _TARGET)
    token, behind = twins.draw(probs, position)
    return token, min(distance, behind - 1)


def scores(row: np.ndarray, token: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of the model's own logits: of the token, and of all ids, best first."""
    values = row.astype(np.float64)
    logs = values - values.max()
    logs -= math.log(np.exp(logs).sum())
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return float(logs[token]), [(i, float(logs[i])) for i in order]

"""Returned log-probabilities: the model's own, before any option, over real ids only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.decode.verify.support import block_maxima, largest, row_mass, scaled

__all__ = ["TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """chosen: [rows] of the emitted tokens; ids, logprobs: [rows, top] alternatives, most probable first."""

    chosen: Tensor
    ids: Tensor
    logprobs: Tensor


def token_logprobs(
    logits: Tensor,  # [rows, width], the model's own
    tokens: Tensor,  # [rows] int64
    top: int,
    vocab_size: int,
) -> TokenLogprobs:
    """Log-softmax of each row's token and of its `top` most probable ones (equal ones by lower id)."""
    real = logits[:, :vocab_size].float()
    maxima = block_maxima(real)
    peak = maxima.amax(-1, keepdim=True)
    log_mass = row_mass(real, peak, 1.0).log_()
    values, ids = largest(real, top, maxima)
    chosen = scaled(real.gather(1, tokens.unsqueeze(1)), peak, 1.0) - log_mass
    return TokenLogprobs(chosen.squeeze(1), ids, scaled(values, peak, 1.0) - log_mass)

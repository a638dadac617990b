"""Sampling parameters of one request: every field is honoured at every position of a verify block.

Order of application, the same for draft and target: allowed tokens, grammar, minimum length, bad words, logit bias,
penalties (repetition, presence, frequency), temperature, top-k, top-p, min-p. Temperature 0 is an exact one-hot
on the highest logit before it. Returned log-probabilities are the model's own, before any of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from paceline.core.grammar import Grammar
from paceline.errors import InvalidParameter

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens, and when to stop.

    temperature          0 (greedy) or more
    top_k                keep the k most probable tokens; None keeps all
    top_p                keep the smallest set of most probable tokens with mass >= top_p, in (0, 1]
    min_p                drop tokens less probable than min_p times the most probable, in [0, 1]
    repetition_penalty   > 0; divides positive and multiplies negative logits of tokens in prompt or output
    presence_penalty     in [-2, 2]; subtracted once from logits of tokens in the output
    frequency_penalty    in [-2, 2]; subtracted once per occurrence in the output
    logit_bias           token id -> addition in [-100, 100]
    bad_words            token-id sequences that never appear in the output; a string stands for the ids the
                         tokenizer gives it alone and after a space (other spellings in tokens are not caught)
    allowed_token_ids    only these ids are ever produced; None allows all
    grammar              what the whole output has to match; not with ignore_eos, for it ends with end-of-text
    min_tokens           end-of-text and stop ids are impossible before this many output tokens
    max_tokens           output tokens at most; None runs to the end of the context
    stop                 strings that end the output; the text ends before them, the ids with the token that
                         completes them
    stop_token_ids       ids that end the output, beside the model's end-of-text ids; kept as the last id
    ignore_eos           the model's end-of-text ids do not end the output
    logprobs             None, or how many alternatives to return beside each emitted token, in [0, 50]
    prompt_logprobs      the same for each prompt token but the first, which nothing precedes
    n                    independent choices of one prompt
    seed                 any integer; None draws a fresh one for every request
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        self._freeze()
        _real("temperature", self.temperature, 0.0, None, "0 (greedy) or a positive number")
        _real("top_p", self.top_p, 0.0, 1.0, "a number above 0 and up to 1", open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _real("repetition_penalty", self.repetition_penalty, 0.0, None, "a number above 0", open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidParameter("ignore_eos", True, "False with a grammar, whose end is end-of-text")
        _whole("n", self.n, 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 50)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, Integral)):
            raise InvalidParameter("seed", self.seed, "a whole number or None")
        self._check_tokens()

    def _freeze(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("stop", "bad_words", "stop_token_ids", "logit_bias"):
            if getattr(self, name) is None:
                raise InvalidParameter(name, None, "a collection, empty for none")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            put(name, tuple(w if isinstance(w, str) else tuple(w) for w in value))
        put("stop_token_ids", tuple(self.stop_token_ids))
        put("logit_bias", dict(self.logit_bias))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(self.allowed_token_ids))

    def _check_tokens(self) -> None:
        for token, bias in self.logit_bias.items():
            _real(f"logit_bias[{token}]", bias, -100.0, 100.0, "a number from -100 to 100")
        ids = [*self.stop_token_ids, *self.logit_bias, *(self.allowed_token_ids or ())]
        ids += [i for word in self.bad_words if not isinstance(word, str) for i in word]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
                raise InvalidParameter("token id", token, "a whole number from 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", (), "None, or at least one id")
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            if any(len(word) == 0 for word in words):
                raise InvalidParameter(name, words, "non-empty entries")
        if any(not isinstance(word, str) for word in self.stop):
            raise InvalidParameter("stop", self.stop, "strings; for ids use stop_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def _real(
    name: str, value: object, low: float, high: float | None, allowed: str, open_low: bool = False
) -> None:
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        if (number > low if open_low else number >= low) and (high is None or number <= high):
            return
    raise InvalidParameter(name, value, allowed)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if isinstance(value, Integral) and whole and int(value) >= low and (high is None or int(value) <= high):
        return
    raise InvalidParameter(name, value, f"a whole number from {low}" + (f" to {high}" if high is not None else ""))

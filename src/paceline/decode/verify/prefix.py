"""What has been committed of one sequence, as far as sampling options depend on it.

`PrefixState` holds committed tokens only. Drafts reach the options as an explicit path for each row, so that
nothing rejected can leave a trace (cases SD-06 and SD-11). Counts are kept incrementally and only once an
option asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.verify.grammar import GrammarState
from paceline.errors import InvalidParameter

__all__ = ["BadWords", "PrefixState", "TokenCounts"]

# Maps the tokens before the last one of a bad word to the last tokens that would complete one.
BadWords = dict[tuple[int, ...], list[int]]


class TokenCounts:
    """Distinct tokens seen, with how often each is in the output; grows by doubling, never shrinks."""

    __slots__ = ("_ids", "_output_counts", "slots")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self.slots = {token: slot for slot, token in enumerate(distinct)}
        capacity = max(64, 2 * len(distinct))
        self._ids = torch.zeros(capacity, dtype=torch.int64)
        self._ids[: len(distinct)] = torch.tensor(distinct, dtype=torch.int64)
        self._output_counts = torch.zeros(capacity)
        self.add(output)

    def add(self, tokens: Sequence[int]) -> None:
        """Counts tokens that joined the output."""
        for token in tokens:
            slot = self.slots.setdefault(token, len(self.slots))
            if slot == len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
                self._output_counts = torch.cat([self._output_counts, torch.zeros_like(self._output_counts)])
            self._ids[slot] = token
            self._output_counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        """[distinct] int64."""
        return self._ids[: len(self.slots)]

    @property
    def output_counts(self) -> Tensor:
        """[distinct] float32, aligned with `ids`; 0 for tokens of the prompt alone."""
        return self._output_counts[: len(self.slots)]


class PrefixState:
    """The committed prefix of one choice: prompt and output so far.

    prompt           token ids
    params           the request's options; ids in them must lie below `vocab_size`
    vocab_size       ids that mean something; logits may be wider (padding) or, a draft's, narrower
    eos_token_ids    the model's end-of-text ids
    grammar          what the output has to match, at its beginning; None for anything

    Raises InvalidParameter where an option names an id the vocabulary does not have.
    """

    __slots__ = ("_bad_words", "_cache", "_counts", "eos_token_ids", "grammar", "output", "prompt", "vocab_size")

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.output: list[int] = []
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.grammar = grammar
        self._counts: TokenCounts | None = None
        self._bad_words: tuple[object, BadWords] | None = None
        self._cache: dict[str, tuple[object, Tensor]] = {}
        _check_ids(params, vocab_size)

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes over the tokens a round emitted, in order."""
        self.output.extend(tokens)
        if self._counts is not None:
            self._counts.add(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)

    def counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self.prompt, self.output)
        return self._counts

    def tensor(self, name: str, source: object, build: Callable[[], Tensor]) -> Tensor:
        """A tensor made from an option once and kept while the option is the same object."""
        known = self._cache.get(name)
        if known is None or known[0] is not source:
            known = (source, build())
            self._cache[name] = known
        return known[1]

    def bad_words(self, words: tuple[str | tuple[int, ...], ...]) -> BadWords:
        """Last tokens of bad words by the tokens before them. Strings are resolved before the engine."""
        if self._bad_words is None or self._bad_words[0] is not words:
            table: BadWords = {}
            for word in words:
                assert not isinstance(word, str), f"bad word {word!r} was not resolved to token ids"
                table.setdefault(tuple(word[:-1]), []).append(word[-1])
            self._bad_words = (words, table)
        return self._bad_words[1]


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    named = {
        "logit_bias": list(params.logit_bias),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
        "stop_token_ids": list(params.stop_token_ids),
        "bad_words": [i for word in params.bad_words if not isinstance(word, str) for i in word],
    }
    for name, ids in named.items():
        if ids and max(ids) >= vocab_size:
            raise InvalidParameter(
                name, max(ids), f"token ids below {vocab_size}, the size of the vocabulary"
            )

"""Who has which part of the cache: sequences that run, and committed tokens kept for requests to come.

Slots from 0 to `lanes` are for sequences that run, low ones first, so that attention calls stay dense; the rest
are for prefixes. When a sequence ends, its slot stays as a prefix where it is, and is moved out of the way when
its lane is needed. A sequence that begins looks among the prefixes of its tenant, and among the sequences of its
tenant that run, for the longest common beginning with its own tokens, and starts behind it.

Guarantees: what is re-used has the bits a cold run computes. Where a token's bits do not depend on how its prompt
was cut (`RowPolicy.chunk_rows`) any length may be re-used; where that is not known, whole chunks of a prompt alone,
which a cold run computes by the same products. The last token is never taken from a prefix: its logits are needed.
Prefixes yield before sequences do, the one used longest ago first; nothing is shared between tenants.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from paceline.decode.cache import MIN_SHARED, KVCache
from paceline.decode.draft.match import shared_length
from paceline.decode.lazy_memory import can_be_lazy
from paceline.decode.model.base import TargetModel
from paceline.decode.sequence import Sequence

__all__ = ["PARKING", "Room", "new_room"]

PARKING = 3  # slots for prefixes, for each that runs
_TAIL = 64  # a prefix that would lose at most so many tokens is taken over; otherwise it is copied


@dataclass(slots=True)
class Prefix:
    """Committed tokens of a sequence: one that ended, or (`kept` False) one that runs.

    chunked   how many of them were computed in whole chunks of a prompt
    turned    whether by the second rotation, of a model that has two
    hidden    layer -> [len(tokens), width], where the sequence's drafter wanted them
    used      grows with every use
    """

    slot: int
    tokens: list[int]
    tenant: str
    chunked: int
    turned: bool = False
    hidden: dict[int, Tensor] = field(default_factory=dict)
    used: int = 0
    kept: bool = True


class Room:
    """See the module's docstring.

    lanes   sequences that run at most
    chunk   prompt tokens in one pass
    model   its row policy says whether bits depend on how a prompt is cut
    keep    whether prefixes outlive their sequences, and are shared at all
    """

    def __init__(self, cache: KVCache, lanes: int, chunk: int, model: TargetModel, *, keep: bool) -> None:
        policy = model.row_policy
        self.cache, self.lanes, self.keep = cache, lanes, keep
        self.any_length, self._tile = bool(policy.chunk_rows), policy.tile
        self.chunk = min([chunk, cache.largest_write, *policy.chunk_rows[-1:]])
        self._long_from = model.geometry.long_from
        self.prefixes: list[Prefix] = []
        self._clock = count(1)

    @property
    def most_tokens(self) -> int:
        """What one sequence can hold with the cache to itself."""
        cache, tokens = self.cache, self.cache.limit
        while cache.budget is not None and cache.cost(tokens) > cache.budget:
            tokens -= cache.block
        return tokens

    @property
    def held_slots(self) -> list[int]:
        return [prefix.slot for prefix in self.prefixes]

    @property
    def used_bytes(self) -> int:
        """Memory of the cache that is not held by prefixes."""
        return self.cache.nbytes - sum(map(self._cost, self.prefixes))

    def sharable(self, tokens: int) -> int:
        """How many of the first `tokens` of a prompt another sequence may take over."""
        if not self.keep:
            return 0
        kept = tokens if self.any_length else tokens // self.chunk * self.chunk
        return kept if kept >= MIN_SHARED else 0

    def next_chunk(self, sequence: Sequence, start: int) -> list[int]:
        """The tokens a sequence computes next on its way to its first token, or back to where it was preempted.

        Where bits depend on how a prompt is cut, it is cut as at first, and output is computed in products as
        small as those that decoded it.
        """
        end = min(start + self.chunk, sequence.filled)
        if not self.any_length:
            prompt = sequence.view.prompt_len
            end = min(end, prompt if start < prompt else start + self._tile)
        return sequence.tokens[start:end]

    # -- beginnings ----------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, running: Seq[Sequence], layers: Seq[int]) -> int | None:
        """Give a sequence a slot with what could be re-used in it; how many tokens, or None where it must wait.

        layers   whose hidden states its drafter wants of every token
        """
        tokens = len(sequence.tokens) + 1
        have = self.cache.free_bytes + sum(map(self._cost, self.prefixes))
        if self.cache.cost(tokens) > have:
            return None
        source, shared = self._match(sequence, running, layers)
        if source is not None and self._takes_over(source, shared, self.cache.cost(tokens), have):
            slot = self._take_over(source, shared)
        else:
            slot = self._lane(source)
        granted = self.grow(slot, tokens, source)
        assert granted, f"{tokens} tokens find no room in {have} bytes"
        if source is not None:
            if not self.cache.committed(slot):
                self.cache.copy(source.slot, slot, shared)
                source.used = next(self._clock)
            sequence.view.hidden = {layer: source.hidden[layer][:shared].clone() for layer in layers}
        sequence.slot = sequence.view.slot = slot
        return shared

    def grow(self, slot: int, tokens: int, keep: Prefix | None = None) -> bool:
        """Room for `tokens` in a slot that runs, prefixes yielding; False where there is none."""
        while not self.cache.grant(slot, tokens):
            others = [p for p in self.prefixes if p is not keep]
            if not others:
                return False
            self._drop(min(others, key=_age))
        return True

    # -- endings -------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence, *, useful: bool) -> None:
        """A sequence gives its slot back; what it committed stays as a prefix where that is `useful`."""
        assert sequence.slot is not None
        slot, sequence.slot = sequence.slot, None
        sequence.view.slot = None
        held = self._prefix_of(sequence, slot)
        kept = self.sharable(len(held.tokens) if self.any_length else held.chunked)
        if not useful or self.cache.resumable(slot, kept) < MIN_SHARED:
            self.cache.release(slot)
            return
        del held.tokens[kept:]
        self.cache.truncate(slot, kept)
        for other in [p for p in self.prefixes if p.tenant == held.tenant]:
            if other.tokens == held.tokens[: len(other.tokens)]:
                self._drop(other)
        self.cache.shrink(slot)
        held.used = next(self._clock)
        self.prefixes.append(held)

    def clear(self) -> None:
        """Forget every prefix."""
        for prefix in list(self.prefixes):
            self._drop(prefix)

    # -- matching ------------------------------------------------------------------------------------------

    def _prefix_of(self, sequence: Sequence, slot: int) -> Prefix:
        committed = self.cache.committed(slot)
        chunked = min(committed, sequence.view.prompt_len) // self.chunk * self.chunk
        tokens, hidden = sequence.tokens[:committed], sequence.view.hidden
        return Prefix(slot, tokens, sequence.request.tenant, chunked, self._turned(sequence), hidden)

    def _turned(self, sequence: Sequence) -> bool:
        return self._long_from is not None and sequence.limit > self._long_from

    def _match(
        self, sequence: Sequence, running: Seq[Sequence], layers: Seq[int]
    ) -> tuple[Prefix | None, int]:
        """Where the longest beginning of a sequence's tokens lies, and how long it is."""
        if not self.keep:
            return None, 0
        candidates = list(self.prefixes)
        for other in running:
            if other.slot is not None and other is not sequence:
                candidates.append(self._prefix_of(other, other.slot))
                candidates[-1].kept = False
        best, longest = None, MIN_SHARED - 1
        most = len(sequence.tokens) - 1
        if sequence.scores_prompt:  # every row of the prompt is wanted that has not been scored
            most = min(most, len(sequence.prompt_logprobs))
        mine = sequence.request.tenant, self._turned(sequence)
        for candidate in candidates:
            if (candidate.tenant, candidate.turned) != mine or not set(layers) <= candidate.hidden.keys():
                continue
            length = shared_length(candidate.tokens, sequence.tokens[:most])
            if not self.any_length:
                length = min(length, candidate.chunked) // self.chunk * self.chunk
            length = self.cache.resumable(candidate.slot, length)
            if length > longest:
                best, longest = candidate, length
        return best, longest if best is not None else 0

    # -- places --------------------------------------------------------------------------------------------

    def _takes_over(self, source: Prefix, shared: int, wanted: int, have: int) -> bool:
        """Whether a prefix is used up: little would be lost, or a copy has no place beside it."""
        if not source.kept:
            return False
        room = self.cache.slots > self.lanes and have - self._cost(source) >= wanted
        return not room or len(source.tokens) - shared <= _TAIL

    def _take_over(self, source: Prefix, shared: int) -> int:
        self.prefixes.remove(source)
        self.cache.truncate(source.slot, shared)
        self.cache.shrink(source.slot)
        if source.slot < self.lanes:
            return source.slot
        slot = self._lane(None)
        self.cache.release(slot)
        self.cache.move(source.slot, slot)
        return slot

    def _lane(self, keep: Prefix | None) -> int:
        """A slot for a sequence that runs, taken; the prefix that lies in it, if any, is moved or dropped."""
        lane = next((s for s in range(self.lanes) if self.cache.is_free(s)), None)
        if lane is None:
            inside = [p for p in self.prefixes if p.slot < self.lanes]
            assert inside, "more sequences run than there are lanes"
            lane = self._clear_lane(min(inside, key=lambda p: (p is keep, p.used)), keep)
        self.cache.take(lane)
        return lane

    def _clear_lane(self, prefix: Prefix, keep: Prefix | None) -> int:
        lane = prefix.slot
        parking = range(self.lanes, self.cache.slots)
        if not any(self.cache.is_free(s) for s in parking):
            parked = [p for p in self.prefixes if p.slot in parking]
            oldest = min((p for p in [*parked, prefix] if p is not keep), key=_age)
            self._drop(oldest)
            if oldest is prefix:
                return lane
        prefix.slot = next(s for s in parking if self.cache.is_free(s))
        self.cache.move(lane, prefix.slot)
        return lane

    def _cost(self, prefix: Prefix) -> int:
        return self.cache.cost(self.cache.granted(prefix.slot))

    def _drop(self, prefix: Prefix) -> None:
        self.prefixes.remove(prefix)
        self.cache.release(prefix.slot)


def new_room(
    model: TargetModel, lanes: int, context: int, chunk: int, cache_bytes: int | None, keep: bool
) -> Room:
    """A cache for `lanes` sequences of `context` tokens, `cache_bytes` together, and who is in it."""
    parked = lanes * PARKING if keep and can_be_lazy(model.geometry.device) else 0
    cache = model.new_cache(lanes + parked, context)
    cache.budget = lanes * cache.cost(cache.limit) if cache_bytes is None else cache_bytes
    return Room(cache, lanes, chunk, model, keep=keep)


def _age(prefix: Prefix) -> int:
    return prefix.used

"""A scripted pair: a target whose logits are a function of the true prefix, and drafters that follow a plan.

`ToyModel` keeps each token and its position in the engine's own cache and knows a row's prefix only by reading
back what attention would read: the keys its mask lets through. A wrong roll-back, position, mask, slot or
cache row therefore shows as a wrong token, or as a row that cannot see the positions before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from paceline.core.output import Delta, TokenLogprob
from paceline.core.proposal import Proposal, Verdict
from paceline.core.records import StepRecord
from paceline.core.sampling import SamplingParams
from paceline.decode.cache import KVCache
from paceline.decode.draft.base import Drafter, Needs, SequenceView
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.step import AttentionGroup, Geometry, RowPolicy, StepInputs
from paceline.decode.sequence import DraftSettings, Phase, Request
from paceline.decode.sequence import Sequence as Choice
from paceline.decode.verify.leniency import Leniency

LogitFn = Callable[[tuple[int, ...]], np.ndarray]
FAULTS = pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])


# -- targets ---------------------------------------------------------------------------------------------------


def hashed(width: int, seed: int = 0, scale: float = 2.0, order: int | None = None) -> LogitFn:
    """Random logits [width], looked up by a hash of the whole prefix (or of its last `order` tokens)."""
    table = (np.random.default_rng(seed).standard_normal((997, width)) * scale).astype(np.float32)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        seen = prefix if order is None else prefix[-order:]
        return table[zlib.crc32(np.array(seen, dtype=np.int64).tobytes()) % len(table)]

    return logits


def scripted(script: Seq[int], width: int, prompt_len: int = 1) -> LogitFn:
    """Says `script` after the prompt, whatever the prompt; off the script, something random.

    The script's token leads by 6; its runner-up is the token after it in the vocabulary.
    """
    noise = hashed(width, seed=7, scale=0.5)

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = noise(prefix).copy()
        said = len(prefix) - prompt_len
        if said < len(script) and list(prefix[prompt_len:]) == list(script[:said]):
            row[script[said]] = 9.0
            row[(script[said] + 1) % width] = 3.0
        return row

    return logits


class ToyModel:
    """See the module's docstring. A cache row is [position, token id].

    logits          of a prefix, [width] float32
    max_positions   as a table of rotations would have; a position past it is an error
    chunk_rows      of its row policy; none means that bits depend on how a prompt is cut
    """

    def __init__(
        self, logits: LogitFn, width: int, *, max_positions: int = 4096, multiple: int = 4,
        chunk_rows: tuple[int, ...] = (),
    ) -> None:
        self.logits, self.vocab_width, self.max_positions = logits, width, max_positions
        self.geometry = Geometry(kv_heads=1, group=2, dtype=torch.float32, device=torch.device("cpu"))
        self.row_policy = RowPolicy(multiple=multiple, tile=8, kv_block=16, chunk_rows=chunk_rows)
        self.dtype = torch.float32
        self.weight_bytes = 0
        self.seen: list[tuple[int, ...]] = []  # prefixes of the rows whose logits were asked for

    def new_cache(self, slots: int, limit: int) -> KVCache:
        return KVCache(1, 1, 1, slots, limit, torch.float32, torch.device("cpu"))

    def forward(self, step: StepInputs, cache: KVCache, taps: Sequence[int] = ()) -> ForwardResult:
        total = len(step.token_ids)
        real = list(range(step.tokens)) if step.real is None else step.real.tolist()
        ids, positions = step.token_ids[real], step.positions[real]
        assert int(ids.min()) >= 0 and int(ids.max()) < self.vocab_width, f"ids {ids.tolist()} have no embedding"
        assert int(positions.max()) < self.max_positions, f"position {int(positions.max())} has no rotation"
        rows = torch.stack([step.positions, step.token_ids], dim=1).float()
        cache.write(0, step.cache_slots, step.cache_positions, rows[real])
        wanted = list(range(total)) if step.wanted is None else step.wanted.tolist()
        needed = set(real) & (set(range(total)) if taps else set(wanted))
        prefixes: dict[int, tuple[int, ...]] = {}
        for group in step.groups:
            if group.placed is not None:
                own, slots, places = group.placed
                cache.write(0, slots, places, rows[own])
            prefixes |= self._read(group, step, cache, needed)
        logits = np.zeros((len(wanted), self.vocab_width), dtype=np.float32)
        for place, row in enumerate(wanted):
            if row in prefixes:
                logits[place] = self.logits(prefixes[row])
                self.seen.append(prefixes[row])
        hidden = torch.tensor([toy_hidden(prefixes.get(row, ())) for row in range(total)])
        return ForwardResult(torch.from_numpy(logits), {layer: hidden + layer for layer in taps})

    def _read(
        self, group: AttentionGroup, step: StepInputs, cache: KVCache, needed: set[int]
    ) -> dict[int, tuple[int, ...]]:
        """What each needed row of the group sees: tokens in the order of their stored positions."""
        keys, values = (
            x[:, 0, :, 0].numpy() for x in cache.keys_values(0, group.slot_low, group.slot_high, group.kv_len)
        )
        width = group.width
        seen = (group.mask == 0).view(len(keys), self.geometry.group, width, -1).numpy()
        before = np.ones((*seen.shape[:-1], group.past), dtype=bool)
        seen = np.concatenate([before, seen], axis=-1)
        assert (seen[:, :1] == seen).all(), "query heads of one KV head see different keys"
        places = range(len(keys) * width)
        pairs = list(zip(places, places, strict=True))
        if group.back is not None:
            assert group.rows is not None
            own, back = group.back
            assert group.rows[back].tolist() == own.tolist(), "queries and the rows they go back to differ"
            pairs = list(zip(own.tolist(), back.tolist(), strict=True))
        positions = step.positions.tolist()
        read = {}
        for row, place in pairs:
            if row in needed:
                slot, query = divmod(place, width)
                visible = seen[slot, 0, query]
                at, tokens = keys[slot, visible].astype(int), values[slot, visible].astype(int)
                order = at.argsort(kind="stable")
                assert at[order].tolist() == list(range(positions[row] + 1)), (
                    f"the row at position {positions[row]} sees positions {sorted(at.tolist())}"
                )
                read[row] = tuple(tokens[order].tolist())
        return read


def toy_hidden(prefix: Iterable[int]) -> list[float]:
    """Two numbers that name a prefix."""
    tokens = np.array(list(prefix), dtype=np.int64)
    return [float(len(tokens)), float(zlib.crc32(tokens.tobytes()) % 65536)]


class ToyPieces:
    """Text of tokens by table; ids without an entry are their number in brackets."""

    def __init__(self, table: Mapping[int, str]) -> None:
        self.table = table

    def push(self, token_id: int) -> str:
        return self.table.get(token_id, f"<{token_id}>")

    def flush(self) -> str:
        return ""


# -- drafters --------------------------------------------------------------------------------------------------

Propose = Callable[[SequenceView, int], "Proposal | Seq[int]"]


@dataclass
class Scripted:
    """Proposes what `propose` says (a chain of tokens, or a Proposal), cut to the budget; keeps the contract's
    books: begin and end once, committed tokens only grow, verdicts belong to what was proposed.
    """

    propose_one: Propose
    name: str = "scripted"
    needs: Needs = field(default_factory=Needs)
    held: dict[int, int] = field(default_factory=dict)  # key -> committed tokens last seen
    last: dict[int, Proposal] = field(default_factory=dict)
    drafted: list[tuple[int, ...]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    preempted: set[int] = field(default_factory=set)

    def begin(self, view: SequenceView) -> None:
        assert view.key not in self.held, f"sequence {view.key} began twice"
        assert len(view.tokens) == view.prompt_len or view.key in self.preempted, "begun after its prompt"
        self.held[view.key] = len(view.tokens)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        made = []
        for view, budget in zip(views, budgets, strict=True):
            assert budget > 0, "asked for nothing"
            assert self.held[view.key] == len(view.tokens), "tokens grew without observe"
            answer = self.propose_one(view, budget)
            if not isinstance(answer, Proposal):
                answer = Proposal.chain(list(answer)[:budget], self.name) if answer else Proposal()
            self.last[view.key] = answer
            self.drafted.append(answer.tokens)
            self.budgets.append(budget)
            made.append(answer)
        return made

    def observe(self, views: Seq[SequenceView], verdicts: Seq[Verdict | None]) -> None:
        for view, verdict in zip(views, verdicts, strict=True):
            before = self.held[view.key]
            assert len(view.tokens) > before, "observe without news"
            proposal = self.last.pop(view.key, Proposal())
            if verdict is not None:
                assert max(verdict.path, default=-1) < len(proposal), "a path outside the proposal"
                assert view.tokens[before:] == verdict.tokens(proposal), "the verdict is not what was committed"
            self.held[view.key] = len(view.tokens)

    def end(self, view: SequenceView) -> None:
        del self.held[view.key]
        self.last.pop(view.key, None)
        if view.preempted:
            self.preempted.add(view.key)

    def check_idle(self) -> None:
        assert not self.held, f"state held for ended sequences {sorted(self.held)}"


def following(truth: Callable[[SequenceView], Seq[int]], plan: Seq[int | tuple[int, int]], width: int) -> Propose:
    """Chains that follow the output `truth(view)`; `plan`, used cyclically by output length, says how far.

    An entry is (right, length): so many right tokens, then wrong ones up to `length`; an int k is (k, k + 1).
    Past the end of the truth a draft is 0.
    """

    def propose(view: SequenceView, budget: int) -> list[int]:
        said = len(view.tokens) - view.prompt_len
        entry = plan[said % len(plan)]
        right, length = (entry, entry + 1) if isinstance(entry, int) else entry
        whole = list(truth(view))
        ahead = [whole[i] if i < len(whole) else 0 for i in range(said, said + length)]
        return [token if i < right else (token + 1) % width for i, token in enumerate(ahead)][:budget]

    return propose


def branching(truth: Callable[[SequenceView], Seq[int]], width: int) -> Propose:
    """Trees: beside the true chain a wrong sibling at every depth, each with a child; listed before or after."""

    def propose(view: SequenceView, budget: int) -> Proposal:
        said = len(view.tokens) - view.prompt_len
        ahead = list(truth(view))[said : said + min(budget, 1 + said % 4)]
        tokens: list[int] = []
        parents: list[int | None] = []
        at: int | None = None
        for depth, token in enumerate(ahead):
            children = [token, (token + 1) % width] if (said + depth) % 2 else [(token + 1) % width, token]
            places = []
            for child in children:
                places.append(len(tokens))
                tokens.append(child)
                parents.append(at)
            if depth + 1 < len(ahead):
                tokens.append(ahead[depth + 1])  # right token under the wrong sibling
                parents.append(places[1 - children.index(token)])
            at = places[children.index(token)]
        return Proposal(tuple(tokens), tuple(parents), drafter="scripted")

    return propose


# -- running ---------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """One choice, as its deltas told it; checked against the sequence."""

    tokens: list[int]
    text: str
    reason: str | None
    logprobs: list[TokenLogprob]
    sequence: Choice
    deltas: list[Delta]


class Lab:
    """Makes engines, runs requests on them with the books checked in every round, and injects faults."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.records: list[StepRecord] = []

    def engine(
        self,
        model: object,
        drafters: Mapping[str, Drafter] | Drafter | Propose | None = None,
        *,
        kind: type[Engine] = Engine,
        vocab_size: int | None = None,
        eos: Iterable[int] = (),
        pieces: Mapping[int, str] | None = None,
        **options: object,
    ) -> Engine:
        """`drafters` by name, or one that is called "scripted"."""
        if drafters is None:
            drafters = {}
        elif not isinstance(drafters, Mapping):
            one = drafters if isinstance(drafters, Drafter) else Scripted(drafters)
            drafters = {"scripted": one}
        engine = kind(
            model,  # type: ignore[arg-type]
            vocab_size=vocab_size or model.vocab_width,  # type: ignore[attr-defined]
            eos_token_ids=frozenset(eos),
            drafters=drafters,
            options=EngineOptions(**options),  # type: ignore[arg-type]
            new_pieces=None if pieces is None else lambda: ToyPieces(pieces),
            on_record=self.records.append,
        )
        self.engines.append(engine)
        return engine

    def run(self, engine: Engine, requests: Seq[Request], arrivals: Seq[int] | None = None) -> dict[str, list[Ran]]:
        """Every request to its end, request i added before round `arrivals[i]`."""
        waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
        choices: list[Choice] = []
        deltas: list[Delta] = []
        step = 0
        while waiting or engine.has_work:
            while waiting and waiting[0][0] <= step:
                choices += engine.add(requests[waiting.pop(0)[1]])
            deltas += engine.step()
            check_books(engine)
            step += 1
            assert step < 5000, "the engine does not come to an end"
        result: dict[str, list[Ran]] = {}
        for choice in choices:
            result.setdefault(choice.request.request_id, []).append(collect(choice, deltas))
        return result

    def one(self, engine: Engine, request: Request) -> Ran:
        return self.run(engine, [request])[request.request_id][0]

    def judge(self, fault: bool, check: Callable[[], None], match: str | None = None) -> None:
        """The check passes, or, with its fault injected, fails."""
        if not fault:
            check()
            return
        with pytest.raises(AssertionError, match=match):
            check()
        self.engines.clear()

    def close(self) -> None:
        for engine in self.engines:
            assert not engine.has_work, "a test left work behind"
            engine.check()
            check_all_free(engine)


def check_all_free(engine: Engine) -> None:
    """Once the prefixes are forgotten, nothing of the cache is in use."""
    engine.clear_prefix_cache()
    assert engine.cache.free_slots == engine.cache.slots
    assert engine.cache.free_bytes == engine.cache.budget


def check_books(engine: Engine) -> None:
    """Between rounds: the cache holds all but the last committed token of everything that decodes."""
    engine.check()
    for choice in engine._running:
        assert choice.slot is not None
        held = engine.cache.committed(choice.slot)
        if choice.phase is Phase.DECODE:
            assert held == len(choice.tokens) - 1, f"{held} cached of {len(choice.tokens)} committed tokens"
        else:
            assert held < choice.filled


def collect(choice: Choice, deltas: Seq[Delta]) -> Ran:
    """The deltas of one choice, joined; they must add up to the sequence and to its counters."""
    own = [d for d in deltas if (d.request_id, d.choice) == (choice.request.request_id, choice.choice)]
    ran = Ran(
        [t for d in own for t in d.token_ids],
        "".join(d.text for d in own),
        own[-1].finish_reason,
        [entry for d in own for entry in d.logprobs],
        choice,
        own,
    )
    assert [d.finish_reason for d in own[:-1]] == [None] * (len(own) - 1) and ran.reason is not None
    assert ran.tokens == choice.output and ran.text == choice.text and ran.logprobs == choice.logprobs
    stats = choice.stats
    for delta in own:
        accepted = sum(delta.accepted)
        assert list(delta.accepted) == [True] * accepted + [False] * (len(delta.token_ids) - accepted)
        assert len(delta.token_ids) - accepted in (0, 1), "a round emits at most one token of the target's own"
        if choice.request.params.logprobs is not None:
            assert [e.token_id for e in delta.logprobs] == list(delta.token_ids)
    assert stats.accepted == sum(sum(d.accepted) for d in own) <= stats.drafted
    assert stats.emitted + bool(ran.tokens) == len(ran.tokens)
    assert stats.emitted - stats.accepted <= stats.rounds
    return ran


def request(
    prompt: Seq[int],
    *,
    id: str = "r",
    draft: str = "scripted",
    length: int | None = None,
    params: SamplingParams | None = None,
    tree: int | None = None,
    verify: str = "coupled",
    relaxed: Leniency | None = None,
    **options: object,
) -> Request:
    """`options` are those of SamplingParams."""
    params = params or SamplingParams(**options)  # type: ignore[arg-type]
    return Request(id, tuple(prompt), params, DraftSettings(draft, length, verify, tree, relaxed))

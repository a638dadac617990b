"""How far each sequence drafts in this round, and with whom: a pure function over the whole batch.

Maximised is the goodput, expected emitted tokens per second: (Σ_i 1 + Σ_{j<=k_i} S_ij) / C(k), S_ij the chance
that draft j of sequence i ends up on the accepted path and C the seconds of the round (TurboSpec, arXiv
2406.14066; DSpark, arXiv 2607.05147; the marginal rule).

One drafter a sequence, and a cost of rows alone: for every total of rows the most tokens are had by taking the
drafts of highest survival, so one pass over the drafts sorted by survival meets the optimum whatever the shape
of the cost, steps and cliffs included (where the cost is convex it could stop at the first draft that does not
pay). Several drafters, drafting that costs time, and query blocks of single sequences make it a choice of sets;
then each sequence is given the drafter of most value at the going price of a second, for each number of steps of
a costly one, and the pass over sorted drafts prices what it takes exactly. One sequence is always solved exactly.
`choose_free` is for the most common round by far, in which everybody has one drafter that costs nothing: one loop
without a record for each sequence.
Twin: `tests/control/control_twins.py::best_by_enumeration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

__all__ = ["Contender", "Load", "Option", "Pick", "Plan", "RoundCost", "choose_free", "choose_lengths"]


class Option(NamedTuple):
    """What one drafter offers one sequence.

    survival   by position, never rising: P(draft is accepted)
    drafter    index of a drafter whose steps cost time; None where drafting costs nothing (or is paid already)
    entry_s    seconds to pay in this round before its first draft (catch-up of a draft model)
    source     what the caller knows it by
    """

    survival: Seq[float]
    drafter: int | None = None
    entry_s: float = 0.0
    source: int = 0


class Contender(NamedTuple):
    """A sequence that may draft: its options, and the seconds of each further block of query rows."""

    options: Seq[Option] = ()
    block_s: float = 0.0


class Load(NamedTuple):
    """What else is in the round: rows of other decoding sequences, and the tokens they are expected to emit."""

    rows: int = 0
    tokens: float = 0.0


class RoundCost(Protocol):
    """Seconds. `block` is the multiple to which the query rows of a sequence are padded, >= 1."""

    block: int

    def pass_s(self, rows: int) -> float:
        """Of a target pass over `rows` rows, each sequence with one block of queries; never falls with rows."""
        ...

    def passes_s(self, rows: int, count: int) -> list[float]:
        """`pass_s` of `rows`, `rows` + 1 and so on."""
        ...

    def step_s(self, drafter: int, sequences: int) -> float:
        """Of one drafting step of so many sequences together."""
        ...


class Pick(NamedTuple):
    """The option taken, and how many of its drafts; (None, 0) decodes plainly."""

    option: int | None = None
    length: int = 0


class Plan(NamedTuple):
    """A pick for each sequence; expected tokens and seconds of the round, and the seconds of a plain one."""

    picks: tuple[Pick, ...]
    tokens: float
    seconds: float
    plain_tokens: float
    plain_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def plain_rate(self) -> float:
        return self.plain_tokens / self.plain_s


_NOTHING = Pick()
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # steps of a costly drafter that are tried for a batch
_PATIENCE = 2
_LOOK_AHEAD = 8  # rows over which the price of a row is averaged when drafters are compared


def choose_lengths(state: Seq[Contender], cost: RoundCost, load: Load, min_gain: float = 0.0) -> Plan:
    """The picks with the most expected tokens per second; none where that is not (1 + min_gain) times plain."""
    count = len(state)
    assert count > 0, "no sequence to choose for"
    tokens, plain_s = load.tokens + count, cost.pass_s(load.rows + count)
    assert plain_s > 0.0, f"a plain pass takes {plain_s} seconds; it must take time"
    plain = Plan((_NOTHING,) * count, tokens, plain_s, tokens, plain_s)
    if not any(contender.options for contender in state):
        return plain
    best = _alone(state[0], cost, load, plain) if count == 1 else _together(state, cost, load, plain)
    return best if best.rate > plain.rate * (1.0 + min_gain) else plain


def choose_free(
    survivals: Seq[Seq[float]],  # by sequence, of its one drafter's drafts; none costs time to draft
    blocks_s: Seq[float],  # by sequence, of each further block of its query rows
    cost: RoundCost,
    load: Load,
    min_gain: float = 0.0,
) -> tuple[list[int], Plan]:
    """`choose_lengths` of the one option of each sequence, in fewer steps; its lengths instead of the plan's picks."""
    count, block = len(survivals), cost.block
    tokens, plain_s = load.tokens + count, cost.pass_s(load.rows + count)
    chances: list[float] = []  # of all drafts, by sequence and position
    more_s: list[float] = []  # what taking it adds to the pass's rows
    owners: list[int] = []
    for i, survival in enumerate(survivals):
        drafts = len(survival)
        chances += survival
        owners += [i] * drafts
        more_s += [0.0] * drafts
        if drafts >= block:
            more_s[len(more_s) - drafts + block - 1 :: block] = [blocks_s[i]] * (drafts // block)
    taken, best_tokens, best_s = _best_prefix(chances, more_s, {}, cost, load.rows + count, tokens, plain_s)
    lengths = [0] * count
    if best_tokens / best_s <= tokens / plain_s * (1.0 + min_gain):
        return lengths, Plan((), tokens, plain_s, tokens, plain_s)
    for draft in taken:
        lengths[owners[draft]] += 1
    return lengths, Plan((), best_tokens, best_s, tokens, plain_s)


def _alone(contender: Contender, cost: RoundCost, load: Load, plain: Plan) -> Plan:
    """Every length of every option."""
    best, best_tokens, best_s = _NOTHING, plain.tokens, plain.plain_s
    options, block_s = contender
    block, longest = cost.block, max([len(option.survival) for option in options])
    passes_s = cost.passes_s(load.rows + 2, longest)
    for index, (survival, drafter, extra, _) in enumerate(options):
        tokens = plain.tokens
        step = 0.0 if drafter is None else cost.step_s(drafter, 1)
        for length, chance in enumerate(survival, start=1):
            tokens += chance
            extra += step
            if length % block == 0:
                extra += block_s
            seconds = passes_s[length - 1] + extra
            if tokens * best_s > best_tokens * seconds:
                best, best_tokens, best_s = Pick(index, length), tokens, seconds
    return Plan((best,), best_tokens, best_s, plain.tokens, plain.plain_s)


def _together(state: Seq[Contender], cost: RoundCost, load: Load, plain: Plan) -> Plan:
    """Free drafters first; then, at the price found, who does better with a costly one, for each depth of its."""
    base = load.rows + len(state)
    scanned: set[tuple[int | None, ...]] = set()
    best = _assign_and_scan(state, None, 0, cost, base, plain, plain, scanned)
    for drafter in sorted({o.drafter for c in state for o in c.options if o.drafter is not None}):
        deepest = max(len(o.survival) for c in state for o in c.options if o.drafter == drafter)
        misses = 0
        for depth in (d for d in _DEPTHS if d < deepest * 2):
            found = _assign_and_scan(state, drafter, depth, cost, base, plain, best, scanned)
            misses = 0 if found is not best else misses + 1
            if misses == _PATIENCE:  # deeper ones go on losing; twice allows for a step of the cost
                break
            best = found
    return best


def _assign_and_scan(
    state: Seq[Contender],
    drafter: int | None,
    depth: int,
    cost: RoundCost,
    base: int,
    plain: Plan,
    best: Plan,
    scanned: set[tuple[int | None, ...]],  # choices without a costly drafter: the same at any depth
) -> Plan:
    """`best`, or what is better with each sequence's worthiest option, `drafter` drafting up to `depth` tokens."""
    sharing = len(state)
    seen: tuple[int | None, ...] | None = None
    for _ in range(2):
        taken = max(sum(pick.length for pick in best.picks), _LOOK_AHEAD)
        row_s = (cost.pass_s(base + taken) - cost.pass_s(base)) / taken
        step_s = 0.0 if drafter is None else cost.step_s(drafter, sharing) / sharing
        chosen = tuple(_worthiest(c, drafter, depth, best.rate, row_s, step_s) for c in state)
        if chosen == seen or chosen in scanned:
            break
        seen = chosen
        found = _scan(state, chosen, depth, cost, base, plain)
        best = found if found.rate > best.rate else best
        users = [c for i, c in zip(chosen, state, strict=True) if i is not None and c.options[i].drafter is not None]
        sharing = max(len(users), 1)
        if not users:
            scanned.add(chosen)
    return best


def _worthiest(
    contender: Contender, drafter: int | None, depth: int, rate: float, row_s: float, step_s: float
) -> int | None:
    """The option of most value where a second is worth `rate` tokens, among free ones and `drafter`'s."""
    best, best_value = None, 0.0
    for index, option in enumerate(contender.options):
        if option.drafter is not None and option.drafter != drafter:
            continue
        price = rate * (row_s + (0.0 if option.drafter is None else step_s))
        top = 0.0
        for chance in option.survival if option.drafter is None else option.survival[:depth]:
            if chance <= price:  # nor do those behind it pay: survival never rises
                break
            top += chance - price
        top -= rate * option.entry_s
        if top > best_value or (best is None and option.drafter is None):
            best, best_value = index, top
    return best


def _scan(
    state: Seq[Contender], chosen: Seq[int | None], deepest: int, cost: RoundCost, base: int, plain: Plan
) -> Plan:
    """Take drafts in the order of their survival, costly ones up to `deepest`; the best of all prefixes."""
    chances: list[float] = []  # of all drafts, by sequence and position
    more_s: list[float] = []  # what taking it adds to the pass's rows and to drafting steps
    owners: list[int] = []
    steps: dict[int, tuple[int, int]] = {}  # of a costly drafter's drafts: drafter and depth
    block = cost.block
    for i, index in enumerate(chosen):
        if index is None:
            continue
        (options, block_s), first = state[i], len(chances)
        survival, drafter, entry_s, _ = options[index]
        if drafter is not None:
            survival = survival[:deepest]
            steps.update((first + depth, (drafter, depth)) for depth in range(len(survival)))
        chances += survival
        owners += [i] * len(survival)
        added = [0.0] * len(survival)
        added[block - 1 :: block] = [block_s] * (len(survival) // block)  # a further block of its queries begins
        added[0] += entry_s
        more_s += added
    taken, tokens, seconds = _best_prefix(chances, more_s, steps, cost, base, plain.tokens, plain.plain_s)
    lengths = [0] * len(state)
    for draft in taken:
        lengths[owners[draft]] += 1
    picks = tuple([Pick(index, n) if n else _NOTHING for index, n in zip(chosen, lengths, strict=True)])
    return Plan(picks, tokens, seconds, plain.tokens, plain.plain_s)


def _best_prefix(
    chances: Seq[float],
    more_s: Seq[float],
    steps: Mapping[int, tuple[int, int]],
    cost: RoundCost,
    base: int,
    tokens: float,
    plain_s: float,
) -> tuple[list[int], float, float]:
    """Of drafts sorted by chance (parents are never less likely than what follows them), the prefix of most tokens a
    second, with its tokens and seconds; `base` rows emit `tokens` in `plain_s` without any."""
    order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)
    sharing: dict[tuple[int, int], int] = {}  # by drafter and depth, the sequences that draft so deep
    best, best_tokens, best_s, extra = 0, tokens, plain_s, 0.0
    passes_s = cost.passes_s(base + 1, len(order))
    for taken, (draft, seconds) in enumerate(zip(order, passes_s, strict=True), start=1):
        tokens += chances[draft]
        extra += more_s[draft]
        if steps and draft in steps:
            extra += _shared_step_s(cost, sharing, steps[draft])
        seconds += extra
        if tokens * best_s > best_tokens * seconds:
            best, best_tokens, best_s = taken, tokens, seconds
    return order[:best], best_tokens, best_s


def _shared_step_s(cost: RoundCost, sharing: dict[tuple[int, int], int], step: tuple[int, int]) -> float:
    """Seconds that one more sequence adds to a step of a drafter; it is counted in."""
    drafter, others = step[0], sharing.get(step, 0)
    sharing[step] = others + 1
    return cost.step_s(drafter, others + 1) - (cost.step_s(drafter, others) if others else 0.0)

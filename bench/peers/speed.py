"""Arms in turns on the same prompts, and what came of it as tables.

A prompt is answered by every arm of one stream directly after one another, in a turning order, round by round; arms of
several streams get all prompts of a kind at once, likewise. Speed of one stream: tokens after the first over the
seconds they took, by the engine's own clock where it has one; of several: tokens of all answers over the whole time,
prompts included. A ratio is of runs of the same prompt in the same round, its geometric mean over prompts and rounds;
its interval is a bootstrap over rounds (the prompts are a fixed set, what changes is the machine). Answers end where
the model ends them, so a ratio of rates may compare texts of different length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers.arms import ENGINES, PACELINE, Arm, parse_arm
from bench.peers.child import Child
from paceline.bench.paired import arm_order, bootstrap_interval, first_difference, geometric_mean
from paceline.bench.results import ResultFile

__all__ = ["ALL", "LONG", "Measured", "Prompt", "arm_speed", "markdown", "measure", "paired", "report", "start"]

ALL = "all at once"
LONG = "long"  # prompts whose first token is what is looked at
_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm's answer to one prompt, or, with the prompt `ALL`, to all of a kind at once.

    texts    by prompt, without the end token
    tokens   computed, end tokens too
    first_s  to the first token; None for several streams
    spent_s  from the first token to the last; for several streams the whole time
    """

    arm: str
    kind: str
    prompt: str
    round: int
    texts: tuple[tuple[int, ...], ...]
    tokens: int
    first_s: float | None
    spent_s: float

    @property
    def place(self) -> tuple[str, str, int]:
        """What measurements of two arms must share to be compared."""
        return self.kind, self.prompt, self.round

    @property
    def speed(self) -> float | None:
        """Tokens a second; None for an answer of one token."""
        tokens = self.tokens if self.first_s is None else self.tokens - 1
        return tokens / self.spent_s if tokens > 0 and self.spent_s > 0 else None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Measured:
        return cls(**{**row, "texts": tuple(tuple(t) for t in row["texts"])})


# -- measuring -------------------------------------------------------------------------------------------------


def measure(
    children: Mapping[Arm, Child],
    prompts: Sequence[Prompt],
    results: ResultFile,
    *,
    rounds: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    seconds: float,
    say: Callable[[str], None],
) -> list[Measured]:
    """What `results` lacks is measured and put there; `seconds` ends it behind the prompt in which they ran out."""
    done = {(m.arm, *m.place): m for m in map(Measured.of_row, results.rows)}
    for child in children.values():
        child.ask("generate", prompts=[prompts[0].ids], max_tokens=_WARM_TOKENS)  # the first call is slower
    until = time.monotonic() + seconds
    for number in range(rounds):
        for index, (kind, name, group, arms) in enumerate(_blocks(prompts, list(children))):
            if time.monotonic() > until:
                say(f"time is over in round {number + 1} of {rounds}")
                return list(done.values())
            for text in arm_order([str(a) for a in arms], index, number):
                if (text, kind, name, number) not in done:
                    answer = children[parse_arm(text)].ask(
                        "generate", prompts=[p.ids for p in group], max_tokens=max_tokens
                    )
                    one = _measured(text, kind, name, number, answer, stop_ids)
                    results.append(asdict(one))
                    done[text, kind, name, number] = one
        say(f"round {number + 1} of {rounds}")
    return list(done.values())


def _blocks(prompts: Sequence[Prompt], arms: Sequence[Arm]) -> list[tuple[str, str, list[Prompt], list[Arm]]]:
    """(kind, prompt, what is asked, who is asked), single streams first."""
    single, many = [a for a in arms if a.streams == 1], [a for a in arms if a.streams > 1]
    kinds = dict.fromkeys(p.kind for p in prompts)
    blocks = [(p.kind, p.name, [p], single) for p in prompts if single]
    return blocks + [(k, ALL, [p for p in prompts if p.kind == k], many) for k in kinds if many]


def _measured(
    arm: str, kind: str, name: str, number: int, answer: Mapping[str, Any], stop_ids: frozenset[int]
) -> Measured:
    answers = answer["answers"]
    texts = tuple(_until_end(a["token_ids"], stop_ids) for a in answers)
    tokens = sum(a["tokens"] for a in answers)
    if name == ALL:
        return Measured(arm, kind, name, number, texts, tokens, None, answer["wall_s"])
    return Measured(arm, kind, name, number, texts, tokens, answers[0]["first_s"], answers[0]["decode_s"])


def _until_end(token_ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Engines differ in whether they show the token that ended the text."""
    end = next((i for i, t in enumerate(token_ids) if t in stop_ids), len(token_ids))
    return tuple(token_ids[:end])


def start(
    stack: ExitStack,
    arms: Iterable[tuple[Arm, Path, dict[str, Any]]],
    threads: int,
    logs: Path,
    load: str = "load",
) -> dict[Arm, Child]:
    """A child for every (arm, interpreter, what it is to load); `load`: "load" to generate, "load_scores" to score."""
    logs.mkdir(parents=True, exist_ok=True)
    children = {}
    for arm, python, request in arms:
        log = logs / f"{str(arm).replace(':', '_').replace('/', '-')}.log"
        child = stack.enter_context(Child(python, ENGINES[arm.engine].program, str(arm), threads, log))
        child.ask(load, weights=arm.weights, mode=arm.mode, streams=arm.streams, threads=threads, **request)
        children[arm] = child
    return children


# -- reporting -------------------------------------------------------------------------------------------------


def report(results: Sequence[Measured], arms: Sequence[Arm]) -> str:
    """Markdown: a table for one stream, one for each number of streams, speeds by prompt, where texts part."""
    parts = []
    for streams in dict.fromkeys(a.streams for a in arms):
        own = [a for a in arms if a.streams == streams]
        parts.append(_table(results, own, streams))
        if streams == 1:
            parts.append(_by_prompt(results, own))
            parts += [_first_tokens(results, own)] if any(m.kind == LONG for m in results) else []
    return "\n\n".join([*parts, _partings(results, arms)])


def _table(results: Sequence[Measured], arms: Sequence[Arm], streams: int) -> str:
    bases = [a for a in arms if a.engine == PACELINE] or list(arms[:1])
    head = [f"{streams} stream{'s' * (streams > 1)}", "tokens/s", "first token, ms"]
    head += [f"{base} over it (interval; lowest prompt)" for base in bases]
    rows = [[*head, "texts as its plain"]]
    for arm in arms:
        own = [m for m in results if m.arm == str(arm)]
        first = [m.first_s for m in own if m.first_s is not None]
        speed = arm_speed(results, arm)
        cells = [str(arm), "none" if speed is None else f"{speed:.1f}"]
        cells.append(f"{1e3 * statistics.median(first):.0f}" if first else "")
        cells += ["" if base == arm else _ratio(results, base, arm) for base in bases]
        rows.append([*cells, _same(results, arm)])
    return markdown(rows)


def arm_speed(results: Sequence[Measured], arm: Arm) -> float | None:
    """Tokens a second: of each prompt the median over rounds, of those the geometric mean."""
    medians = _medians([m for m in results if m.arm == str(arm)])
    return geometric_mean(list(medians.values())) if medians else None


def _medians(own: Sequence[Measured]) -> dict[tuple[str, str], float]:
    speeds: dict[tuple[str, str], list[float]] = {}
    for m in own:
        if m.speed is not None:
            speeds.setdefault((m.kind, m.prompt), []).append(m.speed)
    return {key: statistics.median(values) for key, values in speeds.items()}


def _ratio(results: Sequence[Measured], base: Arm, arm: Arm) -> str:
    values = paired(results, base, arm)
    if not values:
        return "none"
    by_round = _means(values, lambda place: place[2])
    by_prompt = _means(values, lambda place: place[:2])
    text = f"{geometric_mean(list(values.values())):.2f}"
    if len(by_round) > 1:
        text += " ({:.2f} to {:.2f}".format(*bootstrap_interval(by_round, seed=0))
        text += f"; {min(by_prompt):.2f})" if len(by_prompt) > 1 else ")"
    return text


def paired(results: Sequence[Measured], base: Arm, arm: Arm) -> dict[tuple[str, str, int], float]:
    """Speed of `base` over that of `arm`, wherever both were measured."""
    speeds = [{m.place: m.speed for m in results if m.arm == str(a) and m.speed is not None} for a in (base, arm)]
    return {place: value / speeds[1][place] for place, value in speeds[0].items() if place in speeds[1]}


def _means(values: Mapping[tuple[str, str, int], float], key: Callable[[tuple[str, str, int]], Any]) -> list[float]:
    groups: dict[Any, list[float]] = {}
    for place, value in values.items():
        groups.setdefault(key(place), []).append(value)
    return [geometric_mean(group) for group in groups.values()]


def _by_prompt(results: Sequence[Measured], arms: Sequence[Arm]) -> str:
    """Tokens a second of every prompt where a kind has few of them, else of the kind."""
    names = list(dict.fromkeys((m.kind, m.prompt) for m in results if m.prompt != ALL))
    columns: dict[str, list[tuple[str, str]]] = {}
    for kind, prompt in names:
        few = sum(k == kind for k, _ in names) <= 8
        columns.setdefault(prompt if few else kind, []).append((kind, prompt))
    rows = [["tokens/s", *columns]]
    for arm in arms:
        medians = _medians([m for m in results if m.arm == str(arm)])
        groups = [[medians[key] for key in keys if key in medians] for keys in columns.values()]
        rows.append([str(arm), *(f"{geometric_mean(g):.0f}" if g else "" for g in groups)])
    return markdown(rows)


def _first_tokens(results: Sequence[Measured], arms: Sequence[Arm]) -> str:
    """Of long prompts: seconds to the first token, and times those of Paceline's first arm in the same rounds."""
    names = list(dict.fromkeys(m.prompt for m in results if m.kind == LONG))
    first = {(m.arm, m.prompt, m.round): m.first_s for m in results if m.kind == LONG and m.first_s is not None}
    base = str(next((a for a in arms if a.engine == PACELINE), arms[0]))
    rows = [["first token, s (over Paceline's)", *names]]
    for arm in arms:
        cells = []
        for name in names:
            own = {number: s for (a, prompt, number), s in first.items() if (a, prompt) == (str(arm), name)}
            over = [s / first[base, name, number] for number, s in own.items() if (base, name, number) in first]
            told = f" ({statistics.median(over):.2f}; {min(over):.2f} to {max(over):.2f})" if over else ""
            cells.append(f"{statistics.median(own.values()):.3f}{told}" if own else "")
        rows.append([str(arm), *cells])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# -- equal or not ----------------------------------------------------------------------------------------------


def _same(results: Sequence[Measured], arm: Arm) -> str:
    parted = _parted(results, arm)
    equal = sum(at is None for at in parted.values())
    return f"{equal} of {len(parted)}" if parted else "not compared"


def _parted(results: Sequence[Measured], arm: Arm) -> dict[tuple[str, int], int | None]:
    """(kind, place of the prompt) -> where a text first parts from the text of the engine's own plain arm in its first
    round: the earliest over the rounds; None: never."""
    plain, own = _texts(results, arm.plain), _texts(results, arm)
    found: dict[tuple[str, int], int | None] = {}
    for key in own:
        if key in plain:
            at = [first_difference(plain[key][0], text) for text in own[key]]
            found[key] = min((i for i in at if i is not None), default=None)
    return found


def _texts(results: Sequence[Measured], arm: Arm) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """The texts of all rounds, by kind and place of the prompt in it."""
    places: dict[str, dict[str, int]] = {}
    for m in results:
        if m.prompt != ALL:
            of_kind = places.setdefault(m.kind, {})
            of_kind.setdefault(m.prompt, len(of_kind))
    texts: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for m in sorted((m for m in results if m.arm == str(arm)), key=lambda m: m.round):
        first = 0 if m.prompt == ALL else places[m.kind][m.prompt]
        for offset, text in enumerate(m.texts):
            texts.setdefault((m.kind, first + offset), []).append(text)
    return texts


def _partings(results: Sequence[Measured], arms: Sequence[Arm]) -> str:
    lines = []
    for arm in arms:
        at = [f"{kind} {place + 1} at token {i}" for (kind, place), i in _parted(results, arm).items() if i is not None]
        if at:
            lines.append(f"- {arm}: {', '.join(at)}")
    return "\n".join(["Texts that part from their engine's plain text:", *(lines or ["- none"])])

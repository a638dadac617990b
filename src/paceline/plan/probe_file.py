"""What a probe measured, as a file: times of passes, prices of drafters, and replayed texts.

A replayed text is one answer of the target, and for each drafter what it would have proposed at every position
of it. Under `greedy` and `coupled` the text does not depend on who drafted how far; so one replay tells the
rounds of every drafter, every draft length and every way to choose among them (`hindsight.py`).

Positions: `Drafts.proposed[i]` belongs to the round that begins with i + 1 output tokens committed, the first
one from the prefill. A text of n tokens has n - 1 positions.

Guarantees: what is written is read back equal. Refused: another schema, missing or unknown fields, counts that
cannot be (more drafts matched than proposed, a text with the wrong number of positions).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, ModelFormatError, UsageError

__all__ = ["SCHEMA", "DrafterTimes", "Drafts", "PassTime", "ProbeFile", "ReplayedText", "read_probe", "short_name"]

SCHEMA = "paceline.probe/1"


@dataclass(frozen=True, slots=True)
class PassTime:
    """Repeats of one pass, in the order they were made.

    batch     sequences in the pass
    width     rows of each: 1 + D in a verify pass; all of the prompt in a prefill
    context   tokens of each sequence in the cache before the pass
    """

    batch: int
    width: int
    context: int
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("width", 1), ("context", 0)):
            if getattr(self, name) < low:
                raise InvalidParameter(name, getattr(self, name), f"a whole number from {low}")
        if not self.seconds or min(self.seconds) <= 0:
            raise InvalidParameter("seconds", self.seconds, "one or more positive times")

    @property
    def rows(self) -> int:
        return self.batch * self.width

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the range between the quartiles over the median: how unsure one repeat is. 1 for a single repeat."""
        if len(self.seconds) < 3:
            return 1.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s


@dataclass(frozen=True, slots=True)
class DrafterTimes:
    """What one drafter costs.

    name      as `--draft` names it
    kind      ngram, suffix, model, ...
    round_s   seconds of a round and sequence spent proposing and observing, passes of a model left out
    steps     passes of its own model over one row of each sequence: one for each draft token; empty without one
    config    of its own model, as Hugging Face writes it; empty without one
    """

    name: str
    kind: str
    round_s: float
    steps: tuple[PassTime, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drafts:
    """One drafter along one text, by position.

    proposed     draft tokens offered, at most `ProbeFile.longest`
    matched      of these, how many the text goes on with
    confidence   the drafter's own estimates for the matched drafts and the first that missed; None without any
    """

    proposed: tuple[int, ...]
    matched: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len(self.proposed) != len(self.matched):
            raise InvalidParameter("matched", len(self.matched), f"{len(self.proposed)} entries, as proposed has")
        if any(not 0 <= m <= p for p, m in zip(self.proposed, self.matched, strict=True)):
            raise InvalidParameter("matched", self.matched, "from 0 to what was proposed at each position")
        if self.confidence is not None and len(self.confidence) != len(self.proposed):
            raise InvalidParameter("confidence", len(self.confidence), f"{len(self.proposed)} entries")


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """One answer of the target.

    task, prompt    the kind of text and the prompt's id in it
    tokens          of the answer, the one that ended it included
    ended           the model ended it; False where it was cut at the most tokens allowed
    loops           it repeats itself (`bench/loops.py`): drafts come easy and flatter every drafter
    """

    task: str
    prompt: str
    temperature: float
    prompt_tokens: int
    tokens: int
    ended: bool
    loops: bool
    drafts: Mapping[str, Drafts]

    def __post_init__(self) -> None:
        for name, drafts in self.drafts.items():
            if len(drafts.proposed) != max(self.tokens - 1, 0):
                raise InvalidParameter(
                    f"drafts of {name}", len(drafts.proposed), f"{self.tokens - 1} positions for {self.tokens} tokens"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFile:
    """See the module's docstring.

    model, drafts   as they were named on the command line
    config          the target's configuration, as Hugging Face writes it: its shape, for the planner
    passes          of the target, all rows wanted, as in a verify pass
    prefill         of the target: width prompt tokens, no context, the last row wanted
    memory_bytes    of the machine or device; 0 where it was not told
    longest         draft tokens offered at each position at most
    seconds         the probe took
    """

    model: str
    dtype: str
    device: str
    processor: str
    threads: int
    weight_bytes: int
    seconds: float
    passes: tuple[PassTime, ...]
    prefill: tuple[PassTime, ...]
    drafters: tuple[DrafterTimes, ...]
    texts: tuple[ReplayedText, ...]
    longest: int = 16
    memory_bytes: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def drafter(self, name: str) -> DrafterTimes:
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        raise InvalidParameter("drafter", name, f"one the probe measured: {', '.join(d.name for d in self.drafters)}")

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.as_json(), separators=(",", ":"), allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"the probe {path} cannot be written: {error.strerror}") from error

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ProbeFile:
        """From its JSON. Raises ModelFormatError for another schema or fields that are not a probe's."""
        if data.get("schema") != SCHEMA:
            raise ModelFormatError(f"schema is {data.get('schema')!r}; this version reads {SCHEMA!r}")
        values = {k: v for k, v in data.items() if k != "schema"}
        return _build(cls, {**values, **_parts(values)})


def short_name(drafter: str) -> str:
    """A drafter as a table shows it: of a draft model the last part of its path."""
    kind, _, path = drafter.partition(":")
    return f"{kind}:{Path(path).stem}" if kind == "model" else drafter


def read_probe(path: Path) -> ProbeFile:
    """A probe from its file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the probe {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from error
    if not isinstance(data, dict):
        raise ModelFormatError(f"{path} is not a probe: a JSON object is needed")
    try:
        return ProbeFile.of(data)
    except (ModelFormatError, InvalidParameter) as error:
        raise ModelFormatError(f"{path} is no probe this version reads: {error}") from error


def _parts(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, read in (("passes", _pass), ("prefill", _pass), ("drafters", _drafter), ("texts", _text)):
        found |= {name: tuple(read(v) for v in _list(name, values[name]))} if name in values else {}
    return found


def _pass(data: Any) -> PassTime:
    return _build(PassTime, data, {"seconds": tuple})


def _drafter(data: Any) -> DrafterTimes:
    return _build(DrafterTimes, data, {"steps": lambda v: tuple(_pass(p) for p in _list("steps", v))})


def _text(data: Any) -> ReplayedText:
    return _build(ReplayedText, data, {"drafts": lambda v: {name: _drafts(d) for name, d in v.items()}})


def _drafts(data: Any) -> Drafts:
    def nested(value: Any) -> tuple[tuple[float, ...], ...] | None:
        return None if value is None else tuple(tuple(row) for row in value)

    return _build(Drafts, data, {"proposed": tuple, "matched": tuple, "confidence": nested})


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ModelFormatError(f"{name} is a {type(value).__name__}; a list is needed")
    return list(value)


def _build(kind: Any, data: Any, readers: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """A dataclass from its JSON object; `readers` turn single fields into what they are."""
    if not isinstance(data, Mapping):
        raise ModelFormatError(f"{kind.__name__} is a {type(data).__name__}; an object is needed")
    readers = readers or {}
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := set(data) - known:
        raise ModelFormatError(f"{kind.__name__} has unknown fields {sorted(unknown)}")
    try:
        return kind(**{k: readers[k](v) if k in readers else v for k, v in data.items()})
    except (TypeError, AttributeError) as error:
        raise ModelFormatError(f"{kind.__name__}: {error}") from error

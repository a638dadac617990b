"""Paired runs as tables: ratios by kind and over the mix, with and without the prompts whose outputs loop.

A prompt counts as looping where any arm's output in any round loops (see `loops.py`): arms are compared on
the same prompts, so it leaves for all of them. Everything here is pure; tables are Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.loops import find_loop
from paceline.bench.paired import (
    Ratio,
    Run,
    Sample,
    decode_speed,
    first_difference,
    first_speed,
    geometric_mean,
    paired_ratio,
)

__all__ = [
    "MIX",
    "ArmSummary",
    "arm_table",
    "content",
    "looping_prompts",
    "markdown",
    "partings",
    "ratio_table",
    "summarise_arm",
]

MIX = "mix"  # the row over all kinds
PromptKey = tuple[str, str]  # (kind, prompt)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over some runs; None where its runs do not say.

    tokens_per_s, first_s   geometric means over prompts of geometric means over rounds
    acceptance_length       AL over the drafting rounds
    tokens_per_round        over all rounds
    outside_share           seconds of decode rounds outside the models' passes, of all their seconds
    same, compared          runs whose text is that of the base arm in the same round, of those compared
    """

    prompts: int
    tokens_per_s: float | None
    first_s: float | None
    acceptance_length: float | None
    tokens_per_round: float | None
    outside_share: float | None
    same: int
    compared: int


def content(sample: Sample) -> tuple[int, ...]:
    """The output without the token that ended it; of a server's answer, its words, each as a number."""
    if sample.text is not None:
        known: dict[str, int] = {}
        return tuple(known.setdefault(word, len(known)) for word in sample.text.split())
    return sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids


def looping_prompts(runs: Iterable[Run]) -> set[PromptKey]:
    """Prompts of which some output loops."""
    return {(r.key.kind, r.key.prompt) for r in runs if find_loop(content(r.sample)) is not None}


def partings(runs: Iterable[Run], base: str) -> list[tuple[Run, int]]:
    """Runs whose tokens part from those of the arm `base` in the same round, and where."""
    runs = list(runs)
    texts = {r.key.pair: r.sample for r in runs if r.key.arm == base}
    found = []
    for run in runs:
        other = texts.get(run.key.pair)
        if other is None or run.key.arm == base:
            continue
        index = first_difference(run.sample.words, other.words)
        if index is not None:
            found.append((run, index))
    return found


def summarise_arm(runs: Sequence[Run], arm: str, base: str, *, drafts_by_model: bool = False) -> ArmSummary:
    """`arm` over `runs`, its texts held against those of `base`.

    `drafts_by_model`: its drafting seconds are passes of a model, not work outside of passes.
    """
    own = [r for r in runs if r.key.arm == arm]
    samples = [r.sample for r in own]
    bases = {r.key.pair for r in runs if r.key.arm == base}
    compared = 0 if arm == base else sum(r.key.pair in bases for r in own)
    parted = sum(r.key.arm == arm for r, _ in partings(runs, base))
    draft_rounds, rounds = sum(s.draft_rounds for s in samples), sum(s.rounds for s in samples)
    in_drafts, emitted = sum(s.emitted_in_draft_rounds for s in samples), sum(s.emitted for s in samples)
    first = _mean_by_prompt(own, first_speed)
    return ArmSummary(
        prompts=len({(r.key.kind, r.key.prompt) for r in own}),
        tokens_per_s=_mean_by_prompt(own, decode_speed),
        first_s=None if first is None else 1.0 / first,
        acceptance_length=in_drafts / draft_rounds if draft_rounds else None,
        tokens_per_round=emitted / rounds if rounds else None,
        outside_share=_outside(samples, drafts_by_model),
        same=compared - parted,
        compared=compared,
    )


def _mean_by_prompt(runs: Sequence[Run], speed: Callable[[Sample], float | None]) -> float | None:
    by_prompt: dict[PromptKey, list[float]] = {}
    for run in runs:
        if (value := speed(run.sample)) is not None:
            by_prompt.setdefault((run.key.kind, run.key.prompt), []).append(value)
    return geometric_mean([geometric_mean(v) for v in by_prompt.values()]) if by_prompt else None


def _outside(samples: Sequence[Sample], drafts_by_model: bool) -> float | None:
    passes = whole = 0.0
    for sample in samples:
        if sample.target_s is None or sample.draft_s is None or sample.other_s is None:
            continue
        passes += sample.target_s + (sample.draft_s if drafts_by_model else 0.0)
        whole += sample.target_s + sample.draft_s + sample.other_s
    return 1.0 - passes / whole if whole > 0 else None


# -- tables ------------------------------------------------------------------------------------------------


def ratio_table(
    runs: Sequence[Run],
    pairs: Mapping[str, str],
    speed: Callable[[Sample], float | None] = decode_speed,
    *,
    seed: int = 0,
) -> str:
    """Rows: kinds and the mix. Columns: prompts, the share of them that loops, arm / base of each pair."""
    looping = looping_prompts(runs)
    head = ["kind", "prompts", "outputs that loop", *(f"{arm} / {base}" for arm, base in pairs.items())]
    rows = []
    for kind, own in _by_kind(runs):
        prompts = {(r.key.kind, r.key.prompt) for r in own}
        row = [kind, str(len(prompts)), _percent(len(prompts & looping) / len(prompts))]
        row += [_ratio(paired_ratio(own, arm, base, speed, seed=seed)) for arm, base in pairs.items()]
        rows.append(row)
    return markdown(head, rows)


def arm_table(
    runs: Sequence[Run], arms: Sequence[str], base: str, drafts_by_model: Collection[str] = ()
) -> str:
    """Rows: kinds and the mix, arm by arm. Columns: the fields of `ArmSummary`."""
    head = ["kind", "arm", "tokens/s", "first token, ms", "AL", "tokens a round", "outside passes"]
    rows = []
    for kind, own in _by_kind(runs):
        for arm in arms:
            s = summarise_arm(own, arm, base, drafts_by_model=arm in drafts_by_model)
            if s.prompts == 0:
                continue
            rows.append(
                [
                    kind,
                    arm,
                    _number(s.tokens_per_s, 1),
                    _number(None if s.first_s is None else 1e3 * s.first_s, 0),
                    _number(s.acceptance_length, 2),
                    _number(s.tokens_per_round, 2),
                    "" if s.outside_share is None else _percent(s.outside_share, 1),
                    f"{s.same} of {s.compared}" if s.compared else "",
                ]
            )
    return markdown([*head, f"runs with the text of {base}"], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _by_kind(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Kinds in the order they came, and the mix where there are several."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(run.key.kind, []).append(run)
    return [*kinds.items(), *([(MIX, list(runs))] if len(kinds) > 1 else [])]


def _ratio(ratio: Ratio) -> str:
    if ratio.mean is None:
        return ""
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.mean:.2f}{interval}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"

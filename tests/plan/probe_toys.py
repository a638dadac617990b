"""Probes made up for tests: texts with drafts, and passes of a machine given as a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from paceline.plan.probe_file import DrafterTimes, Drafts, PassTime, ProbeFile, ReplayedText

__all__ = ["machine", "made_up_probe", "texts"]


@st.composite
def drafts(draw: st.DrawFn, positions: int, longest: int) -> Drafts:
    proposed = draw(st.lists(st.integers(0, longest), min_size=positions, max_size=positions))
    matched = [draw(st.integers(0, min(p, positions - i))) for i, p in enumerate(proposed)]
    return Drafts(tuple(proposed), tuple(matched))


@st.composite
def texts(draw: st.DrawFn, drafters: Sequence[str] = ("a", "b"), longest: int = 4, most: int = 12) -> ReplayedText:
    tokens = draw(st.integers(1, most))
    along = {name: draw(drafts(tokens - 1, longest)) for name in drafters}
    return ReplayedText("chat", "1", 0.0, 5, tokens, True, False, along)


def machine(
    seconds: Callable[[int, int, int], float],  # batch, width, context
    batches: Sequence[int] = (1, 4),
    widths: Sequence[int] = (1, 2, 4, 8, 16),
    contexts: Sequence[int] = (256,),
    repeats: int = 3,
) -> tuple[PassTime, ...]:
    points = []
    for context in contexts:
        for batch in batches if context == contexts[0] else batches[:1]:
            for width in widths if context == contexts[0] else (widths[0], widths[-1]):
                points.append(PassTime(batch, width, context, (seconds(batch, width, context),) * repeats))
    return tuple(points)


def made_up_probe(made: Sequence[ReplayedText], step_s: float = 0.1) -> ProbeFile:
    """Drafter `a` is free, `b` costs `step_s` a token; a pass takes 1 s and 0.05 s for each row beyond the first."""
    return ProbeFile(
        model="m",
        dtype="float32",
        device="cpu",
        processor="p",
        threads=1,
        weight_bytes=1000,
        seconds=1.0,
        passes=machine(lambda b, w, c: 1.0 + 0.05 * (b * w - 1)),
        prefill=(PassTime(1, 128, 0, (2.0,)),),
        drafters=(
            DrafterTimes("a", "ngram", 0.001),
            DrafterTimes("b", "model", 0.0, tuple(PassTime(b, 1, 256, (step_s,) * 3) for b in (1, 4))),
        ),
        texts=tuple(made),
        longest=4,
    )

"""A picture of `speed`'s results: a bar an arm, tokens a second, as one SVG file for light and dark ground."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.peers.arms import PACELINE, Arm
from bench.peers.speed import Measured, arm_speed

__all__ = ["picture"]

_WIDTH, _LABELS, _BAR, _GAP, _TOP = 720, 250, 18, 8, 34
_OURS, _THEIRS, _TEXT = "#1f9e89", "#8a94a6", "#7a8291"


def picture(results: Sequence[Measured], arms: Sequence[Arm], title: str) -> str:
    """Arms with results, for each number of streams the fastest first; bars of one scale within a number of streams."""
    parts, y = [_text(0, 16, title, weight="bold")], _TOP
    for streams in dict.fromkeys(arm.streams for arm in arms):
        speeds = {arm: arm_speed(results, arm) for arm in arms if arm.streams == streams}
        own = sorted(((s, arm) for arm, s in speeds.items() if s is not None), key=lambda pair: -pair[0])
        if not own:
            continue
        parts.append(_text(0, y + 12, f"{streams} stream{'s' * (streams > 1)}, tokens/s"))
        y += 22
        for speed, arm in own:
            parts.append(_bar(y, arm, speed, own[0][0]))
            y += _BAR + _GAP
        y += _GAP
    box = f'viewBox="0 0 {_WIDTH} {y}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def _bar(y: int, arm: Arm, speed: float, most: float) -> str:
    width = (_WIDTH - _LABELS - 60) * speed / most
    colour = _OURS if arm.engine == PACELINE else _THEIRS
    return "\n".join(
        [
            _text(_LABELS - 8, y + 14, f"{arm.engine} {arm.weights} {arm.mode}", anchor="end"),
            f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" fill="{colour}"/>',
            _text(_LABELS + width + 6, y + 14, f"{speed:.0f}"),
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{_TEXT}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'

"""A probe's summary as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plan.probe_file import short_name
from paceline.report.plan_text import table

__all__ = ["probe_text", "setting_words"]

Row = Mapping[str, Any]
_SHOWN_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def probe_text(summary: Row) -> str:
    """What to run comes first, then what that rests on."""
    parts = [_head(summary), _advice(summary), _tasks(summary), _passes(summary), _drafters(summary),
             _acceptance(summary), _texts(summary), _against(summary)]  # fmt: skip
    return "\n\n".join(p for p in parts if p)


def setting_words(drafter: str | None, length: int) -> str:
    """A setting as a person says it."""
    return "plain" if drafter is None else f"{short_name(drafter)}, D = {length}"


def _head(s: Row) -> str:
    speed = max((p["tokens_per_s"] for p in s["prefill"]), default=None)
    prefill = "" if speed is None else f"; prefill up to {speed:.0f} tokens/s"
    return (
        f"{s['model']}, {s['dtype']}, {s['processor']}, {s['threads']} threads; measured in {s['seconds']:.0f} s\n"
        f"verification is free (under {100 * s['free_tolerance']:.0f} % more than one row) up to "
        f"{s['free_rows']} rows{prefill}"
    )


def _advice(s: Row) -> str:
    rows = []
    for a in s["advice"]:
        if a["group"] not in ("all", "without loops"):
            continue
        rows.append(
            (
                f"{a['temperature']:g}",
                a["group"],
                a["batch"],
                setting_words(a["drafter"], a["draft_length"]),
                _gain(a),
                f"{100 * a['regret']:.1f} %",
                f"{a['oracle']:.2f}",
            )
        )
    head = ("T", "texts", "batch", "run", "gain over plain (95 %)", "regret", "best possible")
    return "what to run\n" + table(head, rows)


def _gain(a: Row) -> str:
    return f"{a['gain']:.2f} ({a['low']:.2f} to {a['high']:.2f})"


def _tasks(s: Row) -> str:
    rows = [
        (a["group"], f"{a['temperature']:g}", setting_words(a["drafter"], a["draft_length"]), _gain(a),
         f"{a['oracle']:.2f}")
        for a in s["advice"]
        if a["group"] not in ("all", "without loops")
    ]  # fmt: skip
    return "by task, one sequence\n" + table(("task", "T", "run", "gain over plain (95 %)", "best possible"), rows)


def _passes(s: Row) -> str:
    base = [p for p in s["passes"] if p["batch"] == 1]
    contexts = sorted({p["context"] for p in base}, key=lambda c: -sum(p["context"] == c for p in base))
    one = next(p["ms"] for p in base if (p["width"], p["context"]) == (1, contexts[0]))
    rows = [
        (p["context"], p["batch"], p["width"], p["rows"], f"{p['ms']:.1f}", f"{p['low_ms']:.1f} to {p['high_ms']:.1f}",
         f"{p['ms'] / one:.2f}", p["repeats"])
        for p in s["passes"]
    ]  # fmt: skip
    head = ("context", "batch", "rows of each", "rows", "ms", "middle half", "of one row", "repeats")
    return "a pass of the target\n" + table(head, rows)


def _drafters(s: Row) -> str:
    rows = []
    for d in s["drafters"]:
        steps = ", ".join(f"{x['batch']}: {x['ms']:.1f} ms ({x['of_a_pass']:.2f})" for x in d["steps"])
        rows.append((short_name(d["name"]), f"{d['round_us']:.0f}", steps or "no model"))
    return "drafters\n" + table(("drafter", "us a round", "a step by batch (of a target pass)"), rows)


def _acceptance(s: Row) -> str:
    depths = [d for d in _SHOWN_DEPTHS if any(len(a["acceptance"]) >= d for a in s["acceptance"])]
    rows = []
    for a in s["acceptance"]:
        cells = []
        for d in depths:
            found = a["acceptance"][d - 1] if len(a["acceptance"]) >= d else None
            half = 0.0 if found is None else (found[2] - found[1]) / 2
            cells.append("" if found is None else f"{found[0]:.2f}+-{half:.2f}")
        speaks = f"{100 * a['offered'][0]:.0f} %" if a["offered"] else ""
        group = "all" if a["by"] == "all" else f"{a['by']} {a['value']}"
        rows.append((short_name(a["drafter"]), f"{a['temperature']:g}", group, a["texts"], speaks, *cells))
    head = ("acceptance", "T", "of", "texts", "drafts in", *(str(d) for d in depths))
    return table(head, rows) if rows else ""


def _texts(s: Row) -> str:
    rows = [
        (t["task"], f"{t['temperature']:g}", t["texts"], t["tokens"], t["ended"], t["loops"]) for t in s["texts"]
    ]
    return table(("texts", "T", "answers", "tokens", "ended themselves", "loop"), rows)


def _against(s: Row) -> str:
    if not s.get("against"):
        return ""
    rows = [
        (
            f"{r['temperature']:g}",
            r["batch"],
            setting_words(*r["first"]),
            setting_words(*r["second"]),
            "" if r["second_loses_under_first"] is None else f"{100 * r['second_loses_under_first']:.1f} %",
            f"{100 * r['first_regret']:.1f} %",
        )
        for r in s["against"]
    ]
    head = ("T", "batch", "earlier probe", "this probe", "loses under the earlier", "its regret")
    return "against the earlier probe\n" + table(head, rows)

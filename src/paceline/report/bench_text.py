"""A benchmark's summary as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plan.probe_file import short_name
from paceline.report.plan_text import table

__all__ = ["TIE", "bench_text", "broken", "unexcused"]

Row = Mapping[str, Any]
TIE = 0.05  # in log-probabilities: two tokens nearer than this are all but tied in 16 bit
_SHOWN = 20
_SURE_ROWS, _LONGEST = 32, 15  # docs/exactness.md; drafts of the controller at most


def bench_text(s: Row) -> str:
    """Speeds first, then what they rest on, then what does not hold."""
    parts = [_head(s), *(_speeds(s, load) for load in _loads(s)), _best_fixed(s), _saved(s), _oracle(s), _predicted(s),
             _partings(s), _notes(s)]  # fmt: skip
    return "\n\n".join(p for p in parts if p)


def unexcused(s: Row) -> list[Row]:
    """Partings from the base's texts that are no near tie, nor another library's; an unknown gap is no tie."""
    own = [p for p in s["partings"] if p["arm"] != "transformers"]
    return [p for p in own if p["gap"] is None or p["gap"] > TIE]


def broken(s: Row) -> list[Row]:
    """Of those, the ones that contradict what is promised: texts are the same in passes of up to `_SURE_ROWS` rows."""
    longest = {a["name"]: _LONGEST if a["draft_length"] is None else a["draft_length"] for a in s["arms"]}
    return [p for p in unexcused(s) if p["concurrency"] * (1 + longest[p["arm"]]) <= _SURE_ROWS]


def _head(s: Row) -> str:
    setup = s["setup"]
    tail = f", {setup['dtype']}, {setup['threads']} threads" if "dtype" in setup else ""
    return f"{setup['model']}{tail}, {setup['processor']}; up to {setup['max_tokens']} tokens an answer"


def _loads(s: Row) -> list[tuple[float, int, str]]:
    return sorted({(c["temperature"], c["concurrency"], c["pool"]) for c in s["cells"]})


def _speeds(s: Row, load: tuple[float, int, str]) -> str:
    rows = []
    for c in s["cells"]:
        if (c["temperature"], c["concurrency"], c["pool"]) != load:
            continue
        rows.append(
            (
                c["kind"], c["arm"], c["prompts"], _number(c["user_tokens_per_s"], 1), _number(c["tokens_per_s"], 1),
                *((_ratio(c[k]) if c["arm"] != s["base"] else "") for k in ("ratio", "throughput_ratio")),
                _ratio(c["ratio_without_loops"]) if c["loops"] and c["arm"] != s["base"] else "",
                _number(c["acceptance_length"], 2), _number(c["first_ms"], 0),
                f"{c['same']} of {c['compared']}" if c["compared"] else "",
            )
        )  # fmt: skip
    base = s["base"]
    head = ("kind", "arm", "prompts", "tokens/s/user", "tokens/s", f"over {base} (95 %)", "throughput over",
            "without loops", "AL", "first, ms", "same text")  # fmt: skip
    pool = "" if load[2] == "cold" else ", warm"
    return f"T = {load[0]:g}, {load[1]} at once{pool}\n" + table(head, rows)


def _best_fixed(s: Row) -> str:
    rows = [
        (f"{r['temperature']:g}", r["concurrency"], r["pool"], " and ".join(dict.fromkeys(r["picked"])), _ratio(r))
        for r in s["best_fixed"]
    ]
    head = ("T", "at once", "memory", "best fixed, picked on half", "auto over it, on the other half (95 %)")
    return table(head, rows) if rows else ""


def _saved(s: Row) -> str:
    kinds = {c["kind"] for c in s["cells"]}
    rows = [
        (f"{c['temperature']:g}", c["concurrency"], c["pool"], c["arm"], f"{c['saved']['paired_s']:.1f}",
         f"{c['saved']['live_s']:.1f}")
        for c in s["cells"]
        if c["saved"] is not None and (c["kind"] == "mix" or len(kinds) == 1)
    ]  # fmt: skip
    head = ("T", "at once", "memory", "arm", f"seconds saved, paired with {s['base']}", "as reckoned live")
    return table(head, rows) if rows else ""


def _oracle(s: Row) -> str:
    arms = [a["name"] for a in s["arms"] if a["name"] != s["base"]]
    rows = [
        (r["kind"], f"{r['temperature']:g}", f"{r['gain']:.2f}",
         *(f"{100 * r['reached'][a]:.0f} %" if a in r["reached"] else "" for a in arms))
        for r in s["oracle"]
    ]  # fmt: skip
    return table(("best possible, one at once", "T", "gain", *(f"{a} reaches" for a in arms)), rows) if rows else ""


def _predicted(s: Row) -> str:
    if not s["predicted"] or not s["predicted"]["points"]:
        return ""
    rows = [
        (p["batch"], p["drafted"], short_name(p["drafter"] or ""), p["rounds"], f"{p['measured_ms']:.1f}",
         f"{p['predicted_ms']:.1f}", f"{100 * p['error']:+.1f} %" if "error" in p else "")
        for p in s["predicted"]["points"]
    ]  # fmt: skip
    error = s["predicted"]["median_error"]
    told = "" if error is None else f": median error {100 * error:.1f} %"
    title = f"rounds predicted from passes of the same minutes{told}\n"
    return title + table(("batch", "drafts", "of", "rounds", "measured, ms", "predicted, ms", "as ratio to one"), rows)


def _partings(s: Row) -> str:
    found: Sequence[Row] = s["partings"]
    compared = sum(c["compared"] for c in s["cells"] if c["kind"] != "mix")
    if not found:
        return f"all {compared} texts compared are {s['base']}'s" if compared else ""
    told = f"{len(found)} of {compared} texts part from {s['base']}'s"
    lines = [told if _servers(s) else f"{told}, {len(unexcused(s))} of them at no near tie"]
    for p in found[:_SHOWN]:
        gap = "gap unknown" if p["gap"] is None else f"gap {p['gap']:.2g}"
        place = f"character {p['token']}" if _servers(s) else f"token {p['token']}, {gap}"
        lines.append(
            f"  {p['kind']} {p['prompt']}, {p['arm']}, T = {p['temperature']:g}, {p['concurrency']} at once, "
            f"round {p['round'] + 1}: at {place}"
        )
    return "\n".join(lines)


def _servers(s: Row) -> bool:
    """Whether texts were compared as such, and nothing is known of how near two tokens were."""
    return "servers" in s["setup"]


def _notes(s: Row) -> str:
    return "\n".join(f"note: {note}" for note in s["notes"])


def _ratio(r: Row) -> str:
    if r["mean"] is None:
        return ""
    return f"{r['mean']:.2f}" + ("" if r["low"] is None else f" ({r['low']:.2f} to {r['high']:.2f})")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"

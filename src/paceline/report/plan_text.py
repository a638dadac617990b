"""A plan as text for a terminal: pure functions that return strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.plan.document import Plan

__all__ = ["compare_plans", "explain_plan", "figure", "plan_text", "table"]


def figure(e: Mapping[str, Any], origin: bool = False) -> str:
    """value [low, high] unit, with its origin where asked."""
    span = "" if e["low"] == e["high"] else f" [{_short(e['low'])}, {_short(e['high'])}]"
    tail = f"  ({e['origin']}: {e['source']})" if origin else ""
    return f"{_short(e['value'])}{span} {e['unit']}{tail}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns aligned to the right but for the first."""
    cells = [[str(c) for c in head], *[[str(c) for c in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        lines.append(
            "  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        )
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """The plan as `paceline plan` prints it."""
    parts = [
        _title(plan),
        _answer(plan),
        _schedule(plan),
        _break_even(plan),
        _candidates(plan),
        _operators(plan),
        _guidelines(plan),
        _warnings(plan),
    ]
    return "\n\n".join(p for p in parts if p)


def _title(plan: Plan) -> str:
    s = plan["scenario"]
    layout = f"tp {s['tp']}" + (f", ep {s['ep']}" if s["ep"] > 1 else "")
    return (
        f"{s['model']} ({s['parameters'] / 1e9:.1f} B, {s['active_parameters'] / 1e9:.1f} B active) on "
        f"{s['devices']} x {s['hardware']}, {layout}; weights {s['linear']}/{s['experts']}, cache {s['kv']}; "
        f"{s['context_tokens']:.0f} tokens in, {s['output_tokens']:.0f} out"
    )


def _point(p: Mapping[str, Any]) -> str:
    draft = "no speculation" if p["draft_length"] == 0 else f"{p['mechanism']}, D = {p['draft_length']}"
    return (
        f"{draft}, batch {p['batch']} a replica: {figure(p['user'])}, {figure(p['device'])}, first token "
        f"{figure(p['first_token'])}"
    )


def _answer(plan: Plan) -> str:
    r, a = plan["request"], plan["answer"]
    wish = [f"{r['min_tokens_per_user']:g} tokens/s a user"] if r["min_tokens_per_user"] else []
    wish += [f"first token within {r['max_ttft']:g} s"] if r["max_ttft"] else []
    wish += [f"at most {r['concurrency']} requests"] if r["concurrency"] else []
    head = "Most tokens/s per device" + (f" with {' and '.join(wish)}" if wish else "")
    lines = [f"{head}:", f"  {_point(a['best'])}"]
    if a["runner_up"]:
        lines.append(f"  next best: {_point(a['runner_up'])}")
    return "\n".join(lines)


def _schedule(plan: Plan) -> str:
    schedule = plan["schedule"]
    if not schedule["bands"]:
        return ""
    rows = []
    for band in schedule["bands"]:
        upto = "any" if band["context_up_to"] is None else f"to {band['context_up_to']:.0f}"
        for e in band["entries"]:
            rows.append(
                (
                    upto,
                    f"{e['first']}-{e['last']}",
                    e["length"],
                    f"{e['gain']:.2f}",
                    f"{e['regret']:.1%}",
                    f"{e['expected_regret']:.1%}",
                    f"{e['chance_best']:.0%}",
                )
            )
    off = [e["idle_speed"] for band in schedule["bands"] for e in band["entries"] if e["length"] == 0]
    tail = ""
    if off:
        tail = (
            f"\nWhere D = 0 a server without speculation is meant; D = 0 inside a speculative one keeps "
            f"{min(off):.0%} of its speed."
        )
    head = ("context", "batch", "D", "gain", "regret at most", "expected", "chance best")
    title = f"Draft length of {schedule['mechanism']} (change 10 % past an edge)"
    return f"{title}:\n{table(head, rows)}{tail}"


def _break_even(plan: Plan) -> str:
    lines = []
    for name, e in plan["break_even"].items():
        if e is None:
            lines.append(f"{name}: no draft length pays at any batch.")
        else:
            end = "largest" in e["source"]
            lines.append(f"{name}: pays up to {figure(e)}" + (", the most looked at." if end else "."))
    return "Break-even\n" + "\n".join("  " + line for line in lines) if lines else ""


def _candidates(plan: Plan) -> str:
    rows = [
        (c["mechanism"], r["batch"], r["best_length"], f"{r['speedup']:.2f}", f"{r['plain_ms']:.2f}",
         f"{r['round_ms']:.2f}", f"{r['draft_ms']:.2f}", f"{r['idle_ms']:.2f}")
        for c in plan["candidates"] if c["kind"] != "none" for r in c["by_batch"]
    ]  # fmt: skip
    head = (
        "mechanism",
        "batch",
        "best D",
        "gain",
        "plain ms",
        "round ms",
        "drafting ms",
        "D = 0 in its server ms",
    )
    return table(head, rows) if rows else ""


def _operators(plan: Plan) -> str:
    rows = plan["time_by_operator"]
    total = sum(r["ms"] for r in rows)
    parts = ", ".join(f"{r['operator']} {r['ms'] / total:.0%}" for r in rows if r["ms"] > 0.01 * total)
    return f"Where a round's {total:.2f} ms go: {parts}"


def _guidelines(plan: Plan) -> str:
    lines = []
    for g in plan["guidelines"]:
        lines.append(f"{g['number']}. {g['title']}: {g['verdict']}")
        if g["disagreement"]:
            lines.append(f"   But {g['disagreement']}")
    return "Guidelines\n" + "\n".join(lines)


def _warnings(plan: Plan) -> str:
    return "\n".join(f"Note: {w}" for w in plan["warnings"])


def explain_plan(plan: Plan) -> str:
    """Every figure with unit, range and origin, and why the advice is what it is."""
    a = plan["answer"]
    lines = [_title(plan), "", "Why this", f"  {_point(a['best'])}"]
    for key in ("user", "device", "first_token"):
        lines.append(f"    {key.replace('_', ' ')}: {figure(a['best'][key], origin=True)}")
    lines.append(f"  The wish that rules out most points: {a['limit']}.")
    if a["runner_up"]:
        gain = a["best"]["device"]["value"] / a["runner_up"]["device"]["value"]
        lines += [
            "Why not that",
            f"  {_point(a['runner_up'])}",
            f"    {gain - 1:+.1%} tokens/s per device for the first.",
        ]
    for c in plan["candidates"]:
        lines += _acceptance(c)
    for name, e in plan["break_even"].items():
        lines.append(f"Break-even of {name}: " + ("never" if e is None else figure(e, origin=True)))
    lines += ["Memory of one replica"]
    lines += [
        f"  {k.replace('_', ' ')}: {v / 1e9:.2f} GB"
        for k, v in plan["memory"].items()
        if k != "sequences_that_fit"
    ]
    lines.append(f"  sequences that fit: {plan['memory']['sequences_that_fit']}")
    lines += ["Constants of the cost model"]
    lines += [f"  {k}: {v:.4g}" for k, v in plan["scenario"]["constants"].items() if isinstance(v, float)]
    for g in plan["guidelines"]:
        lines.append(f"{g['number']}. {g['title']}: {g['verdict']} {g['disagreement']}".rstrip())
        lines += [f"  {k}: {figure(v, origin=True)}" for k, v in g["values"].items()]
    lines += [f"Model: {plan['scenario']['model_source']}", f"Device: {plan['scenario']['hardware_source']}"]
    return "\n".join(lines)


def _acceptance(c: Mapping[str, Any]) -> list[str]:
    if c["acceptance"] is None:
        return []
    lines = [f"Acceptance of {c['mechanism']}: {c['acceptance']['source']}"]
    return lines + [
        f"  AL({d}) = {figure(e, origin=True)}" for d, e in enumerate(c["acceptance"]["length"], start=1)
    ]


def compare_plans(old: Plan, new: Plan) -> str:
    """Two plans side by side."""
    a, b = old["answer"]["best"], new["answer"]["best"]
    rows: list[tuple[object, ...]] = [
        ("device", old["scenario"]["hardware"], new["scenario"]["hardware"]),
        ("mechanism", a["mechanism"], b["mechanism"]),
        ("draft length", a["draft_length"], b["draft_length"]),
        ("batch a replica", a["batch"], b["batch"]),
        ("tokens/s/user", figure(a["user"]), figure(b["user"])),
        ("tokens/s/device", figure(a["device"]), figure(b["device"])),
        ("first token", figure(a["first_token"]), figure(b["first_token"])),
    ]
    for name in sorted({*old["break_even"], *new["break_even"]}):
        pair = [plan["break_even"].get(name) for plan in (old, new)]
        rows.append((f"break-even {name}", *("never" if e is None else figure(e) for e in pair)))
    for c in ("batch", "D"):
        rows.append((f"schedule ({c})", *(_brief(plan, c) for plan in (old, new))))
    return table(("", "plan", "what if"), rows)


def _brief(plan: Plan, column: str) -> str:
    bands = plan["schedule"]["bands"]
    if not bands:
        return "-"
    return " ".join(
        f"{e['first']}-{e['last']}" if column == "batch" else str(e["length"]) for e in bands[0]["entries"]
    )

"""The controller over a probe's replayed texts, at the probe's prices: what it would gain, without a model.

    python bench/simulate_control.py PROBE.json [...] [--batches 1 4 8] [--max-draft 15]

Printed per kind of text, temperature and batch: tokens a second over plain decoding for the controller, the best
fixed (drafter, length) of that row, picked with hindsight, and their ratio. The controller is offered what the engine's
`auto` asks: of string matchers `suffix` alone, where the probe has it. One controller lives through all texts
of a probe in the order they have there, one kind after the other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Sequence
from itertools import groupby
from pathlib import Path

from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost
from paceline.plan.control.from_probe import draft_steps, pass_steps
from paceline.plan.control.offline import Fixed, OfflineText, Prices, run_offline
from paceline.plan.control.records import DrafterFacts, asked_by_auto
from paceline.plan.probe_file import ProbeFile, ReplayedText, read_probe


def prices_of(probe: ProbeFile) -> tuple[Prices, list[str]]:
    """Prices as probed, and the drafters by index. A pass costs what its rows cost one sequence."""
    steps = {i: found for i, drafter in enumerate(probe.drafters) if (found := draft_steps(drafter)) is not None}
    asked = [d.round_s for d in probe.drafters if not d.steps]
    passes = LiveCost(pass_steps(probe), 4, 256)
    return Prices(passes, steps, sum(asked) / max(len(asked), 1)), [d.name for d in probe.drafters]


def offline(text: ReplayedText, names: Sequence[str], asked: Container[str]) -> OfflineText:
    along = {i: text.drafts[name] for i, name in enumerate(names) if name in text.drafts and name in asked}
    return OfflineText(along, text.prompt_tokens, text.tokens - 1, text.temperature)


def report(path: Path, batches: Sequence[int], max_draft: int) -> None:
    probe = read_probe(path)
    prices, names = prices_of(probe)
    texts = [t for t in probe.texts if t.tokens > 1]
    print(f"{path.name}: {probe.model}, {', '.join(names)}")
    for batch in batches:
        facts = [DrafterFacts(name, prices.steps.get(i)) for i, name in enumerate(names)]
        controller, ratios = Controller(facts, LiveCost(pass_steps(probe), 4, 256)), []
        for (task, temperature), group in groupby(texts, key=lambda t: (t.task, t.temperature)):
            alike = list(group)
            some = [offline(t, names, names) for t in alike]
            plain = run_offline(some, Fixed(None, 0), prices, batch, max_draft).seconds
            asked = [offline(t, names, asked_by_auto(names)) for t in alike]
            own = plain / run_offline(asked, controller, prices, batch, max_draft).seconds
            arms = [(n, d) for d in range(len(names)) for n in (1, 2, 3, 4, 6, 8, 12, 15)]
            speeds = {
                (names[d], n): plain
                / run_offline(some, Fixed(d, n, d not in prices.steps), prices, batch, max_draft).seconds
                for n, d in arms
            }
            best = max(speeds, key=lambda arm: speeds[arm])
            ratios.append(own / max(speeds[best], 1.0))
            print(
                f"  batch {batch:2} {task:14} T={temperature:g}: controller {own:.3f}, best fixed "
                f"{speeds[best]:.3f} ({best[0]} {best[1]}), ratio {ratios[-1]:.3f}"
            )
        print(f"  batch {batch:2} geometric mean of ratios {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", nargs="+", type=Path)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--max-draft", type=int, default=15)
    args = parser.parse_args()
    for path in args.probes:
        report(path, args.batches, args.max_draft)


if __name__ == "__main__":
    main()

"""Round times predicted from timed passes, beside those of the engine, over batch x draft length.

    python bench/round_grid.py [--model smollm2-135m] [--batch 1 2 4 8 16] [--lengths 0 1 2 4 8] [--repeats 4]

The engine decodes greedily with a drafter that says as many tokens as it is told to, so that every sequence has D
drafts in every round; draft lengths take turns from round to round, batches from block to block, and between the blocks
passes are timed as `paceline probe` does, at the points that it times. All times are whole rounds.

Two predictions: `passes`, the probe's table (what `paceline plan` and `probe` go by), and `live`, the controller's
running estimate just before each round. They are compared as ratios to a plain round of one sequence, predicted over
predicted and measured over measured (medians). Then, for acceptance rates of 0.3 to 0.95: what is lost where D is
chosen by the prediction instead of by what was measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline import LLM, SamplingParams
from paceline.bench.probe import make_timers
from paceline.core.proposal import Proposal, Verdict
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.build import DrafterSet
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.pass_cost import live_cost
from paceline.decode.sequence import DraftSettings, Request
from paceline.plan.control.cost import LiveCost
from paceline.plan.pass_table import PassTable

PROMPT, WARM_UP = 256, 2
ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Cell = tuple[int, int]  # batch, draft length


class Told:
    """Says `length` tokens, likely wrong."""

    name, needs = "told", Needs()

    def __init__(self) -> None:
        self.length = 0

    def begin(self, view: SequenceView) -> None: ...

    def end(self, view: SequenceView) -> None: ...

    def observe(self, views: Sequence[SequenceView], verdicts: Sequence[Verdict | None]) -> None: ...

    def check_idle(self) -> None: ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [
            Proposal.chain([5 + i for i in range(min(budget, self.length))], self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]


@dataclass
class Measured:
    """By cell: seconds of rounds, what the live estimate said of each, and contexts."""

    seconds: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    live: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    contexts: list[int] = field(default_factory=list)


def block(llm: LLM, batch: int, lengths: Sequence[int], rounds: int, cost: LiveCost, seed: int, into: Measured) -> None:
    """Rounds of `batch` sequences at every length in turns."""
    drafter = Told()
    options = EngineOptions(max_batch=batch, max_context=PROMPT + 4 + 10 * (rounds + 1) * len(lengths))
    engine = Engine(
        llm.engine.model,
        vocab_size=llm.engine.vocab_size,
        drafters=DrafterSet({"told": drafter}, "told"),
        options=options,
    )
    words = random.Random(seed)
    params = SamplingParams(max_tokens=10 * (rounds + 1) * len(lengths))
    settings = DraftSettings("told", draft_length=max(lengths))
    sequences = []
    for i in range(batch):
        prompt = tuple(words.randrange(100, llm.engine.vocab_size - 100) for _ in range(PROMPT))
        sequences += engine.add(Request(str(i), prompt, params, settings))
    while engine.running < batch or any(not s.output for s in sequences):
        engine.step()
    for turn in range(rounds + 1):
        for length in words.sample(list(lengths), len(lengths)):
            drafter.length = length
            contexts = [len(s.tokens) for s in sequences]
            rows = batch * (1 + length)
            keys = sum(cost.keys(1 + length, context) for context in contexts)
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            if turn:
                into.seconds[batch, length].append(took)
                into.live[batch, length].append(cost.seconds(rows, keys))
                into.contexts += contexts
            cost.observe(rows, keys, took)
    for i in range(batch):
        engine.cancel(str(i))
    while engine.has_work:
        engine.step()


def ratios(times: dict[Cell, float]) -> dict[Cell, float]:
    return {cell: seconds / times[1, 0] for cell, seconds in times.items()}


def losses(
    predicted: dict[Cell, float], measured: dict[Cell, float], lengths: Sequence[int], batch: int
) -> list[float]:
    """By acceptance rate, what is lost by the D that the prediction takes for best, as a share of the best speed."""
    found = []
    for a in ACCEPTANCES:
        emitted = {d: sum(a**j for j in range(d + 1)) for d in lengths}
        chosen = max(lengths, key=lambda d: emitted[d] / predicted[batch, d])
        rates = {d: emitted[d] / measured[batch, d] for d in lengths}
        found.append(1.0 - rates[chosen] / max(rates.values()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=8, help="of each length in a block")
    parser.add_argument("--repeats", type=int, default=4, help="blocks of each batch")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    batches, lengths = sorted({1, *args.batch}), sorted({0, *args.lengths})
    llm = LLM(args.model, draft="none", dtype=args.dtype, threads=args.threads, max_batch=batches[-1])
    timer = make_timers(llm, {}, time.perf_counter, batches[-1])["passes"]
    cost = live_cost(llm.engine.model, batches[-1], lengths[-1])
    found, began = Measured(), time.perf_counter()
    for repeat in range(-1, args.repeats):
        into = found if repeat >= 0 else Measured()  # the first is warm-up
        for batch in batches[:: 1 if repeat % 2 else -1]:
            block(llm, batch, lengths, args.rounds if repeat >= 0 else WARM_UP, cost, 100 * repeat + batch, into)
            timer.sweep(timer.widest(1.0 / len(batches)))
    measured = {cell: statistics.median(seconds) for cell, seconds in found.seconds.items()}
    table, context = PassTable(timer.times()), statistics.fmean(found.contexts)
    passes = {(b, d): table.seconds(b, 1 + d, context) for b, d in measured}
    live = {cell: statistics.median(seconds) for cell, seconds in found.live.items()}
    took = time.perf_counter() - began
    print(f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, context about {context:.0f}, {took:.0f} s\n")
    print("| batch | D | measured, ms | middle half | ratio | by passes | error | live | error |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---:|")
    by = {"passes": ratios(passes), "live": ratios(live)}
    true, errors = ratios(measured), defaultdict(list)
    for b, d in sorted(measured):
        low, _, high = statistics.quantiles(found.seconds[b, d], n=4)
        cells = []
        for name, predicted in by.items():
            error = predicted[b, d] / true[b, d] - 1.0
            if (b, d) != (1, 0):
                errors[name].append(abs(error))
            cells.append(f"{predicted[b, d]:.2f} | {100 * error:+.1f} %")
        middle = f"{1e3 * low:.1f} to {1e3 * high:.1f}"
        print(f"| {b} | {d} | {1e3 * measured[b, d]:.2f} | {middle} | {true[b, d]:.2f} | {' | '.join(cells)} |")
    for name, predicted in by.items():
        lost = {b: losses(predicted, true, lengths, b) for b in batches}
        most = ", ".join(f"{100 * max(shares):.1f} % at {b}" for b, shares in lost.items())
        every = [share for shares in lost.values() for share in shares]
        print(
            f"\n{name}: median error {100 * statistics.median(errors[name]):.1f} %; D so chosen is within 3 % of the "
            f"best in {sum(share <= 0.03 for share in every)} of {len(every)} cases, and loses at most {most}."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Round times predicted from timed passes, beside those of the engine, over batch x draft length.

    python bench/round_grid.py [--model smollm2-135m] [--batch 1 2 4 8 16] [--lengths 0 1 2 4 8] [--repeats 4]

The engine decodes greedily with a drafter that says as many tokens as it is told to, so that every sequence has D
drafts in every round; draft lengths take turns from round to round, batches from block to block, and between the blocks
passes are timed as `paceline probe` does, at the points that it times. All times are whole rounds.

Two predictions: `passes`, the probe's table (what `paceline plan` and `probe` go by), and `live`, the controller's
running estimate just before each round. They are compared as ratios to a plain round of one sequence, predicted over
predicted and measured over measured: after every turn through the draft lengths a plain round of a second engine over
the same model, with one sequence, since the speed of a machine's memory can change by a third within the minute and
then changes the rounds of few rows alone. Medians of the ratios. Then, for acceptance rates of 0.3 to 0.95: what is
lost where D is chosen by the prediction instead of by what was measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from paceline import LLM, SamplingParams
from paceline.bench.probe import make_timers
from paceline.decode.around import Told, time_around
from paceline.decode.draft.build import DrafterSet
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.pass_cost import live_cost
from paceline.decode.sequence import DraftSettings, Request, Sequence
from paceline.plan.control.cost import LiveCost
from paceline.plan.pass_table import PassTable

PROMPT, WARM_UP = 256, 2
ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Cell = tuple[int, int]  # batch, draft length


@dataclass
class Measured:
    """By cell: seconds of rounds, and as ratios to a plain round of one sequence at that time what they took and what
    the live estimate said of each; contexts; seconds of those plain rounds."""

    seconds: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    live: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    contexts: list[int] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


@dataclass
class Sequences:
    """An engine of its own with sequences under way, each with as many drafts as `drafter` is told."""

    engine: Engine
    drafter: Told
    running: list[Sequence]

    @classmethod
    def start(cls, llm: LLM, count: int, tokens: int, longest: int, seed: int) -> Sequences:
        drafter = Told()
        engine = Engine(
            llm.engine.model,
            vocab_size=llm.engine.vocab_size,
            drafters=DrafterSet({"told": drafter}, "told"),
            options=EngineOptions(max_batch=count, max_context=PROMPT + 4 + tokens),
        )
        words, running = random.Random(seed), []
        params, settings = SamplingParams(max_tokens=tokens), DraftSettings("told", draft_length=longest)
        for i in range(count):
            prompt = tuple(words.randrange(100, llm.engine.vocab_size - 100) for _ in range(PROMPT))
            running += engine.add(Request(str(i), prompt, params, settings))
        while engine.running < count or any(not s.output for s in running):
            engine.step()
        return cls(engine, drafter, running)

    @property
    def contexts(self) -> list[int]:
        return [len(s.tokens) for s in self.running]

    def round(self, length: int) -> float:
        """Seconds of a round with `length` drafts for each."""
        self.drafter.length = length
        began = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - began

    def stop(self) -> None:
        for i in range(len(self.running)):
            self.engine.cancel(str(i))
        while self.engine.has_work:
            self.engine.step()


def block(llm: LLM, batch: int, lengths: list[int], rounds: int, cost: LiveCost, seed: int, into: Measured) -> None:
    """Rounds of `batch` sequences at every length in turns, and a plain one of one sequence after each turn."""
    tokens = 10 * (rounds + 1) * len(lengths)
    many = Sequences.start(llm, batch, tokens, max(lengths), seed)
    one = Sequences.start(llm, 1, tokens, max(lengths), seed + 50)
    order = random.Random(seed)
    for turn in range(rounds + 1):
        took: dict[int, float] = {}
        for length in order.sample(lengths, len(lengths)):
            contexts, rows = many.contexts, batch * (1 + length)
            keys = cost.all_keys([1 + length] * batch, contexts)
            plain_s = cost.seconds(1, cost.keys(1, one.contexts[0]), 1)
            took[length] = many.round(length)
            if turn:
                into.live[batch, length].append(cost.seconds(rows, keys, batch) / plain_s)
                into.contexts += contexts
            cost.observe(rows, keys, batch, took[length])
        keys, plain = cost.keys(1, one.contexts[0]), one.round(0)
        cost.observe(1, keys, 1, plain)
        if turn:
            into.plain.append(plain)
            for length, seconds in took.items():
                into.seconds[batch, length].append(seconds)
                into.ratios[batch, length].append(seconds / plain)
    many.stop()
    one.stop()


def losses(
    predicted: dict[Cell, float], measured: dict[Cell, float], lengths: list[int], batch: int
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
    cost = live_cost(llm.engine.model, batches[-1], lengths[-1], around=time_around(llm.engine.model, 8))
    found, began = Measured(), time.perf_counter()
    for repeat in range(-1, args.repeats):
        into = found if repeat >= 0 else Measured()  # the first is warm-up
        for batch in batches[:: 1 if repeat % 2 else -1]:
            block(llm, batch, lengths, args.rounds if repeat >= 0 else WARM_UP, cost, 100 * repeat + batch, into)
            timer.sweep(timer.widest(1.0 / len(batches)))
    table, context = PassTable(timer.times()), statistics.fmean(found.contexts)
    plain_s = table.seconds(1, 1, context)
    by = {
        "passes": {(b, d): table.seconds(b, 1 + d, context) / plain_s for b, d in found.ratios},
        "live": {cell: statistics.median(ratios) for cell, ratios in found.live.items()},
    }
    true = {cell: statistics.median(ratios) for cell, ratios in found.ratios.items()}
    took = time.perf_counter() - began
    low, plain, high = statistics.quantiles(found.plain, n=4)
    print(f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, context about {context:.0f}, {took:.0f} s.")
    print(f"Plain rounds of one sequence: {1e3 * plain:.2f} ms, middle half {1e3 * low:.2f} to {1e3 * high:.2f}.\n")
    print("| batch | D | measured, ms | ratio | middle half | by passes | error | live | error |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---:|")
    errors = defaultdict(list)
    for b, d in sorted(true):
        low, _, high = statistics.quantiles(found.ratios[b, d], n=4)
        cells = []
        for name, predicted in by.items():
            error = predicted[b, d] / true[b, d] - 1.0
            if (b, d) != (1, 0):
                errors[name].append(abs(error))
            cells.append(f"{predicted[b, d]:.2f} | {100 * error:+.1f} %")
        ms, middle = 1e3 * statistics.median(found.seconds[b, d]), f"{low:.2f} to {high:.2f}"
        print(f"| {b} | {d} | {ms:.2f} | {true[b, d]:.2f} | {middle} | {' | '.join(cells)} |")
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

"""What the controller takes of a round: choosing, learning and settling, without drafters and without a model.

    python bench/controller_overhead.py [--round-ms 13] [--batches 1 4 8 16] [--rounds 2000]

Processor time, so that other work on the machine does not count. Each sequence of the batch has two free drafters
that speak in a third of the rounds with 8 drafts, and, in the second table, a draft model. Printed per batch:
microseconds a round, and its share of a round that takes `--round-ms` and a twentieth of it more for each further
sequence.
"""

from __future__ import annotations

import argparse
import random
import time

from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.records import Ask, DrafterFacts, Offer, RoundFacts

_PASSES = StepTimes((1, 8, 16, 32, 64), (0.013, 0.0135, 0.015, 0.019, 0.028), 1e-8)


def microseconds(batch: int, rounds: int, costly: bool) -> float:
    """Of one round, the mean."""
    facts = [DrafterFacts("ngram"), DrafterFacts("suffix")]
    facts += [DrafterFacts("model", StepTimes((1, 8, 64), (0.004, 0.0042, 0.01)))] if costly else []
    controller, generator = Controller(facts, LiveCost(_PASSES, 4, 256, 512)), random.Random(1)
    for key in range(batch):
        controller.begin(key)
    offers = [Offer([0.5 + 0.05 * i for i in range(8)]) for _ in range(2)]
    took = 0.0
    for index in range(rounds):
        asks = [
            Ask(
                key,
                200 + index % 700,
                15,
                200,
                {i: offers[i] for i in range(2) if generator.random() < 0.33},
                {2: 2} if costly else {},
            )
            for key in range(batch)
        ]
        draws = [generator.random() < 0.6 for _ in range(batch)]
        began = time.process_time()
        choices = controller.choose(asks)
        for ask, choice, hit in zip(asks, choices, draws, strict=True):
            for drafter, offer in ask.offers.items():
                controller.learn(ask.key, drafter, 0, offer.confidence[0], hit)
            controller.committed(ask.key, choice, 1 + hit)
        lengths = [1 + len(choice.nodes) for choice in choices]
        contexts = [ask.context for ask in asks]
        controller.settle(RoundFacts(sum(lengths), lengths, contexts, [1 + hit for hit in draws], 0.001, 0.015))
        took += time.process_time() - began
    return 1e6 * took / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-ms", type=float, default=13.0, help="a plain round of one sequence")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    for costly in (False, True):
        print("with a draft model" if costly else "string matchers alone")
        for batch in args.batches:
            took = microseconds(batch, args.rounds, costly)
            whole = 1000.0 * args.round_ms * (1.0 + 0.05 * (batch - 1))
            print(f"  batch {batch:3}: {took:7.1f} us a round, {took / whole:.2%} of {whole / 1000:.1f} ms")


if __name__ == "__main__":
    main()

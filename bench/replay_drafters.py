"""What the model-free drafters would have gained on recorded texts: no model, no device.

Each text (prompt, output) is replayed token by token as if a greedy target had written it: a draft is
accepted while it equals the text. Tokens are words, runs of punctuation and runs of space, a stand-in for a
tokenizer; acceptance with real tokens differs somewhat. One drafter sees the texts of a file one after the
other, so that its pool fills with the earlier outputs of the same file.

    python bench/replay_drafters.py TEXTS.jsonl [...] [--budgets 4 8 16] [--limit 200] [--json OUT]

Lines of a file hold `prompt` and `reference`, `question` and `answer`, or `turns` and `reference`.
Printed per drafter and budget: tokens per round over all rounds, tokens per cost (1 is plain decoding), the
share of rounds with a draft, drafted and accepted tokens per drafting round, acceptance, and microseconds of
propose and observe per round (this machine's).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.proposal import Verdict
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.auto import mild_cost
from paceline.decode.draft.base import Drafter, SequenceView
from paceline.decode.draft.registry import MODEL_FREE, make_auto, make_model_free

_TOKEN = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


@dataclass
class Tally:
    """Sums over the rounds of a replay."""

    rounds: int = 0
    emitted: int = 0
    drafting: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    calibration: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def row(self) -> dict[str, float]:
        drafting = max(self.drafting, 1)
        return {
            "tokens_per_round": self.emitted / self.rounds,
            "speedup": self.emitted / self.cost,
            "drafting_share": self.drafting / self.rounds,
            "drafted": self.drafted / drafting,
            "accepted": self.accepted / drafting,
            "acceptance": self.accepted / max(self.drafted, 1),
            "us_per_round": 1e6 * self.seconds / self.rounds,
        }


def texts(path: Path, limit: int) -> Iterator[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines[:: max(1, len(lines) // limit)][:limit]:
        row = json.loads(line)
        prompt = row.get("prompt") or row.get("question") or "\n".join(row["turns"])
        output = row.get("answer") or row.get("reference")
        if output:
            yield prompt, output if isinstance(output, str) else "\n".join(output)


def replay_file(path: Path, name: str, budget: int, limit: int, row_cost: float, context: int = 0) -> Tally:
    """Replays up to `limit` texts of a file through one drafter; each further row costs `row_cost` passes."""

    def cost(rows: int) -> float:
        return 1.0 + row_cost * (rows - 1)

    ids: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [ids.setdefault(token, len(ids)) for token in _TOKEN.findall(text)]

    documents = [(encode(prompt), encode(output)) for prompt, output in texts(path, limit)]
    drafter = make_auto(cost=mild_cost(row_cost)) if name == "auto" else make_model_free(name)
    return replay(drafter, _with_context(documents, context), budget, cost)


def replay(
    drafter: Drafter, documents: list[tuple[list[int], list[int]]], budget: int, cost: Callable[[int], float]
) -> Tally:
    """Replays (prompt, output) pairs one after the other through one drafter."""
    tally = Tally()
    for key, (prompt, output) in enumerate(documents):
        view = SequenceView(key, list(prompt), len(prompt), SamplingParams())
        drafter.begin(view)
        done = 0
        while done < len(output):
            done += _round(drafter, view, output, done, min(budget, len(output) - done - 1), cost, tally)
        drafter.end(view)
    return tally


def _round(
    drafter: Drafter,
    view: SequenceView,
    output: list[int],
    done: int,
    budget: int,
    cost: Callable[[int], float],
    tally: Tally,
) -> int:
    began = time.perf_counter()
    (proposal,) = drafter.propose([view], [budget])
    took = time.perf_counter() - began
    accepted = 0
    while accepted < len(proposal) and proposal.tokens[accepted] == output[done + accepted]:
        accepted += 1
    for i, chance in enumerate((proposal.confidence or ())[: accepted + 1]):
        cell = tally.calibration[min(int(chance * 10), 9)]
        cell[0], cell[1], cell[2] = cell[0] + 1, cell[1] + chance, cell[2] + (i < accepted)
    view.tokens.extend(output[done : done + accepted + 1])
    kind = "bonus" if accepted == len(proposal) else "recovered"
    verdict = Verdict(tuple(range(accepted)), output[done + accepted], kind) if len(proposal) else None
    began = time.perf_counter()
    drafter.observe([view], [verdict])
    tally.seconds += took + time.perf_counter() - began
    tally.rounds, tally.emitted = tally.rounds + 1, tally.emitted + accepted + 1
    tally.drafting, tally.drafted = tally.drafting + (len(proposal) > 0), tally.drafted + len(proposal)
    tally.accepted, tally.cost = tally.accepted + accepted, tally.cost + cost(len(proposal) + 1)
    return accepted + 1


def _with_context(
    documents: list[tuple[list[int], list[int]]], length: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts with the other texts of the file before them, up to `length` tokens."""
    lengthened = []
    for i, (prompt, output) in enumerate(documents):
        others: list[int] = []
        for other in documents[i + 1 :] + documents[:i]:
            if len(others) + len(prompt) >= length:
                break
            others += other[0] + other[1]
        lengthened.append((others[: max(0, length - len(prompt))] + prompt, output))
    return lengthened


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--limit", type=int, default=200, help="texts of a file")
    parser.add_argument("--drafters", nargs="+", default=[*MODEL_FREE, "auto"], help="of these")
    parser.add_argument("--row-cost", type=float, default=0.05, help="each more row, in plain passes")
    parser.add_argument("--context", type=int, default=0, help="lengthen prompts to this many tokens")
    parser.add_argument("--calibration", action="store_true", help="confidence against outcome")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for path in args.texts:
        for name in args.drafters:
            for budget in args.budgets:
                tally = replay_file(path, name, budget, args.limit, args.row_cost, args.context)
                row = tally.row()
                print(
                    f"{path.stem} {name:8} D={budget:<3}" + "  ".join(f"{k} {v:.2f}" for k, v in row.items())
                )
                results.append({"texts": path.name, "drafter": name, "budget": budget, **row})
            if args.calibration:
                for _, (count, said, was) in sorted(tally.calibration.items()):
                    print(f"    said {said / count:.2f}  was {was / count:.2f}  n {count:.0f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a round takes outside the target's pass: everything that Python does around it, part by part, in microseconds.

    python bench/round_overhead.py [--batch 1 8 16] [--draft none auto auto+model] [--temperature 0 0.8] [--trace]
    python bench/round_overhead.py --model MODEL [--batch 1 8 16]

The target is SmolLM2's shape and vocabulary, and its pass returns at once: the text runs round a loop of tokens and
jumps to another place of it where a hash of the position says so, so that string matchers are right about seven times
in eight. `auto` has the matcher that it asks, `suffix`, `auto+model` also a draft model that takes no time and is as
often right. Text is detokenised by a byte-level tokenizer of that vocabulary.

All is processor time of one thread, so that other work on the machine counts little. Printed for each: a round
without the pass (median and mean, without the parts' own clocks), tokens and drafts by sequence and round; then, of a
second run, the mean of every part without the parts inside it (a clock's microsecond a call is left in).
`build_inputs` is left out of "own": a model may have a way of its own from spans to inputs.

With --model the passes are that model's, greedy, with `auto`, over pieces of this program; a pass leaves less in the
caches than one that returns at once. Printed are the wall-clock time of a round and what the controller takes of it.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import paceline.decode.engine as engine_module
from paceline.core.proposal import Proposal, Verdict
from paceline.core.records import TraceWriter
from paceline.core.sampling import SamplingParams
from paceline.decode.cache import KVCache
from paceline.decode.draft.auto import AutoDrafter, Candidate, mild_cost
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.build import DrafterSet
from paceline.decode.draft.registry import MODEL_FREE, make_model_free
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.llm import LLM
from paceline.decode.model.base import ForwardResult
from paceline.decode.model.step import Geometry, RowPolicy, StepInputs
from paceline.decode.model.tokenizer import TextTokenizer, byte_alphabet
from paceline.decode.sequence import DraftSettings, Request
from paceline.decode.stopping import StopChecker
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import StepTimes
from paceline.plan.control.records import AUTO_MATCHER

VOCABULARY, LOOP, FIRST, JUMP_ONE_IN = 49_152, 64, 1000, 8
LOGIT_OF_NEXT = 11.0  # at temperature 0.8 drawn about nine times in ten among the noise of the others
PROMPT, TOKENS = 200, 300
_DRAFT_STEP = StepTimes((1, 8, 64), (0.1, 0.11, 0.3))  # in plain passes of one row


def next_token(token: int, position: int) -> int:
    """The token of the text after `token` at `position`."""
    mixed = position * 2654435761 % (1 << 32) >> 8
    place = mixed >> 4 if mixed % JUMP_ONE_IN == 0 else token - FIRST + 1
    return FIRST + place % LOOP


class InstantTarget:
    """Logits from a table of `LOOP` rows, by the next token of the text."""

    max_positions, vocab_width, weight_bytes = 8192, VOCABULARY, 0
    dtype = torch.bfloat16

    def __init__(self) -> None:
        self.geometry = Geometry(3, 3, torch.bfloat16, torch.device("cpu"))
        self.row_policy = RowPolicy(4, 32, 512, chunk_rows=(64, 128, 256, 512))
        self._logits = torch.randn(LOOP, VOCABULARY, generator=torch.Generator().manual_seed(1))
        self._logits[range(LOOP), range(FIRST, FIRST + LOOP)] = LOGIT_OF_NEXT

    def new_cache(self, slots: int, limit: int) -> KVCache:
        return KVCache(30, 3, 64, slots, limit, torch.bfloat16, torch.device("cpu"))

    def forward(
        self, step: StepInputs, cache: KVCache, taps: Sequence[int] = (), layers: int | None = None
    ) -> ForwardResult:
        ids, positions = step.token_ids.tolist(), step.positions.tolist()
        rows = range(len(ids)) if step.wanted is None else step.wanted.tolist()
        return ForwardResult(self._logits[[next_token(ids[r], positions[r]) - FIRST for r in rows]], {})


class InstantDraft:
    """Drafts along the loop: right until the text jumps."""

    name, needs = "model", Needs()

    def begin(self, view: SequenceView) -> None: ...

    def end(self, view: SequenceView) -> None: ...

    def observe(self, views: Sequence[SequenceView], verdicts: Sequence[Verdict | None]) -> None: ...

    def check_idle(self) -> None: ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: SequenceView, budget: int) -> Proposal:
        drafts, stated, token = [], [], view.tokens[-1]
        while len(drafts) < budget:
            token = FIRST + (token - FIRST + 1) % LOOP
            drafts.append(token)
            stated.append(0.9)
            if view.more is not None and not view.more(stated):
                break
        return Proposal.chain(drafts, self.name, confidence=tuple(stated))


def tokenizer() -> TextTokenizer:
    """Byte-level BPE with the vocabulary's size; its tokens are one to three letters."""
    letters = list(byte_alphabet())
    tokens = dict.fromkeys(
        [*letters, *(a + b for a in letters for b in letters)][:VOCABULARY] + [f"Ġw{i}" for i in range(VOCABULARY)]
    )
    backend = Tokenizer(BPE({token: i for i, token in enumerate(list(tokens)[:VOCABULARY])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend)


def drafters(draft: str) -> DrafterSet:
    if draft == "none":
        return DrafterSet({}, "none")
    own = {kind: make_model_free(kind) for kind in MODEL_FREE}
    candidates = [Candidate(own[AUTO_MATCHER])]
    if draft == "auto+model":
        candidates.append(Candidate(InstantDraft(), _DRAFT_STEP))
    auto = AutoDrafter(candidates, mild_cost(0.02, 4))
    return DrafterSet({**own, "auto": auto}, "auto", auto)


class Parts:
    """Seconds by part while `running`, each without the parts inside it. `wrap` puts a clock around a function."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.running = False
        self._inside = [0.0]
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)
        own = name in vars(owner)
        setattr(owner, name, self.timed(function, part))
        self._undo.append(functools.partial(setattr, owner, name, function) if own else lambda: delattr(owner, name))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return function(*args, **kwargs)
            self._inside.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self._inside.pop()
                self.calls[part] += 1
                self._inside[-1] += took

        return call

    def unwrap(self) -> None:
        for undo in self._undo:
            undo()


PARTS: tuple[tuple[Any, str, str], ...] = (
    (Engine, "_schedule", "schedule"),
    (Engine, "_propose", "propose: engine"),
    (Engine, "_span", "spans"),
    (engine_module, "build_inputs", "build_inputs"),
    (engine_module, "judge", "judge"),
    (Engine, "_outcomes", "outcomes"),
    (Engine, "_commit", "commit, emit"),
    (StopChecker, "push", "text and stops"),
    (Engine, "_observe", "observe: engine"),
    (Engine, "_retire", "retire"),
    (engine_module, "settle", "settle: facts"),
    (engine_module, "add_seconds", "add_seconds"),
    (engine_module, "write_records", "records"),
    (TraceWriter, "write", "trace lines"),
    (AutoDrafter, "propose", "auto: propose"),
    (AutoDrafter, "observe", "auto: observe"),
    (AutoDrafter, "_hold", "auto: hold against"),
    (Controller, "choose", "controller: choose"),
    (Controller, "refine", "controller: refine"),
    (Controller, "worth_going_on", "controller: go on?"),
    (Controller, "learn", "controller: learn"),
    (Controller, "committed", "controller: committed"),
    (Controller, "settle", "controller: settle"),
    *((type(make_model_free(kind)), "propose", f"{kind}: propose") for kind in MODEL_FREE),
    *((type(make_model_free(kind)), "observe", f"{kind}: observe") for kind in MODEL_FREE),
    (InstantDraft, "propose", "model: propose"),
)
FORWARD = "forward"


def run(batch: int, draft: str, temperature: float, trace: bool, parts: Parts | None) -> tuple[list[float], Any]:
    """Seconds outside the pass of every round in which all sequences decode, and the sequences' counters."""
    target, rounds = InstantTarget(), []
    passes, texts = Parts(), tokenizer()
    target.forward = (parts or passes).timed(target.forward, FORWARD)  # type: ignore[method-assign]
    writer = TraceWriter(io.StringIO(), {}) if trace else None
    engine = Engine(
        target,
        vocab_size=VOCABULARY,
        drafters=drafters(draft),
        options=EngineOptions(max_batch=batch),
        new_pieces=texts.stream,
        on_record=None if writer is None else writer.write,
    )
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=1)
    sequences = []
    for i in range(batch):
        prompt = [FIRST + 7 * i % LOOP]
        for position in range(PROMPT - 1):
            prompt.append(next_token(prompt[-1], position + 31 * i))
        name = "none" if draft == "none" else "auto"
        sequences += engine.add(Request(str(i), tuple(prompt), params, DraftSettings(name)))
    for _ in range(batch + 2):
        engine.step()
    clock = parts or passes
    clock.running = True
    while engine.running == batch:
        began, before = time.thread_time(), clock.seconds[FORWARD]
        engine.step()
        rounds.append(time.thread_time() - began - (clock.seconds[FORWARD] - before))
    clock.running = False
    while engine.has_work:
        engine.step()
    return rounds, [s.stats for s in sequences]


def run_model(name: str, batch: int, parts: Parts) -> list[float]:
    """Seconds of every round of a model in which all sequences decode, with what is in `parts` running."""
    llm = LLM(name, max_batch=batch)
    assert llm.tokenizer is not None, f"{name} has no tokenizer"
    text = llm.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    engine, rounds = llm.engine, []
    for i in range(batch):
        piece = text[PROMPT * i % (len(text) - PROMPT) :][:PROMPT]
        engine.add(Request(str(i), tuple(piece), params, DraftSettings("auto")))
    for _ in range(batch + 4):
        engine.step()
    parts.running = True
    while engine.running == batch:
        began = time.perf_counter()
        engine.step()
        rounds.append(time.perf_counter() - began)
    parts.running = False
    return rounds


def report_model(name: str, batch: int, repeats: int) -> None:
    parts, rounds = Parts(), []
    for owner, function, part in PARTS:
        if part.startswith(("controller:", "auto:", AUTO_MATCHER)):
            parts.wrap(owner, function, part)
    try:
        for _ in range(repeats):
            rounds += run_model(name, batch, parts)
    finally:
        parts.unwrap()
    mean_s = sum(rounds) / len(rounds)
    took_s = {part: seconds / len(rounds) for part, seconds in parts.seconds.items()}
    shares = []
    for own in (("controller:",), ("controller:", "auto:")):
        all_s = sum(seconds for part, seconds in took_s.items() if part.startswith(own))
        shares.append(f"{1e6 * all_s:.0f} us ({all_s / mean_s:.2%})")
    print(f"batch {batch}, {name}: {1e3 * mean_s:.1f} ms a round, the controller {shares[0]}, with auto {shares[1]}")
    for part in sorted(took_s, key=lambda part: -took_s[part]):
        print(f"  {part:24} {1e6 * took_s[part]:8.1f} us in {parts.calls[part] / len(rounds):.1f} calls")


def report(batch: int, draft: str, temperature: float, trace: bool, repeats: int) -> None:
    rounds: list[float] = []
    for _ in range(repeats):
        some, stats = run(batch, draft, temperature, trace, None)
        rounds += some
    tokens = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
    drafted = sum(s.drafted for s in stats) / sum(s.rounds for s in stats)
    parts = Parts()
    for owner, name, part in PARTS:
        parts.wrap(owner, name, part)
    count = 0
    try:
        for _ in range(repeats):
            count += len(run(batch, draft, temperature, trace, parts)[0])
    finally:
        parts.unwrap()
    middle, mean = sorted(rounds)[len(rounds) // 2], sum(rounds) / len(rounds)
    built = parts.seconds["build_inputs"] / count
    print(
        f"batch {batch}, {draft}, T={temperature:g}: {1e6 * middle:.0f} us a round (mean {1e6 * mean:.0f}; own "
        f"{1e6 * (middle - built):.0f} without build_inputs), {tokens:.2f} tokens and {drafted:.2f} drafts a sequence"
    )
    for part in sorted(parts.seconds, key=lambda part: -parts.seconds[part]):
        if part != FORWARD and parts.seconds[part] > 5e-7 * count:
            calls = parts.calls[part] / count
            print(f"  {part:24} {1e6 * parts.seconds[part] / count:8.1f} us in {calls:.1f} calls")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--draft", nargs="+", choices=["none", "auto", "auto+model"], default=["none", "auto"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--trace", action="store_true", help="write every round's records, to memory")
    parser.add_argument("--model", help="measure in this model's rounds, with the threads that PyTorch takes")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.model is not None:
        for batch in args.batch:
            report_model(args.model, batch, args.repeats)
        return 0
    torch.set_num_threads(1)
    for draft in args.draft:
        for temperature in args.temperature:
            for batch in args.batch:
                report(batch, draft, temperature, args.trace, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())

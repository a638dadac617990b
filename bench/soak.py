"""Random requests through a cache too small for them, for as many rounds as an hour has.

    python bench/soak.py [--requests 500] [--rounds 72000] [--seed 0] [--dtype float32]

A random Llama of one layer, decoded by the real engine. The requests differ in length, options, choices, tenant,
drafter (none, ngram, suffix, auto, a draft model) and draft length; their prompts begin alike, so that prefixes are
re-used; arrivals and cancellations are random; the cache holds about half of what the running sequences want, so
that they are preempted and resumed. First every request runs alone, without drafts and prefixes. Then all of them run
together, again and again, until so many rounds are over (72,000 are an hour of rounds of 50 ms). Every text must equal
the one it had alone; after the last round the cache must be free again; resident memory is sampled, and compared
between the second and the last quarter of the rounds.

The last line is one JSON object. Exit code 1 where a text differs, memory is held, or resident memory has grown by
more than --growth.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from paceline import PacelineError, SamplingParams
from paceline.core.output import Delta
from paceline.decode.cache import KVCache
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.registry import make_auto, make_model_free
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.sequence import DraftSettings, Request
from paceline.errors import InvalidParameter

VOCABULARY, CONTEXT, LANES, BLOCK = 384, 256, 4, 32
DRAFTERS = ("none", "none", "ngram", "ngram", "suffix", "suffix", "auto", "draft")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
)


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        torch.set_num_threads(args.threads)
        KVCache.block = BLOCK  # short texts take several blocks, so that a tiny model feels a small cache
        run = Soak(args)
        return run.report(args.growth)
    except PacelineError as error:
        print(f"soak.py: {error}", file=sys.stderr)
        return 2


@dataclass(slots=True)
class Tally:
    """What happened, counted over all rounds."""

    rounds: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    different: list[str] = field(default_factory=list)


class Soak:
    """Runs it all; see the module's docstring."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rng, self.tally = random.Random(args.seed), Tally()
        self.target = decoder(1, args.seed, args.dtype)
        self.requests = list(random_requests(args.requests, args.seed))
        began = time.perf_counter()
        self.alone = self._alone()
        self.alone_s = time.perf_counter() - began
        say(f"{len(self.requests)} requests alone: {self.alone_s:.0f} s")
        self.resident: list[int] = []
        began = time.perf_counter()
        self.engine = self._engine(args)
        self._together(args.rounds)
        self.together_s = time.perf_counter() - began

    def _alone(self) -> dict[tuple[str, int], list[int]]:
        options = EngineOptions(max_batch=1, max_context=CONTEXT, prefix_cache=False)
        engine = Engine(self.target, vocab_size=VOCABULARY, options=options)
        texts: dict[tuple[str, int], list[int]] = {}
        for request in self.requests:
            sequences = engine.add(replace(request, draft=DraftSettings()))
            while engine.has_work:
                engine.step()
            texts |= {(request.request_id, s.choice): s.output for s in sequences}
        return texts

    def _engine(self, args: argparse.Namespace) -> Engine:
        budget = LANES * CONTEXT * 2 // 5 // BLOCK * BLOCK
        draft = decoder(1, args.seed + 1, args.dtype)
        own = ModelDrafter(draft, name="draft", max_positions=CONTEXT, slots=LANES)
        own.cache.budget = own.cache.cost(BLOCK) * (budget // BLOCK)
        drafters = {"ngram": make_model_free("ngram"), "suffix": make_model_free("suffix"), "auto": make_auto()}
        cost = self.target.new_cache(1, CONTEXT).cost(BLOCK)
        options = EngineOptions(
            max_batch=LANES, max_context=CONTEXT, prefill_chunk=64, cache_bytes=cost * (budget // BLOCK)
        )
        return Engine(self.target, vocab_size=VOCABULARY, drafters={**drafters, "draft": own}, options=options)

    def _together(self, rounds: int) -> None:
        """All requests in turning orders until the rounds are over, and at least once."""
        turn = 0
        while self.tally.rounds < rounds or not turn:
            order = self.rng.sample(self.requests, len(self.requests))
            self._once([replace(r, request_id=f"{r.request_id}.{turn}") for r in order], rounds, first=not turn)
            turn += 1
        self.engine.clear_prefix_cache()
        self.engine.check()

    def _once(self, waiting: list[Request], rounds: int, *, first: bool) -> None:
        engine, live = self.engine, dict[str, list[Any]]()
        while waiting or engine.has_work:
            while waiting and self.rng.random() < 0.4 and (first or self.tally.rounds < rounds):
                request = waiting.pop()
                live[request.request_id] = engine.add(request)
            if not first and self.tally.rounds >= rounds:
                waiting.clear()
            if live and self.rng.random() < 0.01:
                engine.cancel(self.rng.choice(list(live)))
            self._settle(live, engine.step())
            self.tally.rounds += 1
            if self.tally.rounds % max(rounds // 200, 1) == 0:
                self.resident.append(resident_bytes())

    def _settle(self, live: dict[str, list[Any]], deltas: Sequence[Delta]) -> None:
        """Judge requests whose choices have all ended, and forget them."""
        for name in {d.request_id for d in deltas if d.finish_reason is not None}:
            sequences = live.get(name, [])
            if any(s.stop.finish_reason is None for s in sequences):
                continue
            for s in live.pop(name, []):
                text = self.alone[name.partition(".")[0], s.choice]
                cancelled = s.stop.finish_reason == "cancelled"
                if s.output != (text[: len(s.output)] if cancelled else text):
                    self.tally.different.append(name)
                self.tally.finished += not cancelled
                self.tally.cancelled += cancelled
                self.tally.preemptions += s.stats.preemptions
                self.tally.reused += s.stats.cached_tokens > 0
                self.tally.drafted += s.stats.drafted
                self.tally.accepted += s.stats.accepted

    def report(self, growth: float) -> int:
        """Say what was seen; 0 where all is well."""
        tally, quarter = self.tally, max(len(self.resident) // 4, 1)
        early, late = (
            statistics.median(part)
            for part in (self.resident[quarter : 2 * quarter] or [0], self.resident[-quarter:] or [0])
        )
        grown = late / early - 1 if early else 0.0
        cache = self.engine.cache
        held = cache.nbytes + (cache.slots - cache.free_slots)
        say(
            f"{tally.rounds} rounds in {self.together_s:.0f} s: {tally.finished} texts, {tally.cancelled} cancelled, "
            f"{tally.preemptions} preemptions, {tally.reused} began from a prefix, {tally.accepted} of {tally.drafted} "
            f"drafts accepted; {len(tally.different)} texts differ; {held} bytes and slots still held; resident "
            f"{early / 1e6:.1f} MB in the second quarter, {late / 1e6:.1f} MB in the last ({grown:+.2%})"
        )
        failed = bool(tally.different) or held > 0 or grown > growth
        facts = {
            "requests": len(self.requests),
            "rounds": tally.rounds,
            "seconds": self.together_s,
            "finished": tally.finished,
            "cancelled": tally.cancelled,
            "preemptions": tally.preemptions,
            "reused": tally.reused,
            "different": tally.different,
            "held": held,
            "resident_early": early,
            "resident_late": late,
            "failed": failed,
        }
        print(json.dumps(facts))
        return int(failed)


def random_requests(count: int, seed: int) -> Iterator[Request]:
    """Prompts with common beginnings, of 1 to 160 tokens."""
    rng = random.Random(seed)
    bases = [[rng.randrange(VOCABULARY) for _ in range(140)] for _ in range(8)]
    for i in range(count):
        prompt = rng.choice(bases)[: rng.choice([0, 20, rng.randint(1, 140)])]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 4, 20, 60, 90]), seed=i, n=rng.choice([1, 1, 1, 2]), **rng.choice(OPTIONS)
        )
        draft = DraftSettings(rng.choice(DRAFTERS), rng.choice([1, 3, 7]))
        if draft.drafter in ("none", "auto"):
            draft = replace(draft, draft_length=None)
        yield Request(str(i), tuple(prompt), params, draft, rng.choice(["a", "b"]))


def decoder(layers: int, seed: int, dtype: str) -> LlamaDecoder:
    """A random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    weights = {name: value.to(kind) for name, value in LlamaForCausalLM(config).state_dict().items()}
    return LlamaDecoder(config, weights, torch.device("cpu"))


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE if path.exists() else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=72_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--growth", type=float, default=0.02, help="of resident memory that is allowed (0.02)")
    args = parser.parse_args(argv)
    for name in ("requests", "rounds", "threads"):
        if getattr(args, name) < 1:
            raise InvalidParameter(name, getattr(args, name), "a whole number from 1")
    return args


if __name__ == "__main__":
    sys.exit(main())

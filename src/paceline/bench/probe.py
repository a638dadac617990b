"""`paceline probe`: times this machine and replays these prompts, and spends the time it has where it is least sure.

The target writes an answer to each prompt plainly (so what is timed and what is replayed do not depend on a
drafter), every drafter is replayed along it (`replay.py`), and passes are timed in between, in turns. First every
task at every temperature gets one text; then texts go to where the acceptance length is least known for its
number of texts, and repeats to the passes with the widest spread.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from paceline import __version__
from paceline.bench.loops import find_loop
from paceline.bench.pass_timer import PassTimer, Point
from paceline.bench.replay import Text, model_of, replay
from paceline.bench.workloads import Workload, WorkloadPrompt
from paceline.core.output import Completion
from paceline.core.sampling import SamplingParams
from paceline.decode.around import time_around
from paceline.decode.draft.base import Drafter
from paceline.decode.llm import LLM
from paceline.decode.model.checkpoint import inspect_checkpoint
from paceline.decode.sequence import DraftSettings
from paceline.decode.verify.noise import request_key
from paceline.errors import UsageError
from paceline.plan.hindsight import fixed_rounds
from paceline.plan.probe_file import DrafterTimes, Drafts, ProbeFile, ReplayedText

__all__ = [
    "LONGEST",
    "ProbeOptions",
    "assemble",
    "chat_ids",
    "drafters_of",
    "make_text",
    "make_timers",
    "processor_name",
    "replay_all",
    "replayed",
    "run_probe",
    "seed_of",
]

LONGEST = 16
BASE_CONTEXT = 256
_WIDTHS: Mapping[int, tuple[int, ...]] = {
    1: (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64),
    2: (1, 2, 3, 5, 9, 17),
    4: (1, 2, 3, 5, 9, 16),
    8: (1, 2, 3, 5, 8),
    16: (1, 2, 3, 4),
}
_LONG_CONTEXTS = (1024, 2048)
_LONG_POINTS = ((1, 1), (1, 8), (4, 1), (4, 4))
_PREFILL = (64, 128, 256, 512)
_REPEATS = 9  # of every pass at most
_AROUND_ROUNDS = 5
_AT_THE_DEPTH = 4  # the draft length at which uncertainty of AL is weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """budget_s     seconds for everything, from `began` on (by `clock`)
    temperatures   each prompt at each of them
    max_tokens     of an answer
    together       prompts answered at once, at most the engine's batch
    """

    budget_s: float
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 96
    together: int = 8
    clock: Callable[[], float] = time.perf_counter
    began: float | None = None


@dataclass(slots=True)
class _Group:
    """Prompts of one task at one temperature, and what came of them."""

    task: str
    temperature: float
    waiting: list[WorkloadPrompt]
    texts: list[ReplayedText] = field(default_factory=list)
    prompt_count: int = 0

    def doubt(self) -> float:
        """Relative standard error of tokens a round, of the drafter where it is widest; endless before two texts."""
        known = [t for t in self.texts if t.tokens > 1]
        if len(known) < 2:
            return 1e9 - len(self.texts)
        worst = 0.0
        for name in known[0].drafts:
            rates = [(t.tokens - 1) / len(fixed_rounds(t, name, _AT_THE_DEPTH)) for t in known]
            worst = max(worst, statistics.stdev(rates) / statistics.mean(rates) / len(rates) ** 0.5)
        return worst


def run_probe(
    llm: LLM,
    workloads: Sequence[Workload],
    options: ProbeOptions,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> ProbeFile:
    """Measure. `progress` gets the share of the budget that is spent, and what is being done.

    Raises UsageError where there is no prompt, or a drafter cannot be replayed over a text.
    """
    began = options.began if options.began is not None else options.clock()
    drafters = drafters_of(llm)
    groups = [
        _Group(w.kind, t, list(w.prompts), prompt_count=len(w.prompts)) for w in workloads for t in options.temperatures
    ]
    timers = make_timers(llm, drafters, options.clock)
    costs: dict[str, list[float]] = {name: [] for name in drafters}
    took: dict[str, float] = {}
    for name, step in _steps(llm, groups, drafters, timers, costs, options):
        spent = options.clock() - began
        if spent + took.get(name, 0.0) > options.budget_s and _enough(groups, timers):
            break
        progress(min(spent / options.budget_s, 1.0), f"{sum(len(g.texts) for g in groups)} texts, {name}")
        step()
        took[name] = options.clock() - began - spent
    texts = [text for group in groups for text in group.texts]
    return assemble(llm, drafters, timers, costs, texts, options.clock() - began)


def drafters_of(llm: LLM) -> dict[str, Drafter]:
    """Those `--draft` asked for by name; with `auto` or nothing, all that `auto` chooses among."""
    known = {n: d for n, d in llm.draft_set.drafters.items() if n not in ("auto", "none")}
    default = llm.defaults.drafter
    return {default: known[default]} if default in known else known


def make_timers(
    llm: LLM, drafters: Mapping[str, Drafter], clock: Callable[[], float], largest: int = max(_WIDTHS)
) -> dict[str, PassTimer]:
    """Of the target's passes of up to `largest` sequences, of prefills, and of the steps of each draft model."""
    most = min(BASE_CONTEXT, max(llm.max_context - 64, 0))
    batches = [b for b in _WIDTHS if b <= largest]
    points: list[Point] = [(b, w, most) for b in batches for w in _WIDTHS[b]]
    points += [(b, w, c) for c in _LONG_CONTEXTS if c + 8 <= llm.max_context for b, w in _LONG_POINTS if b <= largest]
    chunk = llm.engine.options.prefill_chunk
    prefill: list[Point] = [(1, w, 0) for w in _PREFILL if w <= min(chunk, llm.max_context)]
    around = time_around(llm.engine.model, min(largest, max(_WIDTHS)), _AROUND_ROUNDS, clock)
    timers = {
        "passes": PassTimer(llm.engine.model, points, around=around, clock=clock),
        "prefill": PassTimer(llm.engine.model, prefill, prefill=True, clock=clock),
    }
    for name, drafter in drafters.items():
        if (model := model_of(drafter)) is not None:
            steps: list[Point] = [(b, 1, most) for b in batches]
            timers[name] = PassTimer(model, steps, clock=clock)
    return timers


def _steps(
    llm: LLM,
    groups: Sequence[_Group],
    drafters: Mapping[str, Drafter],
    timers: Mapping[str, PassTimer],
    costs: dict[str, list[float]],
    options: ProbeOptions,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, work) of pieces before each of which the probe may stop: timings and texts by turns."""

    def sweep(share: float) -> None:
        for name, timer in timers.items():
            if share == 1.0 or name != "prefill":
                timer.sweep(timer.widest(share))

    yield "first timings", lambda: sweep(1.0)
    while True:
        batch = _next_prompts(groups, options.together)
        if batch:
            yield "replaying drafters", lambda batch=batch: _answer(llm, batch, drafters, costs, options)  # type: ignore[misc]
        elif all(len(p.seconds) >= _REPEATS for p in timers["passes"].times()):
            return
        yield "timing passes", lambda: sweep(0.5)


def _enough(groups: Sequence[_Group], timers: Mapping[str, PassTimer]) -> bool:
    """Whether there is something of everything."""
    return all(t.times() for t in timers.values()) and all(g.texts for g in groups if g.prompt_count)


def _next_prompts(groups: Sequence[_Group], most: int) -> list[tuple[_Group, WorkloadPrompt]]:
    """Where acceptance is least known, reckoning that each text more lowers the doubt by its share."""
    chosen: list[tuple[_Group, WorkloadPrompt]] = []
    doubts = [group.doubt() for group in groups]
    while len(chosen) < most and any(group.waiting for group in groups):
        place = max(range(len(groups)), key=lambda i: doubts[i] if groups[i].waiting else -1.0)
        group = groups[place]
        chosen.append((group, group.waiting.pop(0)))
        count = len(group.texts) + sum(g is group for g, _ in chosen)
        doubts[place] *= (1.0 - 1.0 / count) ** 0.5 if count > 1 else 0.5
    return chosen


def _answer(
    llm: LLM,
    batch: Sequence[tuple[_Group, WorkloadPrompt]],
    drafters: Mapping[str, Drafter],
    costs: dict[str, list[float]],
    options: ProbeOptions,
) -> None:
    prompts = [chat_ids(llm, prompt) for _, prompt in batch]
    params = [
        SamplingParams(temperature=g.temperature, max_tokens=options.max_tokens, seed=seed_of(p)) for g, p in batch
    ]
    room = [len(ids) + 1 < llm.max_context for ids in prompts]
    kept = [i for i, fits in enumerate(room) if fits]
    outputs = llm.generate([prompts[i] for i in kept], [params[i] for i in kept], draft=DraftSettings("none"))
    for i, output in zip(kept, outputs, strict=True):
        group, prompt = batch[i]
        text = make_text(llm, prompts[i], output.completions[0], params[i])
        drafts, seconds = replay_all(drafters, text)
        for name, value in seconds.items():
            costs[name].append(value)
        group.texts.append(replayed(text, group.task, prompt.id, drafts))


def seed_of(prompt: WorkloadPrompt) -> int:
    """A prompt is answered under the same noise in every probe."""
    return sum(map(ord, prompt.id)) % 1009


def chat_ids(llm: LLM, prompt: WorkloadPrompt) -> list[int]:
    """The prompt in the model's chat template; as it stands where the model has none."""
    if llm.tokenizer is None:
        raise UsageError("this model comes without a tokenizer; prompts are text")
    if not llm.tokenizer.has_chat_template:
        return llm.encode(prompt.text)
    return llm.tokenizer.encode_chat(prompt.messages)


def make_text(llm: LLM, prompt: Sequence[int], done: Completion, params: SamplingParams) -> Text:
    """A finished answer, ready to be replayed."""
    return Text(
        prompt=tuple(prompt),
        output=tuple(done.token_ids),
        ended=done.finish_reason == "stop",
        params=params,
        vocab_size=llm.checkpoint.vocab_size,
        noise_key=request_key(params.seed or 0, done.index),
        eos_token_ids=llm.checkpoint.eos_token_ids,
    )


def replay_all(
    drafters: Mapping[str, Drafter], text: Text, longest: int = LONGEST
) -> tuple[dict[str, Drafts], dict[str, float]]:
    """Every drafter along the text, and seconds a round of each."""
    made = {name: replay(drafter, text, longest) for name, drafter in drafters.items()}
    return {name: drafts for name, (drafts, _) in made.items()}, {name: s for name, (_, s) in made.items()}


def replayed(text: Text, task: str, prompt: str, drafts: Mapping[str, Drafts]) -> ReplayedText:
    """As a probe's file keeps it."""
    content = text.output[:-1] if text.ended else text.output
    return ReplayedText(
        task=task,
        prompt=prompt,
        temperature=text.params.temperature,
        prompt_tokens=len(text.prompt),
        tokens=len(text.output),
        ended=text.ended,
        loops=find_loop(content) is not None,
        drafts=dict(drafts),
    )


def assemble(
    llm: LLM,
    drafters: Mapping[str, Drafter],
    timers: Mapping[str, PassTimer],
    costs: Mapping[str, Sequence[float]],
    texts: Sequence[ReplayedText],
    seconds: float,
) -> ProbeFile:
    """What was measured as one file; `costs` are seconds a round by drafter, one for each text."""
    if not texts:
        raise UsageError("no prompt fits the context with room for an answer; shorten them or raise --max-context")
    prices = tuple(
        DrafterTimes(
            name,
            name.partition(":")[0],
            statistics.median(costs[name]) if costs[name] else 0.0,
            timers[name].times() if name in timers else (),
            _draft_config(llm, name),
        )
        for name in drafters
    )
    return ProbeFile(
        model=llm.checkpoint.name,
        dtype=llm.precision,
        device=str(llm.device),
        processor=processor_name(),
        threads=torch.get_num_threads(),
        weight_bytes=llm.engine.model.weight_bytes,
        seconds=seconds,
        passes=timers["passes"].times(),
        prefill=timers["prefill"].times(),
        drafters=prices,
        texts=tuple(texts),
        longest=LONGEST,
        config=_plain(llm.checkpoint.config.to_dict()),
        memory_bytes=_memory_bytes(llm),
        versions={"paceline": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    )


def _draft_config(llm: LLM, name: str) -> dict[str, object]:
    """Of a draft model that is a file of its own."""
    kind, _, path = name.partition(":")
    return _plain(inspect_checkpoint(path).config.to_dict()) if kind == "model" else {}


def _memory_bytes(llm: LLM) -> float:
    if llm.device.type == "cuda":
        return float(torch.cuda.get_device_properties(llm.device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def processor_name() -> str:
    """What the operating system calls the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _plain(value: object) -> dict[str, object]:
    """Of a configuration, what JSON holds: numbers, words, and lists and tables of them."""

    def clean(item: object) -> object:
        if isinstance(item, Mapping):
            return {str(k): clean(v) for k, v in item.items()}
        if isinstance(item, (list, tuple)):
            return [clean(v) for v in item]
        return item if isinstance(item, (str, int, float, bool, type(None))) else str(item)

    found = clean(value)
    assert isinstance(found, dict), "a configuration is a table"
    return found

"""`LLM`: a model from disk, its drafters and an engine, behind three calls."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

from paceline.core.grammar import Grammar
from paceline.core.output import Completion, Delta, RequestOutput
from paceline.core.records import StepRecord, TraceWriter
from paceline.core.sampling import SamplingParams
from paceline.decode.around import time_around
from paceline.decode.draft.build import DraftModel, build_drafters, parse_drafts
from paceline.decode.draft.registry import DraftSpec
from paceline.decode.engine import Engine, EngineOptions
from paceline.decode.loading import decoder_note, load_model
from paceline.decode.memory import fit_memory
from paceline.decode.model.base import TargetModel
from paceline.decode.model.checkpoint import Checkpoint, inspect_checkpoint
from paceline.decode.model.doctor import check_draft_vocabulary
from paceline.decode.model.precision import floats_of, pick_precision
from paceline.decode.sequence import DraftSettings, Phase, Request, Sequence, check_tree_size
from paceline.decode.verify.grammar import GrammarCompiler
from paceline.decode.verify.leniency import Leniency, check_leniency
from paceline.decode.verify.rules import get_rule
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.control.from_probe import check_same_engine
from paceline.plan.control.records import DraftAlarm
from paceline.plan.probe_file import ProbeFile, read_probe

__all__ = ["LLM", "Prompt", "TokenStream"]

Prompt = str | Seq[int]
Messages = Seq[Mapping[str, Any]]
_DEFAULT_CONTEXT = 4096
_AROUND = 8  # sequences among which it is timed what a round takes beside its pass


class LLM:
    """Generate text with a model, speculatively and exactly.

    model         `smollm2-135m`, a Hugging Face id, a folder with safetensors, or a .gguf file
    draft         one or several of `none`, `auto`, `ngram`, `suffix`, `layer-skip[:N]` (the target's first N
                  layers), `model:PATH` (a bare path or id too)
    draft_length  draft tokens a round; None lets the drafter choose
    tree_size     draft tokens a round in all where proposals branch, draft_length on the longest path; None: chains
    verify        acceptance rule: coupled, greedy, rejection, block, or relaxed (not exact)
    relaxed       what `relaxed` takes for likely enough; typical acceptance where None
    dtype         float32, bfloat16, int8 or int4 (weights alone, on a CPU), or auto: bfloat16 where the device
                  multiplies it natively, else float32; `precision` says which, `notes` where it is not compiled
    draft_dtype   of a draft model; the target's where None
    threads       CPU threads; PyTorch's own choice where None
    max_context   tokens of prompt and answer; the model's own maximum, at most 4096, where None
    max_batch     sequences decoded together
    max_memory    bytes for weights, caches and workspace; nine tenths of what is free where None. Where the model's own
                  context does not fit, less is taken, unless max_context asks for it; `memory` says what fits
    deterministic rows independent in passes of any size, at some cost in large batches
    prefix_cache  keep what finished sequences computed, for later requests of their tenant that begin likewise
    probe         file of `paceline probe` over this model: the controller starts from it instead of from priors
    trace         file for one record per sequence and round
    on_record     receives the same records as they are made

    Raises UsageError (and its kinds) with a sentence for whatever does not fit.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str | Seq[str] = "auto",
        draft_length: int | None = None,
        tree_size: int | None = None,
        verify: str = "coupled",
        relaxed: Leniency | None = None,
        dtype: str = "auto",
        draft_dtype: str | None = None,
        device: str = "auto",
        threads: int | None = None,
        max_context: int | None = None,
        max_batch: int = 8,
        max_memory: int | None = None,
        deterministic: bool = False,
        prefix_cache: bool = True,
        trace: Path | None = None,
        probe: Path | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        began = time.perf_counter()
        specs = parse_drafts([draft] if isinstance(draft, str) else draft)
        get_rule(verify)
        check_leniency(verify, relaxed)
        _check_whole("draft_length", draft_length, 0)
        _check_whole("threads", threads, 1)
        _check_whole("max_context", max_context, 2)
        _check_whole("max_batch", max_batch, 1)
        _check_whole("max_memory", max_memory, 1)
        _check_fits(specs, draft_length, draft_dtype)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = _pick_device(device)
        self.precision = pick_precision(dtype, self.device)
        self.dtype = floats_of(self.precision)
        self.notes: list[str] = []  # what loading found that the caller should know
        self.checkpoint, decoder = self._load_model(model, self.precision, progress)
        if not decoder.row_policy.proved:
            warnings.warn(
                "no padding tried makes a row independent of its pass on this machine; drafted text may part from "
                "plain text where two tokens are nearly tied",
                stacklevel=2,
            )
        self.tokenizer = self.checkpoint.tokenizer
        options = EngineOptions(
            max_batch=max_batch,
            max_context=self._context(max_context),
            deterministic=deterministic,
            prefix_cache=prefix_cache,
        )
        drafting = pick_precision(draft_dtype or dtype, self.device)
        self.draft_set = build_drafters(
            specs,
            decoder,
            max_batch=max_batch,
            max_draft=options.max_draft,
            load=lambda spec: self._load_draft(spec, drafting, progress),
            stop_ids=self.checkpoint.eos_token_ids,
            keep=prefix_cache,
            probe=None if probe is None else self._read_probe(probe, decoder),
            around=lambda: time_around(decoder, min(max_batch, _AROUND)),
        )
        self.defaults = DraftSettings(self.draft_set.default, draft_length, verify, tree_size, relaxed)
        check_tree_size(self.defaults, self.draft_set.drafters.get(self.draft_set.default))
        self.trace = self._open_trace(trace, model)
        self.memory = fit_memory(
            decoder, self.checkpoint.config, self.draft_set.drafters.values(), options, max_memory, max_context
        )
        self.max_context = self.memory.context
        self._grammars = self._new_grammars()
        self.engine = Engine(
            decoder,
            vocab_size=self.checkpoint.vocab_size,
            eos_token_ids=self.checkpoint.eos_token_ids,
            drafters=self.draft_set,
            options=replace(options, cache_bytes=self.memory.cache),
            new_pieces=None if self.tokenizer is None else self.tokenizer.stream,
            grammars=self._grammars,
            on_record=_to_both(None if self.trace is None else self.trace.write, on_record),
        )
        self._post = _Post(self.engine)
        self._ids = count()
        self.load_s = time.perf_counter() - began

    # -- calls ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        draft: DraftSettings | Seq[DraftSettings] | None = None,
        tenant: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (text, or token ids); outputs in the order of the prompts.

        Drafters learn from finished outputs of the same `tenant` only.
        """
        many = _as_prompts(prompts)
        requests = [
            self._request(prompt, p, d, tenant)
            for prompt, p, d in zip(
                many,
                _spread("params", params or SamplingParams(), len(many)),
                _spread("draft", draft or self.defaults, len(many)),
                strict=True,
            )
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        draft: DraftSettings | None = None,
        tenant: str = "",
    ) -> RequestOutput:
        """Answer a conversation by the model's own chat template."""
        return self.generate([self._chat_ids(messages)], params, draft=draft, tenant=tenant)[0]

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: DraftSettings | None = None,
        tenant: str = "",
    ) -> TokenStream:
        """Deltas of one prompt or conversation as they become certain; closing the stream cancels the request."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self._chat_ids(cast(Messages, prompt))
        settings = draft or self.defaults
        request = self._request(cast(Prompt, prompt), params or SamplingParams(), settings, tenant)
        return TokenStream(self._post, request)

    @property
    def saved_s(self) -> float:
        """Seconds of the machine saved so far against plain decoding that was not run; below 0 where drafting lost."""
        return self.draft_set.auto.controller.ledger.saved_s if self.draft_set.auto is not None else 0.0

    @property
    def alarms(self) -> list[DraftAlarm]:
        """Drafters that turned out to be of no use here, each once."""
        return list(self.draft_set.auto.controller.ledger.alarms) if self.draft_set.auto is not None else []

    def close(self) -> None:
        """Write out the trace."""
        if self.trace is not None:
            self.trace.close()

    # -- helpers -------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError("this model comes without a tokenizer; give token ids instead of text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not valid Unicode text: it holds a lone surrogate") from error
        return self.tokenizer.encode(text)

    def _chat_ids(self, messages: Messages) -> list[int]:
        if self.tokenizer is None:
            raise UsageError("this model comes without a tokenizer; give token ids instead of messages")
        return self.tokenizer.encode_chat(messages)

    def _request(self, prompt: Prompt, params: SamplingParams, draft: DraftSettings, tenant: str) -> Request:
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(str(next(self._ids)), tuple(ids), self.resolve(params), draft, tenant)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Bad words given as text, as token ids: as they stand alone and as they follow a space. Grammars are tried."""
        if params.grammar is not None:
            self.check_grammar(params.grammar)
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        if self.tokenizer is None:
            raise UsageError("bad words given as text need a tokenizer; give token ids")
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                texts = (word, " " + word.lstrip())
                words += [tuple(self.tokenizer.backend.encode(t, add_special_tokens=False).ids) for t in texts]
            else:
                words.append(word)
        return replace(params, bad_words=tuple(dict.fromkeys(w for w in words if w)))

    def _new_grammars(self) -> GrammarCompiler | None:
        if self.tokenizer is None:
            return None
        return GrammarCompiler(
            self.tokenizer.token_bytes,
            self.tokenizer.special_ids,
            self.checkpoint.vocab_size,
            self.checkpoint.eos_token_ids,
        )

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar ahead of its use. Raises UsageError where it cannot be enforced."""
        if self._grammars is None:
            raise UsageError("a grammar needs a tokenizer, and this model has none; use allowed_token_ids")
        self._grammars.check(grammar)

    def _run(self, requests: Seq[Request]) -> list[RequestOutput]:
        queued: list[list[Sequence]] = []
        try:
            for request in requests:
                queued.append(self._post.open(request))
            while not all(_finished(sequences) for sequences in queued):
                self._post.step()
        finally:
            for request, sequences in zip(requests, queued, strict=False):
                self._post.close(request.request_id, sequences)
        return [_output(r, sequences) for r, sequences in zip(requests, queued, strict=True)]

    def _load_draft(self, spec: str, precision: str, progress: Callable[[str], None] | None) -> DraftModel:
        inspected = inspect_checkpoint(spec, progress)
        translation = check_draft_vocabulary(self.checkpoint, inspected)
        if translation is not None:
            self.notes.append(f"{spec} has another tokenizer, its drafts are translated: {translation.overlap}")
        return DraftModel(*self._load_model(spec, precision, progress, drafts=True), translation)

    def _load_model(
        self, spec: str, precision: str, progress: Callable[[str], None] | None, *, drafts: bool = False
    ) -> tuple[Checkpoint, TargetModel]:
        checkpoint, decoder = load_model(spec, precision, self.device, progress, drafts=drafts)
        if note := decoder_note(checkpoint, precision, self.device):
            self.notes.append(note)
        return checkpoint, decoder

    def _read_probe(self, path: Path, decoder: TargetModel) -> ProbeFile:
        probe = read_probe(path)
        check_same_engine(probe, self.precision, decoder.weight_bytes, torch.get_num_threads())
        return probe

    def _context(self, asked: int | None) -> int:
        own = self.checkpoint.max_positions
        if asked is not None and asked > own:
            raise InvalidParameter("max_context", asked, f"at most {own}, the model's own maximum")
        return asked or min(own, _DEFAULT_CONTEXT)

    def _open_trace(self, path: Path | None, model: str) -> TraceWriter | None:
        if path is None:
            return None
        return TraceWriter(
            path,
            {
                "model": model,
                "dtype": self.precision,
                "drafter": self.defaults.drafter,
                "draft_length": self.defaults.draft_length,
                "tree_size": self.defaults.tree_size,
                "verify": self.defaults.verify,
                "relaxed": None if self.defaults.relaxed is None else str(self.defaults.relaxed),
                "lossless": get_rule(self.defaults.verify).lossless,
                "threads": torch.get_num_threads(),
            },
        )


class _Post:
    """Steps the engine for whoever waits, and keeps every request's deltas until its own reader takes them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._boxes: dict[str, deque[Delta]] = {}

    def open(self, request: Request) -> list[Sequence]:
        sequences = self.engine.add(request)
        self._boxes[request.request_id] = deque()
        return sequences

    def step(self) -> None:
        for delta in self.engine.step():
            if (box := self._boxes.get(delta.request_id)) is not None:
                box.append(delta)

    def take(self, request_id: str) -> Delta | None:
        box = self._boxes[request_id]
        return box.popleft() if box else None

    def close(self, request_id: str, sequences: Seq[Sequence]) -> None:
        """Cancel what still runs of a request, and forget its deltas."""
        self._boxes.pop(request_id, None)
        if not _finished(sequences):
            self.engine.cancel(request_id)
            self.step()


class TokenStream:
    """A running request: iterate for its deltas, then `output` holds it whole. `close` cancels what is left."""

    def __init__(self, post: _Post, request: Request) -> None:
        self._post, self._request = post, request
        self._sequences = post.open(request)

    def __iter__(self) -> Iterator[Delta]:
        name = self._request.request_id
        try:
            while True:
                while (delta := self._post.take(name)) is not None:
                    yield delta
                if _finished(self._sequences):
                    return
                self._post.step()
        finally:
            self.close()

    def close(self) -> None:
        self._post.close(self._request.request_id, self._sequences)

    @property
    def output(self) -> RequestOutput:
        """The finished request; an assertion fails where it has not finished."""
        return _output(self._request, self._sequences)


def _finished(sequences: Seq[Sequence]) -> bool:
    return all(s.phase is Phase.FINISHED for s in sequences)


def _output(request: Request, sequences: Seq[Sequence]) -> RequestOutput:
    scored = None if request.params.prompt_logprobs is None else sequences[0].prompt_logprobs
    return RequestOutput(request.request_id, list(request.prompt), [completion(s) for s in sequences], scored)


def completion(sequence: Sequence) -> Completion:
    """A finished sequence as the caller sees it."""
    assert sequence.stop.finish_reason is not None
    return Completion(
        index=sequence.choice,
        text=sequence.text,
        token_ids=sequence.output,
        finish_reason=sequence.stop.finish_reason,
        stats=sequence.stats,
        logprobs=sequence.logprobs if sequence.request.params.logprobs is not None else None,
        error=sequence.error,
        verify=sequence.request.draft.verify,
        lossless=get_rule(sequence.request.draft.verify).lossless,
    )


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidParameter("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidParameter("device", name, "auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", name, "cpu", "This PyTorch sees no CUDA device.")
    return device


def _to_both(
    first: Callable[[StepRecord], None] | None, second: Callable[[StepRecord], None] | None
) -> Callable[[StepRecord], None] | None:
    if first is None or second is None:
        return first or second

    def both(record: StepRecord) -> None:
        first(record)
        second(record)

    return both


def _as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and isinstance(many[0], int):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _spread(name: str, value: Any, size: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * size
    if len(value) != size:
        raise UsageError(f"{len(value)} {name} for {size} prompts; give one, or one for each prompt")
    return list(value)


def _check_fits(specs: Seq[DraftSpec], draft_length: int | None, draft_dtype: str | None) -> None:
    """Refuse options that the drafters given leave without effect."""
    kinds = {spec.kind for spec in specs}
    if kinds == {"none"} and draft_length:
        raise InvalidParameter("draft_length", draft_length, "0 or auto where nothing drafts")
    if draft_dtype is not None and "model" not in kinds:
        raise InvalidParameter("draft_dtype", draft_dtype, "nothing unless a draft model is given")


def _check_whole(name: str, value: object, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise InvalidParameter(name, value, f"a whole number from {low}")

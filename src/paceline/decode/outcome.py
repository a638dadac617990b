"""What a round brings one sequence: from a verdict to emitted tokens, counters, and the round's records."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.output import Delta, TokenLogprob
from paceline.core.proposal import Proposal, Verdict
from paceline.core.records import StepRecord
from paceline.decode.draft.auto import AutoDrafter
from paceline.decode.sequence import Sequence
from paceline.decode.verify.logprobs import token_logprobs
from paceline.decode.verify.rules import RULES
from paceline.errors import RequestFailed
from paceline.plan.control.records import RoundFacts

__all__ = ["Outcome", "RoundTimes", "add_seconds", "count_round", "emit", "score_prompt", "settle", "write_records"]


@dataclass(slots=True)
class Outcome:
    """What a round brought one sequence. `kept` are the rows of its span that stay in the cache."""

    proposal: Proposal
    prefill: bool
    context: int
    verdict: Verdict | None = None
    failure: RequestFailed | None = None
    logits: Tensor | None = None
    emitted: int = 0
    accepted: int = 0
    kept: Seq[int] = ()

    @property
    def whole_verdict(self) -> Verdict | None:
        """The verdict of a round, where all it says was emitted and is about the drafter's own nodes."""
        verdict = None if self.prefill else self.verdict
        if verdict is None or max(verdict.path, default=-1) >= self.own_drafts:
            return None
        return verdict if self.emitted == len(verdict.path) + 1 else None

    @property
    def own_drafts(self) -> int:
        """Draft tokens that a drafter brought, not a grammar."""
        return len(self.proposal) - self.proposal.forced


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds: when the round began and ended by the engine's clock, and what drafting and the target pass took."""

    began: float
    draft: float
    verify: float
    ended: float

    @property
    def whole(self) -> float:
        return self.ended - self.began


def emit(sequence: Sequence, outcome: Outcome, vocab_size: int) -> Delta:
    """Commit the verdict's tokens one by one, up to the first that ends the text."""
    assert outcome.verdict is not None
    text = ""
    emitted: list[int] = []
    for token in outcome.verdict.tokens(outcome.proposal):
        text += sequence.stop.push(token)
        emitted.append(token)
        if sequence.stop.finish_reason is not None:
            break
    sequence.view.tokens.extend(emitted)
    sequence.prefix.commit(emitted)
    sequence.text += text
    outcome.emitted = len(emitted)
    outcome.accepted = min(len(outcome.verdict.path), len(emitted))
    logprobs = _logprobs(sequence, outcome, emitted, vocab_size)
    sequence.logprobs.extend(logprobs)
    return Delta(
        sequence.request.request_id,
        sequence.choice,
        tuple(emitted),
        tuple(i < outcome.accepted for i in range(len(emitted))),
        text,
        tuple(logprobs),
        sequence.stop.finish_reason,
    )


def count_round(sequence: Sequence, outcome: Outcome) -> None:
    """Add a round to the sequence's counters; prefill is no round."""
    if outcome.prefill:
        return
    stats = sequence.stats
    stats.rounds += 1
    stats.emitted += outcome.emitted
    stats.accepted += outcome.accepted
    stats.drafted += len(outcome.proposal)
    if len(outcome.proposal):
        stats.draft_rounds += 1
        stats.emitted_in_draft_rounds += outcome.emitted


def _logprobs(
    sequence: Sequence, outcome: Outcome, emitted: list[int], vocab_size: int
) -> list[TokenLogprob]:
    top = sequence.request.params.logprobs
    if top is None:
        return []
    assert outcome.verdict is not None and outcome.logits is not None
    rows = [0, *(1 + node for node in outcome.verdict.path)][: len(emitted)]
    return _scored(outcome.logits[rows], emitted, top, vocab_size)


def _scored(logits: Tensor, tokens: Seq[int], top: int, vocab_size: int) -> list[TokenLogprob]:
    """One entry a row: its token's log-probability and the `top` most probable ones."""
    values = token_logprobs(logits, torch.tensor(tokens, device=logits.device), top, vocab_size)
    lists = zip(tokens, values.chosen.tolist(), values.ids.tolist(), values.logprobs.tolist(), strict=True)
    return [TokenLogprob(token, own, tuple(zip(ids, logs, strict=True))) for token, own, ids, logs in lists]


def score_prompt(
    sequence: Sequence,
    start: int,  # position of the first row's token
    logits: Tensor,  # [rows, width]
    vocab_size: int,
) -> None:
    """Log-probabilities of the prompt's tokens after each row of a chunk, kept once and in order."""
    top = sequence.request.params.prompt_logprobs
    assert top is not None
    known = len(sequence.prompt_logprobs)
    assert start <= known, f"rows of prompt tokens {known} to {start} were never computed"
    following = sequence.request.prompt[known + 1 : start + 1 + len(logits)]
    if following:
        sequence.prompt_logprobs.extend(_scored(logits[known - start :][: len(following)], following, top, vocab_size))


def add_seconds(batch: Seq[Sequence], outcomes: Seq[Outcome], times: RoundTimes) -> None:
    """The round's whole time, to each of its sequences: what their callers waited."""
    for sequence, outcome in zip(batch, outcomes, strict=True):
        if outcome.prefill:
            sequence.stats.prefill_s += times.whole
        else:
            sequence.stats.decode_s += times.whole


def settle(autos: Seq[AutoDrafter], batch: Seq[Sequence], outcomes: Seq[Outcome], times: RoundTimes) -> None:
    """Tell the controllers, of which there is one at least, what the round cost and brought; the first says what it
    saved each sequence."""
    decoding = [i for i, outcome in enumerate(outcomes) if not outcome.prefill]
    facts = RoundFacts(
        keys=[batch[i].view.key for i in decoding],
        rows=sum(1 + len(outcomes[i].proposal) for i in decoding),
        queries=[1 + len(outcomes[i].proposal) for i in decoding],
        contexts=[outcomes[i].context for i in decoding],
        emitted=[outcomes[i].emitted for i in decoding],
        draft_s=times.draft,
        whole_s=times.whole,
        prefill=len(decoding) < len(batch),
    )
    for i in decoding:
        request, proposal, own = batch[i].request, outcomes[i].proposal, outcomes[i].own_drafts
        if request.draft.draft_length is not None and own and proposal.is_chain:
            for auto in autos:
                auto.saw_fixed(proposal.drafter, request.params.temperature, own, min(outcomes[i].accepted, own))
    saved = [auto.settle(facts) for auto in autos]
    for i, seconds in zip(decoding, saved[0], strict=True):
        batch[i].stats.saved_s += seconds


def write_records(
    write: Callable[[StepRecord], None],
    batch: Seq[Sequence],
    outcomes: Seq[Outcome],
    *,
    round_index: int,
    rows: int,
    time_s: float,
    times: RoundTimes,
) -> None:
    """One StepRecord for each sequence of a round."""
    for sequence, outcome in zip(batch, outcomes, strict=True):
        write(
            StepRecord(
                request=sequence.request.request_id,
                choice=sequence.choice,
                round=round_index,
                time_s=time_s,
                batch=len(batch),
                rows=rows,
                context=outcome.context,
                kind="prefill" if outcome.prefill else "verify" if len(outcome.proposal) else "plain",
                drafter=outcome.proposal.drafter,
                proposed=max(outcome.proposal.depths(), default=0),
                accepted=outcome.accepted,
                emitted=outcome.emitted,
                draft_s=times.draft,
                verify_s=times.verify,
                other_s=times.whole - times.draft - times.verify,
                temperature=sequence.request.params.temperature,
                confidence=outcome.proposal.confidence if outcome.proposal.is_chain else None,
                tree_size=None if outcome.proposal.is_chain else len(outcome.proposal),
                verify=sequence.request.draft.verify,
                lossless=RULES[sequence.request.draft.verify].lossless,
            )
        )

"""What the engine refuses, and what it survives: drafts that lead nowhere, trees larger than the room, bad calls."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
from oracle import plain_decode
from tiny_decoders import tiny_decoder
from toy import Lab, Scripted, ToyModel, following, hashed, request, scripted

from paceline.core.proposal import Proposal
from paceline.decode.draft.base import Needs
from paceline.errors import ContextOverflow, InvalidParameter, UsageError

WIDTH = 24
TARGET = hashed(WIDTH, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_after_which_no_token_is_possible(lab: Lab, temperature: float) -> None:
    """Token 9 is not allowed, and after it nothing would be: a draft of it must not end the request."""
    ask = request(
        [1],
        length=4,
        temperature=temperature,
        seed=2,
        max_tokens=20,
        allowed_token_ids=(2, 3, 4),
        bad_words=((9, 2), (9, 3), (9, 4)),
    )
    plain = plain_decode(TARGET, ask.prompt, ask.params, vocab_size=WIDTH)
    engine = lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [plain.tokens[len(v.tokens) - 1], 9, 2, 3][:b])
    ran = lab.one(engine, ask)
    assert (ran.tokens, ran.reason) == (plain.tokens, "length")
    assert ran.sequence.stats.emitted == len(plain.tokens) - 1 and ran.sequence.error is None


def test_failure_behind_the_end_does_not_reach_back(lab: Lab) -> None:
    """The end lies inside the block; the rows after it are not finite, and nobody asks for them."""
    script = [1, 2, 3, 23, 5, 6]

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = scripted(script, WIDTH)(prefix)
        return np.full_like(row, np.nan) if 23 in prefix else row

    engine = lab.engine(ToyModel(logits, WIDTH), lambda v, b: script[len(v.tokens) - 1 :][:b], eos=[23])
    ran = lab.one(engine, request([0], length=5))
    assert (ran.tokens, ran.reason) == ([1, 2, 3, 23], "stop")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafted_token_whose_numbers_are_not_finite(lab: Lab, temperature: float) -> None:
    """Drafting it spoils the whole block's attention, and rows left in the cache would spoil the next pass."""
    target, bad = copy(tiny_decoder()), 7
    target.embedding = target.embedding.clone()
    target.embedding[bad] = float("nan")
    ask = request([5, 6, 20], length=4, temperature=temperature, seed=1, max_tokens=16, bad_words=((bad,),))
    plain = lab.one(lab.engine(target), request(ask.prompt, draft="none", params=ask.params))
    assert plain.reason == "length" and bad not in plain.tokens
    lab.records.clear()

    def drafts(view: Any, budget: int) -> list[int]:
        said = len(view.tokens) - view.prompt_len
        return [*plain.tokens[said : said + said % 3], bad, 3, 4][:budget]

    beside = request([9, 1], id="beside", length=4, max_tokens=16)
    results = lab.run(lab.engine(target, drafts), [ask, beside])
    assert results["r"][0].tokens == plain.tokens and results["r"][0].reason == "length"
    assert results["beside"][0].reason == "length"
    own = [r for r in lab.records if r.request == "r"]
    failed = [i for i, r in enumerate(own) if r.kind == "verify" and r.emitted == 0]
    assert len(failed) > 2, "drafting goes on after a block that failed"
    assert all(own[i + 1].kind == "plain" and own[i + 1].emitted == 1 for i in failed)
    assert results["r"][0].sequence.stats.draft_rounds == len(failed) + sum(r.emitted > 0 for r in own if r.proposed)


def test_what_a_failed_request_wrote_is_gone(lab: Lab) -> None:
    """The next sequence in its slot reads none of it, and its longer neighbour's keys do not bring it back."""
    target, bad = copy(tiny_decoder()), 7
    target.embedding = target.embedding.clone()
    target.embedding[bad] = float("nan")
    ask = request([5, 6], draft="none", max_tokens=8, bad_words=((bad,),))
    plain = lab.one(lab.engine(target, max_batch=1), ask)
    engine = lab.engine(target, max_batch=1)
    broken = lab.one(engine, request([9] * 30 + [bad] * 5, draft="none"))
    assert (broken.tokens, broken.reason) == ([], "error") and "NaN" in str(broken.sequence.error)
    assert lab.one(engine, ask).tokens == plain.tokens


def test_the_last_token_is_not_drafted(lab: Lab) -> None:
    """Budgets leave room for the target's own token, by the cap and by the context."""
    drafter = Scripted(lambda v, b: [1] * b)
    engine = lab.engine(ToyModel(TARGET, WIDTH), drafter, max_context=30)
    for prompt, cap in ((4, 6), (25, 20)):
        drafter.budgets.clear()
        ran = lab.one(engine, request([2] * prompt, max_tokens=cap))
        said, rooms = 1, []
        for delta in ran.deltas[1:]:
            rooms.append(min(cap, 30 - prompt) - said - 1)
            said += len(delta.token_ids)
        assert drafter.budgets == [room for room in rooms if room > 0]


@pytest.mark.parametrize("context", [512, 40])
def test_a_tree_with_more_nodes_than_the_cache_has_room_for(lab: Lab, context: int) -> None:
    """Depth stays in the budget, nodes do not: what does not fit is left out, the answer is the same."""
    prompt = [i % 7 for i in range(context - 8)]
    ask = request(prompt, length=7, max_tokens=50)
    plain = plain_decode(TARGET, prompt, ask.params, vocab_size=WIDTH, context=context)

    def bush(view: Any, budget: int) -> Proposal:
        """Twelve children at each depth of the true path, the right one first."""
        tokens: list[int] = []
        parents: list[int | None] = []
        at: int | None = None
        said = len(view.tokens) - view.prompt_len
        for token in plain.tokens[said : said + budget]:
            first = len(tokens)
            tokens += [(token + i) % WIDTH for i in range(12)]
            parents += [at] * 12
            at = first
        return Proposal(tuple(tokens), tuple(parents), drafter="scripted")

    engine = lab.engine(ToyModel(TARGET, WIDTH, max_positions=context), bush, max_context=context)
    ran = lab.one(engine, ask)
    assert (ran.tokens, ran.reason) == (plain.tokens, "length")
    assert ran.sequence.stats.accepted >= 3


def test_what_the_engine_refuses(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [1], max_context=30)
    bad: list[tuple[type[Exception], str, Any]] = [
        (UsageError, "prompt is empty", request([])),
        (InvalidParameter, f"id is {WIDTH};.*0 to {WIDTH - 1}", request([1, WIDTH])),
        (InvalidParameter, "id is -3;", request([5, -3])),
        (ContextOverflow, "30 tokens", request([1] * 30)),
        (UsageError, "stop strings need a tokenizer", request([1], stop=("x",))),
        (InvalidParameter, "drafter is 'nobody'.*none, scripted", request([1], draft="nobody")),
        (InvalidParameter, "draft_length is -1", request([1], length=-1)),
        (InvalidParameter, "logit_bias is 99", request([1], logit_bias={99: 1.0})),
        (InvalidParameter, "stop_token_ids is 50", request([1], stop_token_ids=(50,))),
    ]
    for kind, words, ask in bad:
        with pytest.raises(kind, match=words):
            engine.add(ask)
    assert not engine.has_work and engine.step() == []


def test_a_drafter_that_needs_layers_the_model_lacks_is_refused(lab: Lab) -> None:
    for layer in (2, -2, 99):
        drafter = Scripted(lambda v, b: [1], needs=Needs(hidden_layers=(0, layer)))
        with pytest.raises(UsageError, match=f"scripted.*layer {layer}.*0 to 1, or -1"):
            lab.engine(tiny_decoder(), drafter)
    with pytest.raises(UsageError, match=r"scripted needs token text"):
        lab.engine(ToyModel(TARGET, WIDTH), Scripted(lambda v, b: [1], needs=Needs(tokenizer=True)))


def test_a_drafter_that_ignores_its_budget_is_a_bug(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: Proposal.chain([1] * (b + 1), "scripted"))
    with pytest.raises(AssertionError, match=r"drafted 4 of at most 3"):
        lab.one(engine, request([1], length=3))
    lab.engines.clear()


def test_cancelling_what_waits_and_what_is_unknown(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH), following(lambda v: [1], [1], WIDTH), max_batch=1)
    engine.add(request([1], id="runs", max_tokens=4))
    engine.add(request([2], id="waits", max_tokens=4, n=2))
    engine.step()
    engine.cancel("waits")
    engine.cancel("nobody")
    gone = [d for d in engine.step() if d.finish_reason]
    assert [(d.request_id, d.choice, d.finish_reason) for d in gone] == [
        ("waits", 0, "cancelled"),
        ("waits", 1, "cancelled"),
    ]
    while engine.has_work:
        engine.step()


def test_cancelled_text_is_complete(lab: Lab) -> None:
    """What was held back as a possible stop string is handed out with the last words."""
    script = [1, 2, 3, 4, 5]
    pieces = {1: "a", 2: "EN", 3: "D", 4: "x"}
    engine = lab.engine(ToyModel(scripted(script, WIDTH), WIDTH), pieces=pieces)
    (choice,) = engine.add(request([0], draft="none", stop=("END!",)))
    texts = [d.text for _ in range(3) for d in engine.step()]
    assert texts == ["a", "", ""]
    engine.cancel("r")
    (last,) = engine.step()
    assert last.text == "END" and last.finish_reason == "cancelled" and choice.text == "aEND"

"""Replays against their slow twin: a drafter that is really asked at every position of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder
from toy import Lab, ToyModel, request, scripted

from paceline.bench.replay import (
    Text,
    matched_tokens,
    model_of,
    replay,
    replay_by_prefill,
    replay_by_rounds,
    replay_token_by_token,
)
from paceline.core.proposal import Proposal
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import Needs, SequenceView
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.ngram import NgramDrafter
from paceline.decode.verify.noise import Purpose, position_key, request_key
from paceline.errors import UsageError
from paceline.plan.hindsight import fixed_rounds
from paceline.plan.probe_file import Drafts, ReplayedText

VOCAB = 384


def drafter(seed: int) -> ModelDrafter:
    return ModelDrafter(tiny_decoder("llama", seed), name="model:m", max_positions=128, slots=1)


def written(seed: int, temperature: float, flips: tuple[int, ...], ended: bool) -> Text:
    """What the drafter itself would write, with some tokens changed: long runs of agreement, and misses."""
    params = SamplingParams(temperature=temperature, seed=5)
    text = Text((1, 7, 9), (3,), False, params, VOCAB, request_key(5, 0))
    own = drafter(seed)
    for place in range(14):
        longer = Text(text.prompt, (*text.output, 0), True, params, VOCAB, text.noise_key)
        proposed = _asked(own, longer, len(text.output), 1)
        token = (proposed[0] + (place in flips)) % VOCAB
        text = Text(text.prompt, (*text.output, token), ended, params, VOCAB, text.noise_key)
    return text


def _asked(own: ModelDrafter, text: Text, done: int, budget: int) -> tuple[int, ...]:
    """The twin: a fresh sequence, and the drafts that follow `done` tokens of its output."""
    prefix = text.prefix()
    prefix.commit(list(text.output[:done]))
    tokens = [*text.prompt, *text.output[:done]]
    view = SequenceView(1, tokens, len(text.prompt), text.params, text.noise_key, prefix=prefix)
    own.begin(view)
    (proposal,) = own.propose([view], [budget])
    own.end(view)
    return proposal.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("ended", [True, False])
def test_one_prefill_replays_a_draft_model(temperature: float, ended: bool) -> None:
    text = written(1, temperature, (4, 9), ended)
    own = drafter(1)
    drafts = replay_by_prefill(own.model, 128, text, 4)
    assert replay(own, text, 4) == (drafts, 0.0) and model_of(own) is own.model
    assert replay_by_rounds(own, text, 4) == drafts
    for i in range(len(text.output) - 1):
        done = i + 1
        budget = text.budget(done, 4)
        asked = _asked(own, text, done, budget) if budget else ()
        rest = text.output[done:]
        matched = 0
        while matched < min(len(asked), len(rest)) and asked[matched] == rest[matched]:
            matched += 1
        assert drafts.proposed[i] == budget and drafts.matched[i] == matched, f"position {i}"
        assert drafts.confidence is not None and len(drafts.confidence[i]) == min(matched + 1, budget, len(rest))
    assert max(drafts.matched) == 4 and 0 in drafts.matched
    own.check_idle()


def test_the_twin_can_fail() -> None:
    """A key that is off by one position draws other tokens: the comparison above would see it."""
    key = request_key(5, 0)
    assert position_key(key, 4, Purpose.TARGET) != position_key(key, 5, Purpose.TARGET)
    shifted = written(1, 0.9, (), True)
    moved = Text(shifted.prompt, shifted.output, True, shifted.params, VOCAB, shifted.noise_key + 1)
    assert replay(drafter(1), moved, 4) != replay(drafter(1), shifted, 4)


def test_what_a_draft_cannot_read_it_does_not_draft() -> None:
    text = Text((1, 2), (VOCAB + 5, 3, 4), True, SamplingParams(), VOCAB + 10)
    assert replay_by_prefill(drafter(0).model, 128, text, 4) == Drafts((0, 0), (0, 0))


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(tokens, tokens, st.booleans(), st.integers(1, 5))
@settings(deadline=None)
def test_matchers_are_replayed_as_they_would_draft(
    prompt: list[int], output: list[int], ended: bool, longest: int
) -> None:
    text = Text(tuple(prompt), tuple(output), ended, SamplingParams(), 10)
    drafts, seconds = replay_token_by_token(NgramDrafter(), text, longest)
    assert len(drafts.proposed) == len(output) - 1 and seconds >= 0
    for i in range(len(output) - 1):
        fresh = NgramDrafter()
        view = SequenceView(0, [*prompt, *output[: i + 1]], len(prompt), SamplingParams())
        fresh.begin(view)
        (proposal,) = fresh.propose([view], [text.budget(i + 1, longest)])
        assert drafts.proposed[i] == len(proposal)
        assert drafts.matched[i] == matched_tokens(proposal, output[i + 1 :])


def test_the_best_path_of_a_tree_counts() -> None:
    tree = Proposal((5, 6, 7, 8, 9), (None, None, 1, 1, 3), drafter="t")
    assert [matched_tokens(tree, rest) for rest in ([6, 8, 9, 1], [6, 7], [5, 6], [1], [])] == [3, 2, 1, 0, 0]


def test_hidden_states_cannot_be_replayed() -> None:
    needy = NgramDrafter()
    needy.needs = Needs(hidden_layers=(-1,))  # type: ignore[misc]
    with pytest.raises(UsageError, match="hidden states"):
        replay(needy, Text((1,), (2, 3), True, SamplingParams(), 10), 4)


def test_rounds_of_a_replay_are_the_engines_rounds() -> None:
    """An n-gram drafter at D = 3 in a real engine takes the rounds that the replay says."""
    script = [5, 6, 7, 5, 6, 7, 5, 6, 7, 9, 5, 6, 7, 8, 2]
    lab = Lab()
    engine = lab.engine(ToyModel(scripted(script, 12), 12), {"ngram": NgramDrafter()}, eos={2})
    ran = lab.one(engine, request([1], draft="ngram", length=3))
    text = Text((1,), tuple(script), True, SamplingParams(), 12)
    drafts, _ = replay_token_by_token(NgramDrafter(), text, 16)
    told = ReplayedText("t", "1", 0.0, 1, len(script), True, False, {"ngram": drafts})
    rounds = fixed_rounds(told, "ngram", 3)
    decoded = [r for r in lab.records if r.kind != "prefill"]
    assert ran.tokens == script
    assert [(r.drafted, r.accepted) for r in rounds] == [(r.proposed, r.accepted) for r in decoded]
    assert any(r.accepted for r in rounds)
    lab.close()

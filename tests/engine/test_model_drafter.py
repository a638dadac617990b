"""The draft-model drafter: its contract, its lazy cache, its context, and the target as its own draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_toys import Loop, table_target
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import plain_decode
from tiny_decoders import tiny_decoder
from toy import Lab, ToyModel, hashed, request

from paceline.core.proposal import Dense, OneHot, Proposal
from paceline.decode.draft.base import Drafter, SequenceView
from paceline.decode.draft.draws import draft_key
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.verify.noise import Purpose, exponential_noise, position_key
from paceline.decode.verify.prefix import PrefixState

VOCAB = 384


class ModelLoop(Loop):
    """The loop of the contract, with the prefix state that drafters which draw need."""

    def begin(self, key: int, prompt: list[int], tenant: str = "") -> SequenceView:
        view = super().begin(key, prompt, tenant)
        view.prefix = PrefixState(prompt, view.params, VOCAB, frozenset())
        return view

    def round(self, keys: list[int], budget: int, asked: bool = True) -> list[Proposal]:
        before = {key: len(self.views[key].tokens) for key in keys}
        proposals = super().round(keys, budget, asked)
        for key in keys:
            self.views[key].prefix.commit(self.views[key].tokens[before[key] :])
            self.check_cache(key)
        return proposals

    def check_cache(self, key: int) -> None:
        state = self.drafter._states[key]  # type: ignore[attr-defined]
        assert self.drafter.cache.committed(state.slot) == len(state.written)  # type: ignore[attr-defined]


def drafter(seed: int = 0, *, max_positions: int = 128, slots: int = 4, **more: Any) -> ModelDrafter:
    return ModelDrafter(tiny_decoder("llama", seed), name="model", max_positions=max_positions, slots=slots, **more)


def own_words(prefix: list[int], seed: int = 0) -> int:
    """What the draft model itself says greedily: by a fresh drafter, without history."""
    fresh = drafter(seed)
    loop = ModelLoop(fresh, lambda text: 0)
    view = loop.begin(0, prefix)
    return fresh.propose([view], [1])[0].tokens[0]


def test_is_a_drafter() -> None:
    made = drafter()
    assert isinstance(made, Drafter) and made.needs.own_kv and not made.needs.hidden_layers
    view = ModelLoop(made, lambda text: 0).begin(7, [1, 2])
    with pytest.raises(AssertionError, match="7"):
        made.check_idle()
    made.end(view)
    made.check_idle()


events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=14)


@settings(max_examples=12, deadline=None)
@given(
    table=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=9),
    texts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=4, max_size=4),
    what=events,
)
def test_any_interleaving_of_sequences(
    table: list[int], texts: list[list[int]], what: list[tuple[int, int, int]]
) -> None:
    """The contract of every drafter; and each first draft is what a drafter without history says."""
    made = drafter(prefill_chunk=5)
    loop = ModelLoop(made, table_target(table))
    for kind, key, budget in what:
        if kind == 0 and key in loop.views:
            loop.end(key)
        elif kind == 0:
            loop.begin(key, texts[key])
        elif loop.views:
            keys = sorted(loop.views)[key % len(loop.views) :]
            before = [list(loop.views[k].tokens) for k in keys]
            for text, proposal in zip(before, loop.round(keys, budget, asked=kind == 1), strict=True):
                assert len(proposal) == (budget if kind == 1 else 0)
                assert not proposal.tokens or proposal.tokens[0] == own_words(text)
    for key in sorted(loop.views):
        loop.end(key)
    made.check_idle()


@pytest.mark.parametrize("index", range(6))
def test_rejection_at_every_index(index: int) -> None:
    """The target follows the draft, parts from it at `index`, then follows again: the cache keeps what held."""
    loop = ModelLoop(drafter(), own_words)
    view = loop.begin(0, [11, 12, 13])
    (proposal,) = loop.round([0], 3)
    assert loop.accepted == 3
    parting = len(view.tokens) + index
    loop.target = lambda text: (own_words(text) + 1) % VOCAB if len(text) == parting else own_words(text)
    (proposal,) = loop.round([0], 6)
    assert len(view.tokens) == parting + 1 and len(proposal) == 6
    state = loop.drafter._states[0]  # type: ignore[attr-defined]
    accepted = loop.accepted
    (proposal,) = loop.round([0], 4)
    assert loop.accepted == accepted + 4 and state.written[: parting + 1] == view.tokens[: parting + 1]
    loop.end(0)
    loop.drafter.check_idle()


def test_lazy_catch_up_is_one_pass_over_what_it_missed() -> None:
    made = drafter(prefill_chunk=16)
    passes: list[int] = []
    run = made._pass
    made._pass = lambda entries: passes.append(sum(len(t) for _, t in entries)) or run(entries)  # type: ignore[method-assign, func-returns-value]
    loop = ModelLoop(made, table_target([3, 9, 27, 81, 243]))
    view = loop.begin(0, list(range(1, 11)))
    for _ in range(9):
        loop.round([0], 4, asked=False)
    assert passes == [] and len(view.tokens) == 19
    made.propose([view], [1])
    assert passes == [16, 3], "19 tokens in chunks of 16"
    passes.clear()
    made.propose([view], [3])
    assert passes == [1, 1, 1], "the second time only the last token is run again"
    loop.end(0)


def test_silent_past_its_own_context_alone() -> None:
    loop = ModelLoop(drafter(max_positions=20), own_words)
    loop.begin(0, [1] * 14)
    loop.begin(1, [2] * 4)
    lengths = [[len(p) for p in loop.round([0, 1], 4)] for _ in range(3)]
    assert lengths == [[4, 4], [1, 4], [0, 4]]
    for key in (0, 1):
        loop.end(key)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_the_target_as_its_own_draft_accepts_everything(lab: Lab, temperature: float) -> None:
    target = tiny_decoder("llama", 1)
    made = ModelDrafter(target, name="self", max_positions=128, slots=8)
    asks = [
        request([i + 1, 2, 3], id=str(i), draft="self", length=1 + i, temperature=temperature, seed=i, max_tokens=18)
        for i in range(4)
    ]
    results = lab.run(lab.engine(target, {"self": made}), asks, [0, 0, 2, 3])
    for r in asks:
        (ran,) = results[r.request_id]
        plain = lab.one(lab.engine(target), request(r.prompt, draft="none", params=r.params))
        assert ran.tokens == plain.tokens
        assert ran.sequence.stats.accepted >= ran.sequence.stats.drafted - 1 > 5  # the cap may cut the last


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mixed_batch_with_another_model(lab: Lab, temperature: float) -> None:
    """Different options, lengths and arrivals; short draft context; a draft with fewer and with more ids."""
    target = tiny_decoder("llama", 1)
    drafters = {
        "near": ModelDrafter(target, name="near", max_positions=24, slots=8),
        "small": ModelDrafter(tiny_decoder("llama", 1, vocabulary=352), name="small", max_positions=128, slots=8),
        "large": ModelDrafter(tiny_decoder("qwen2", 2, vocabulary=416), name="large", max_positions=128, slots=8),
    }
    options: list[dict[str, Any]] = [{}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"min_tokens": 6}, {"n": 2}]
    asks = [
        request(
            [(11 * i + j) % 350 for j in range(2 + 3 * i)],
            id=str(i),
            draft=["near", "small", "large"][i % 3],
            length=3 + i % 3,
            temperature=temperature,
            seed=i,
            max_tokens=20,
            **more,
        )
        for i, more in enumerate(options)
    ]
    engine = lab.engine(target, drafters, eos=[2], max_batch=6)
    results = lab.run(engine, asks, [0, 2, 0, 3, 1])
    for r in asks:
        plain = lab.run(lab.engine(target, eos=[2]), [request(r.prompt, draft="none", params=r.params)])["r"]
        assert [ran.tokens for ran in results[r.request_id]] == [ran.tokens for ran in plain]
    for made in drafters.values():
        made.check_idle()
    assert sum(r.proposed for r in lab.records if r.drafter == "small") > 0


def sampling_view(key: int, rule: str, tokens: list[int] | None = None) -> SequenceView:
    params = request([4], temperature=0.9, top_k=7).params
    view = SequenceView(key, tokens or [4, 5, 6], 3, params, noise_key=99, verify=rule)
    view.prefix = PrefixState([4, 5, 6], params, VOCAB, frozenset())
    return view


def test_greedy_drafts_are_certain() -> None:
    made = drafter()
    loop = ModelLoop(made, lambda text: 0)
    (greedy,) = made.propose([loop.begin(0, [4, 5, 6])], [3])
    assert greedy.distribution == OneHot() and greedy.confidence is not None
    assert all(0 < c <= 1 for c in greedy.confidence)
    loop.end(0)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_proposals_carry_what_they_were_drawn_from(rule: str) -> None:
    """Each draft is the draw from its own row by noise for drafts alone, new in every round."""
    made, view = drafter(), sampling_view(1, rule)
    made.begin(view)
    (proposal,) = made.propose([view], [3])
    assert isinstance(proposal.distribution, Dense)
    probs = proposal.distribution.probs
    assert probs.shape == (3, VOCAB) and ((probs > 0).sum(1) == 7).all()
    for i, token in enumerate(proposal.tokens):
        key = torch.tensor([position_key(99, 3 + i, Purpose.DRAFT, 3)])
        assert int((exponential_noise(key, torch.arange(VOCAB))[0] / probs[i]).argmin()) == token
    made.end(view)


def test_under_coupled_drafts_share_the_targets_noise_and_carry_nothing() -> None:
    made, view = drafter(), sampling_view(1, "coupled")
    made.begin(view)
    (proposal,) = made.propose([view], [3])
    assert proposal.distribution == OneHot()
    own = sampling_view(2, "rejection")
    assert draft_key(view, 3) == position_key(99, 3, Purpose.TARGET) != draft_key(own, 3)
    later = sampling_view(3, "rejection", [4, 5, 6, 7])
    assert draft_key(later, 4) != draft_key(own, 4), "noise of another round"
    made.end(view)


def test_drafting_ends_behind_end_of_text(lab: Lab) -> None:
    width, eos = 20, 19
    logits = hashed(width, seed=3)

    def ends(prefix: tuple[int, ...]) -> Any:
        row = logits(prefix).copy()
        row[eos] = 50.0 if len(prefix) == 5 else -50.0
        return row

    made = ModelDrafter(ToyModel(ends, width), name="d", max_positions=99, slots=8, stop_ids=frozenset({eos}))
    for ignore in (False, True):
        ask = request([1], id=str(ignore), draft="d", length=8, max_tokens=12, ignore_eos=ignore)
        lab.records.clear()
        ran = lab.one(lab.engine(ToyModel(ends, width), {"d": made}, eos=[eos]), ask)
        assert ran.tokens == plain_decode(ends, [1], ask.params, vocab_size=width, eos=[eos]).tokens
        assert lab.records[1].proposed == (8 if ignore else 4)

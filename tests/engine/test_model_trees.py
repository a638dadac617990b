"""Trees of a draft model: the best nodes there are, a cache that keeps the path taken, the text of plain decoding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drafter_toys import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_decoders import tiny_decoder
from toy import Lab, ToyModel, hashed, request

from paceline.core.proposal import Dense, Proposal
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.verify.chances import RoundNoise
from paceline.decode.verify.noise import request_key
from paceline.decode.verify.prefix import PrefixState
from paceline.decode.verify.rejection import verify_rejection
from paceline.decode.verify.rules import row_paths
from paceline.errors import InvalidParameter

WIDTH = 7
LOGITS = hashed(WIDTH, seed=11, scale=1.5)


def drafter(**more: Any) -> ModelDrafter:
    model = ToyModel(LOGITS, WIDTH)
    return ModelDrafter(model, name="model", **{"max_positions": 200, "slots": 4, **more})


def view_of(
    tokens: list[int], tree_size: int | None, key: int = 0, noise_key: int = 5, **options: Any
) -> SequenceView:
    params = SamplingParams(**options)
    view = SequenceView(key, list(tokens), len(tokens), params, noise_key=noise_key, tree_size=tree_size)
    view.prefix = PrefixState(tokens, params, WIDTH, frozenset())
    return view


def fresh(view: SequenceView, depth: int, tree_size: int | None) -> Proposal:
    """What a drafter without history proposes."""
    other = SequenceView(0, list(view.tokens), view.prompt_len, view.params, noise_key=view.noise_key)
    other.prefix, other.tree_size = view.prefix, tree_size
    made = drafter()
    made.begin(other)
    return made.propose([other], [depth])[0]


def path_of(proposal: Proposal, node: int) -> tuple[int, ...]:
    return tuple(proposal.tokens[at] for at in proposal.path_to(node))


@given(
    st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=9), st.integers(1, 3), st.integers(0, 9)
)
@settings(max_examples=40, deadline=None)
def test_the_most_probable_paths_of_all(tokens: list[int], depth: int, more: int) -> None:
    """Against every path of the draft, by the product of its probabilities."""
    size = depth + more
    proposal = fresh(view_of(tokens, size), depth, size)
    every: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, depth + 1):
        for path in itertools.product(range(WIDTH), repeat=length):
            row = LOGITS((*tokens, *path[:-1])).astype(float)
            every[path] = every[path[:-1]] * float(np.exp(row[path[-1]]) / np.exp(row).sum())
    del every[()]
    assert proposal.confidence is not None
    survival: list[float] = []
    for node, parent in enumerate(proposal.parents):
        survival.append(proposal.confidence[node] * (1.0 if parent is None else survival[parent]))
        assert survival[-1] == pytest.approx(every[path_of(proposal, node)], rel=1e-4)
    assert survival == pytest.approx(sorted(every.values(), reverse=True)[:size], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 3}, {"min_tokens": 4}])
def test_the_first_siblings_are_the_chain(options: dict[str, Any]) -> None:
    """Node for node as far as the tree has them; and the tree has all of them where it has room for every node."""
    whole = 0
    for seed in range(12):
        view = view_of([seed % WIDTH, 3], 40, noise_key=seed, **options)
        chain, tree = fresh(view, 2, None), fresh(view, 2, 40)
        paths = [path_of(tree, node) for node in range(len(tree))]
        assert len(set(paths)) == len(paths)
        for length in (1, 2):
            if chain.tokens[:length] in paths:
                siblings = [path for path in paths if path[:-1] == chain.tokens[: length - 1]]
                assert siblings[0] == chain.tokens[:length]
                whole += length == 2
    assert whole == 12


class TreeLoop(Loop):
    """The loop of the contract with prefix states; each proposal is what a drafter without history says."""

    def begin(self, key: int, prompt: list[int], tenant: str = "") -> SequenceView:
        view = view_of(prompt, self.tree_size, key)
        self.views[key] = view
        self.drafter.begin(view)
        return view

    def round(self, keys: list[int], budget: int, asked: bool = True) -> list[Proposal]:
        if asked and budget:
            wanted = [fresh(self.views[key], budget, self.tree_size) for key in keys]
        before = {key: len(self.views[key].tokens) for key in keys}
        proposals = super().round(keys, budget, asked)
        if asked and budget:
            assert proposals == wanted, "the cache of the draft does not hold what was committed"
        for key in keys:
            self.views[key].prefix.commit(self.views[key].tokens[before[key] :])
        return proposals


def second_best(text: list[int]) -> int:
    """A target that says the draft's favourite after even texts and its runner-up after odd ones."""
    order = np.argsort(-LOGITS(tuple(text)))
    return int(order[len(text) % 2])


events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4)), max_size=12)


@settings(max_examples=25, deadline=None)
@given(what=events, size=st.integers(1, 9), texts=st.lists(st.integers(0, 6), min_size=3, max_size=12))
def test_any_interleaving_of_sequences(what: list[tuple[int, int, int]], size: int, texts: list[int]) -> None:
    """Rounds asked and not asked, sequences that come and go; the toy model checks every row that is looked at."""
    made = drafter(prefill_chunk=4)
    loop = TreeLoop(made, second_best, tree_size=size)
    for kind, key, budget in what:
        if kind == 0 and key in loop.views:
            loop.end(key)
        elif kind == 0:
            loop.begin(key, texts[key:])
        elif loop.views:
            loop.round(sorted(loop.views), budget, asked=kind == 1)
            for view in loop.views.values():
                state = made._states[view.key]
                assert made.cache.committed(state.slot) == len(state.written)
    for key in sorted(loop.views):
        loop.end(key)
    made.check_idle()


def test_the_accepted_path_is_not_run_again() -> None:
    """Runner-ups are accepted off the trunk; the next round runs only the target's own token and new levels."""
    made = drafter()
    rows: list[int] = []
    forward = made.model.forward
    made.model.forward = lambda step, *rest: rows.append(step.tokens) or forward(step, *rest)  # type: ignore[method-assign, func-returns-value]
    loop = TreeLoop(made, second_best, tree_size=12)
    loop.begin(0, [1, 2, 3])
    view = loop.views[0]
    taken = 0
    for _ in range(8):
        (proposal,) = made.propose([view], [3])
        text = list(view.tokens)
        paths = [path_of(proposal, node) for node in range(len(proposal))]
        new: tuple[int, ...] = ()
        while (longer := (*new, second_best([*text, *new]))) in paths:
            new = longer
        view.tokens += [*new, second_best([*text, *new])]
        view.prefix.commit(view.tokens[len(text) :])
        made.observe([view], [None])
        rows.clear()
        made.propose([view], [1])
        # leaves of the last level were never run; anything else that was accepted lies in the cache
        assert rows == [1 + (len(new) == 3)]
        taken += len(new) >= 2
    assert taken >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_text_is_that_of_plain_decoding(lab: Lab, temperature: float, dtype: torch.dtype) -> None:
    """The target as its own draft, another model, chains and options in one batch; log-probabilities bit for bit."""
    target = tiny_decoder("llama", 1, dtype=dtype)
    drafters = {
        "self": ModelDrafter(target, name="self", max_positions=128, slots=8),
        "other": ModelDrafter(tiny_decoder("qwen2", 2, vocabulary=416), name="other", max_positions=40, slots=8),
    }
    more: list[dict[str, Any]] = [{}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"min_tokens": 6}, {"n": 2}, {}]
    asks = [
        request(
            [(11 * i + j) % 350 for j in range(2 + 3 * i)],
            id=str(i),
            draft=["self", "other"][i % 2],
            length=3,
            tree=None if i == 4 else 3 + 2 * i,
            temperature=temperature,
            seed=i,
            max_tokens=24,
            logprobs=2,
            **options,
        )
        for i, options in enumerate(more)
    ]
    results = lab.run(lab.engine(target, drafters, eos=[2], max_batch=7), asks, [0, 2, 0, 3, 1, 9])
    for r in asks:
        plain = lab.run(lab.engine(target, eos=[2]), [request(r.prompt, draft="none", params=r.params)])["r"]
        got = results[r.request_id]
        assert [(x.tokens, x.logprobs) for x in got] == [(x.tokens, x.logprobs) for x in plain]
        if r.draft.drafter == "self" and r.draft.tree_size:
            counts = got[0].sequence.stats
            assert counts.accepted >= counts.draft_rounds - 1, "the first sibling is the target's own token"
    for made in drafters.values():
        made.check_idle()


def test_nothing_grows_behind_the_end_of_text() -> None:
    made = drafter(stop_ids=frozenset({0, 1, 2}))
    view = view_of([1, 2], 12)
    made.begin(view)
    (proposal,) = made.propose([view], [3])
    assert {proposal.tokens[p] for p in proposal.parents if p is not None} <= set(range(3, WIDTH))
    assert {0, 1, 2} & set(proposal.tokens)


def test_trees_of_a_model_are_refused_where_they_have_no_proof(lab: Lab) -> None:
    engine = lab.engine(ToyModel(LOGITS, WIDTH), {"model": drafter()})
    with pytest.raises(InvalidParameter, match="at least draft_length"):
        engine.add(request([1], draft="model", length=5, tree=4))


class ByIdentity(ModelDrafter):
    """The fault: a drawn sibling that the draft finds unlikely is left out, having been seen."""

    def propose(self, views: Any, budgets: Any) -> list[Proposal]:
        return [drop_unlikely(proposal) for proposal in super().propose(views, budgets)]


def drop_unlikely(proposal: Proposal) -> Proposal:
    assert isinstance(proposal.distribution, Dense)
    probs = proposal.distribution.probs
    kept: list[int] = []
    for node, parent in enumerate(proposal.parents):
        if probs[node, proposal.tokens[node]] > 0.25 and (parent is None or parent in kept):
            kept.append(node)
    parents = [proposal.parents[node] for node in kept]
    return Proposal(
        tuple(proposal.tokens[node] for node in kept),
        tuple(None if parent is None else kept.index(parent) for parent in parents),
        Dense(probs[kept]),
        proposal.drafter,
    )


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])
def test_drawn_trees_under_rejection_have_the_targets_law(fault: bool) -> None:
    """Of 800 rounds the first two tokens against the product of target probabilities; alarms falsely in 1e-6."""
    width, prompt, trials = 4, [1], 800
    target, draft = hashed(width, seed=3, scale=1.0), hashed(width, seed=4, scale=1.0)

    def probs(text: tuple[int, ...]) -> np.ndarray:
        row = np.exp(target((*prompt, *text)).astype(float))
        return np.asarray(row / row.sum())

    kind = ByIdentity if fault else ModelDrafter
    made = kind(ToyModel(draft, width), name="model", max_positions=50, slots=50)
    generator, counts, accepted = np.random.default_rng(0), np.zeros((width, width)), 0
    for first in range(0, trials, 50):
        views = [view_of(prompt, 5, key, request_key(first + key, 0), temperature=1.0) for key in range(50)]
        for view in views:
            view.verify, view.prefix = "rejection", PrefixState(prompt, view.params, width, frozenset())
            made.begin(view)
        for view, proposal in zip(views, made.propose(views, [2] * 50), strict=True):
            rows = [torch.from_numpy(probs(tuple(path))) for path in row_paths(proposal)]
            verdict = verify_rejection(proposal, rows, RoundNoise(view.noise_key, len(prompt)))
            text = verdict.tokens(proposal)
            accepted += len(verdict.path)
            second = text[1] if len(text) > 1 else generator.choice(width, p=probs((text[0],)))
            counts[text[0], second] += 1
            made.end(view)
    law = np.array([[probs(())[i] * probs((i,))[j] for j in range(width)] for i in range(width)])
    pvalue = stats.chisquare(counts.ravel(), law.ravel() * trials).pvalue
    assert (pvalue < 1e-6) == fault, (pvalue, counts)
    assert fault or accepted > trials / 2


def test_the_shape_of_a_drawn_tree_is_settled_before_it_is_drawn() -> None:
    """Whatever is drawn, whenever there are enough tokens to draw; each row is what the node was drawn from."""
    shapes = set()
    for noise_key in range(10):
        view = view_of([1, 2], 9, noise_key=noise_key, temperature=1.0)
        view.verify = "rejection"
        made = drafter()
        made.begin(view)
        (proposal,) = made.propose([view], [3])
        shapes.add((proposal.parents, proposal.confidence))
        assert isinstance(proposal.distribution, Dense) and len(proposal) == 9
        for node in range(9):
            path = path_of(proposal, node)[:-1]
            row = np.exp(LOGITS((1, 2, *path)).astype(float))
            np.testing.assert_allclose(proposal.distribution.probs[node].numpy(), row / row.sum(), rtol=1e-5)
    assert len(shapes) == 1

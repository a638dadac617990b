"""`rejection`, `block` and `relaxed`, enumerated: the very code that runs, over fractions, with every answer of chance.

A round is: a drafter draws, the rule judges, tokens are emitted. Its law, continued by the target, must be the
target's. Each statement is seen to fail with a fault in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from enumeration import Law, Models, Tape, explore, extend
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules import chain_round, shared_law

import paceline.decode.verify.block as block_module
import paceline.decode.verify.rejection as rejection_module
from paceline.core.proposal import Dense, OneHot, Proposal, Sparse, Verdict
from paceline.decode.verify.block import verify_block
from paceline.decode.verify.leniency import TopWithin
from paceline.decode.verify.rejection import verify_rejection
from paceline.decode.verify.relaxed import verify_relaxed
from paceline.decode.verify.rules import row_paths

Rule = Callable[[Proposal, Sequence[Any], Any], Verdict]
RULES = pytest.mark.parametrize("rule", [verify_rejection, verify_block], ids=["rejection", "block"])
FORMS = ["dense", "sparse"]


def vector(row: Sequence[Fraction]) -> np.ndarray:
    return np.array(row, dtype=object)


def rows_of(models: Models, proposal: Proposal, text: tuple[int, ...] = ()) -> list[np.ndarray]:
    return [vector(models.row("target", (*text, *path))) for path in row_paths(proposal)]


def reported(rows: list[np.ndarray], form: str) -> Dense | Sparse:
    """The drafts' distributions in one of the two forms; a sparse row lists the ids backwards."""
    if not rows:
        return Dense(np.zeros((0, 1), dtype=object))
    if form == "dense":
        return Dense(np.stack(rows))
    ids = np.stack([np.arange(len(row))[::-1] for row in rows])
    return Sparse(ids, np.stack([row[::-1] for row in rows]))


def sampled_chain(
    models: Models,
    tape: Tape,
    length: int,
    form: str = "dense",
    text: tuple[int, ...] = (),
    stops: Callable[[tuple[int, ...]], bool] = lambda drafts: False,
) -> Proposal:
    """A chain drawn by the drafter, which stops behind drafts that `stops` names."""
    drafts: tuple[int, ...] = ()
    rows: list[np.ndarray] = []
    while len(drafts) < length and not stops(drafts):
        rows.append(vector(models.row("drafter", (*text, *drafts))))
        drafts = (*drafts, tape.draw(len(drafts), rows[-1]))
    return Proposal.chain(drafts, "enumerated", reported(rows, form))


def is_lossless(models: Models, law: Law, length: int) -> bool:
    return extend(models, law, length) == models.target_law(length)


def another_distribution(proposal: Proposal) -> Proposal:
    """Fault (SD-08): what is reported is not what was drawn from."""
    assert isinstance(proposal.distribution, Dense)
    flat = np.full_like(proposal.distribution.probs, Fraction(1, 3))
    return Proposal(proposal.tokens, proposal.parents, Dense(flat), proposal.drafter)


@RULES
@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_round_of_a_chain_is_lossless(rule: Rule, length: int, seed: int, form: str) -> None:
    models = Models(vocab=3 if length < 3 else 2, seed=seed)

    def round_of(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_chain(models, tape, length, form)
        return tuple(rule(proposal, rows_of(models, proposal), tape).tokens(proposal))

    assert is_lossless(models, explore(round_of), 1 + length)


FAULTS: dict[str, tuple[Rule, Any, str, Any]] = {
    "SD-09 rejection draws from p again": (verify_rejection, rejection_module, "positive_part", lambda row: row * 0),
    "SD-09 rejection draws from |p - q|": (verify_rejection, rejection_module, "positive_part", abs),
    "SD-09 block draws from p again": (verify_block, block_module, "positive_part", lambda row: row * 0),
    "SD-09 block draws from |w p - q|": (verify_block, block_module, "positive_part", abs),
    "block accepts with w alone": (verify_block, block_module, "chance_of_prefix", lambda rest, weight: weight),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_a_rule_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rule, module, attribute, wrong = FAULTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    models = Models(vocab=3, seed=2)

    def round_of(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_chain(models, tape, 2)
        return tuple(rule(proposal, rows_of(models, proposal), tape).tokens(proposal))

    assert not is_lossless(models, explore(round_of), 3)


@RULES
def test_sd_08_another_distribution_than_the_one_drawn_from_shows(rule: Rule) -> None:
    models = Models(vocab=3, seed=2)

    def round_of(tape: Tape) -> tuple[int, ...]:
        proposal = another_distribution(sampled_chain(models, tape, 2))
        return tuple(rule(proposal, rows_of(models, proposal), tape).tokens(proposal))

    assert not is_lossless(models, explore(round_of), 3)


@RULES
@pytest.mark.parametrize("seed", [4, 5])
def test_several_rounds_are_lossless(rule: Rule, seed: int) -> None:
    """Rounds of D = 2 until four tokens are out; a number of chance is used once (round start in the key)."""
    models = Models(vocab=2, seed=seed)

    def decode(tape: Tape) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        while len(text) < 4:
            proposal = sampled_chain(models, tape, 2, text=text)
            text += tuple(rule(proposal, rows_of(models, proposal, text), tape).tokens(proposal))
        return text[:4]

    assert explore(decode) == models.target_law(4)


# What a length may depend on --------------------------------------------------------------------------------


@RULES
@pytest.mark.parametrize("stop", [0, 1])
def test_a_drafter_may_stop_behind_any_token(rule: Rule, stop: int) -> None:
    """As `ModelDrafter` does behind end-of-text."""
    models = Models(vocab=2, seed=6)

    def round_of(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_chain(models, tape, 3, stops=lambda drafts: drafts[-1:] == (stop,))
        return tuple(rule(proposal, rows_of(models, proposal), tape).tokens(proposal))

    assert is_lossless(models, explore(round_of), 4)


@RULES
@pytest.mark.parametrize("stop", [0, 1])
def test_nobody_may_cut_what_has_been_seen(rule: Rule, stop: int) -> None:
    """The fault of cutting a draft because of its own value."""
    models = Models(vocab=2, seed=6)

    def round_of(tape: Tape) -> tuple[int, ...]:
        whole = sampled_chain(models, tape, 3)
        assert isinstance(whole.distribution, Dense)
        length = whole.tokens.index(stop) if stop in whole.tokens else 3
        proposal = Proposal.chain(whole.tokens[:length], "cut", Dense(whole.distribution.probs[:length]))
        return tuple(rule(proposal, rows_of(models, proposal), tape).tokens(proposal))

    assert not is_lossless(models, explore(round_of), 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=3), st.integers(0, 10**6), st.booleans())
def test_any_certain_chain_is_lossless(tokens: list[int], seed: int, block: bool) -> None:
    models = Models(vocab=3, seed=seed)
    proposal = Proposal.chain(tokens, "given", OneHot())
    rows, rule = rows_of(models, proposal), verify_block if block else verify_rejection
    law = explore(lambda tape: tuple(rule(proposal, rows, tape).tokens(proposal)))
    assert is_lossless(models, law, 1 + len(tokens))


@RULES
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_text_that_cannot_go_on_ends_where_plain_decoding_ends(rule: Rule, seed: int) -> None:
    """Behind some prefixes nothing can follow. Such a text stays as it is; plain decoding comes to it as often."""
    models = Models(vocab=3, seed=seed)
    dead = {(0,), (1, 2), (2, 0), (2, 2)}

    def target(text: tuple[int, ...]) -> np.ndarray | None:
        return None if text in dead else vector(models.row("target", text))

    def plain(tape: Tape) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        while len(text) < 3 and (row := target(text)) is not None:
            text = (*text, tape.draw(0, row))
        return text

    def drafted(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_chain(models, tape, 2)
        rows = [target(tuple(path)) for path in row_paths(proposal)]
        text = tuple(rule(proposal, rows, tape).tokens(proposal))
        while len(text) < 3 and (row := target(text)) is not None:
            text = (*text, tape.draw(0, row))
        return text

    assert explore(drafted) == explore(plain)


# Trees ------------------------------------------------------------------------------------------------------

SHAPES = [
    (None, None),
    (None, None, None),
    (None, None, 0, 0),
    (None, None, 1, 0, 1),
    (None, 0, None, 1),
]


def sampled_tree(
    models: Models, tape: Tape, parents: Sequence[int | None], masked: bool, replace: bool = False
) -> Proposal:
    """Siblings drawn without replacement, in order; rows reported with earlier siblings taken out, or not."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        path = () if parent is None else paths[parent]
        row = vector(models.row("drafter", path))
        siblings = [tokens[n] for n in range(node) if parents[n] == parent]
        left = row.copy()
        if not replace:
            left[siblings] = 0
        if left.sum() == 0:  # all that q allows are there already: the last one once more
            tokens.append(siblings[-1])
        else:
            left = left / left.sum()
            tokens.append(tape.draw(len(path), left))
        rows.append(left if masked and left.sum() > 0 else row)
        paths.append((*path, tokens[-1]))
    return Proposal(tuple(tokens), tuple(parents), Dense(np.stack(rows)), "enumerated")


def tree_law(models: Models, parents: Sequence[int | None], **how: bool) -> Law:
    def round_of(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_tree(models, tape, parents, **how)
        return tuple(verify_rejection(proposal, rows_of(models, proposal), tape).tokens(proposal))

    return explore(round_of)


@pytest.mark.parametrize("parents", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_round_of_a_sampled_tree_is_lossless(parents: Sequence[int | None], masked: bool) -> None:
    models = Models(vocab=3, seed=1)
    depth = max(Proposal((0,) * len(parents), tuple(parents)).depths())
    assert is_lossless(models, tree_law(models, parents, masked=masked), 1 + depth)


def test_siblings_drawn_with_replacement_are_lossless_too() -> None:
    """A repeated one is passed over, and one that is new was drawn from the q that is left."""
    models = Models(vocab=3, seed=3)
    assert is_lossless(models, tree_law(models, (None, None, 0, 0), masked=False, replace=True), 3)


class Stubborn(np.ndarray):
    """A row that nothing is taken out of."""

    def __setitem__(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("fault", ["siblings stay in q", "p is not lowered"])
def test_sd_09_a_wrong_residual_among_siblings_shows(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "siblings stay in q":
        row_of = rejection_module.draft_row
        monkeypatch.setattr(rejection_module, "draft_row", lambda *of: row_of(*of).view(Stubborn))
    else:
        monkeypatch.setattr(rejection_module, "positive_part", lambda row: row * 0)
    models = Models(vocab=4, seed=4)
    assert not is_lossless(models, tree_law(models, (None, None, None), masked=False), 1)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 10**6))
def test_any_certain_tree_is_lossless(data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(0, 5))
    tokens = tuple(data.draw(st.integers(0, 2)) for _ in range(size))
    parents = tuple(data.draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(size))
    proposal = Proposal(tokens, parents)
    models = Models(vocab=3, seed=seed)
    rows = rows_of(models, proposal)
    law = explore(lambda tape: tuple(verify_rejection(proposal, rows, tape).tokens(proposal)))
    assert is_lossless(models, law, 1 + max(proposal.depths(), default=0))


def test_three_siblings_of_four_tokens_are_lossless() -> None:
    models = Models(vocab=4, seed=4)
    assert is_lossless(models, tree_law(models, (None, None, None), masked=False), 1)


def test_all_siblings_of_a_vocabulary_are_kept_for_certain() -> None:
    """Without replacement, as many siblings as tokens leave nothing to reject."""
    models = Models(vocab=3, seed=7)
    possible = sum(chance > 0 for chance in models.row("drafter", ()))
    assert possible == 3, "choose another seed"

    def kept(tape: Tape) -> tuple[int, ...]:
        proposal = sampled_tree(models, tape, (None, None, None), masked=False)
        return (len(verify_rejection(proposal, rows_of(models, proposal), tape).path),)

    assert explore(kept) == {(1,): 1}


# Relaxed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_the_law_of_a_relaxed_round_is_the_one_it_states_and_not_the_targets(seed: int) -> None:
    """One draft x and the target's draw y of shared noise: x where x = y or x is likely enough, else y."""
    models, leniency = Models(vocab=3, seed=seed), TopWithin(2, Fraction(3, 10))  # type: ignore[arg-type]
    p, q = models.row("target", ()), models.row("drafter", ())
    ranked = sorted(p, reverse=True)
    enough = [x > 0 and x >= ranked[1] and x >= ranked[0] - Fraction(3, 10) for x in p]
    stated = [Fraction(0)] * 3
    for (target, draft), weight in shared_law(p, q).items():
        stated[draft if enough[draft] else target] += weight

    def judge(proposal: Proposal, draws: list[int]) -> Verdict:
        return verify_relaxed(proposal, rows_of(models, proposal), draws, leniency)

    first = [Fraction(0)] * 3
    for text, weight in chain_round(models, 1, judge).items():
        first[text[0]] += weight
    assert first == stated != list(p)


# Acceptance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_block_accepts_no_less_than_rejection(seed: int) -> None:
    """Exact means over the same drafter and target; that of rejection also by its formula."""
    models, length = Models(vocab=2, seed=seed), 3

    def mean(rule: Rule) -> Fraction:
        def kept(tape: Tape) -> int:
            proposal = sampled_chain(models, tape, length)
            return len(rule(proposal, rows_of(models, proposal), tape).path)

        return sum((n * weight for n, weight in explore(kept).items()), Fraction(0))

    def survival(text: tuple[int, ...], left: int) -> Fraction:
        if left == 0:
            return Fraction(0)
        pairs = zip(models.row("target", text), models.row("drafter", text), strict=True)
        chances = [min(p, q) for p, q in pairs]
        return sum((c * (1 + survival((*text, t), left - 1)) for t, c in enumerate(chances) if c), Fraction(0))

    assert mean(verify_rejection) == survival((), length)
    assert mean(verify_block) >= mean(verify_rejection)


def test_nothing_is_written_into_the_inputs() -> None:
    models = Models(vocab=3, seed=1)
    proposal = sampled_chain(models, Tape((0, 1)), 2)
    assert isinstance(proposal.distribution, Dense)
    rows, before = rows_of(models, proposal), rows_of(models, proposal)
    drafted = proposal.distribution.probs.copy()
    for rule in (verify_rejection, verify_block):
        explore(lambda tape, rule=rule: rule(proposal, rows, tape).kind)
    assert all((a == b).all() for a, b in zip(rows, before, strict=True))
    assert (proposal.distribution.probs == drafted).all()
    assert math.isclose(float(sum(rows[0])), 1)

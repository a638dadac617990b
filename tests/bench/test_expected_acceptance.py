"""Expected acceptance of a chain against exact enumeration of each rule."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "verify"))

from enumeration import Models, explore, extend
from test_rules import chain_round, shared_law
from test_rules_exact import rows_of, vector

from paceline.bench.expected_acceptance import expected_accepted
from paceline.core.proposal import Dense, Proposal
from paceline.decode.verify.block import verify_block
from paceline.decode.verify.rejection import verify_rejection
from paceline.decode.verify.rules import walk

VOCAB, LENGTH = 3, 2


@pytest.mark.parametrize("seed", range(1, 7))
def test_each_chain_and_its_mean(seed: int) -> None:
    models = Models(VOCAB, seed)
    means = dict.fromkeys(("rejection", "block", "coupled"), 0.0)
    for chain, weight in chains(models).items():
        rows = [models.row("drafter", chain[:i]) for i in range(LENGTH)]
        proposal = Proposal.chain(chain, "toy", Dense(np.stack([vector(row) for row in rows])))
        target = torch.tensor([[float(x) for x in row] for row in rows_of(models, proposal)], dtype=torch.float64)
        draft = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)
        expected = expected_accepted(chain, target, draft)
        for name, rule in (("rejection", verify_rejection), ("block", verify_block)):
            law = explore(lambda tape, rule=rule, p=proposal: len(rule(p, rows_of(models, p), tape).path))
            assert abs(expected[name] - float(sum(n * w for n, w in law.items()))) < 1e-12
        assert abs(expected["coupled"] - float(coupled(models, chain))) < 1e-12
        means = {name: means[name] + float(weight) * expected[name] for name in means}
    emitted = chain_round(models, LENGTH, walk)
    assert abs(means["coupled"] + 1 - float(sum(len(text) * weight for text, weight in emitted.items()))) < 1e-12
    assert means["coupled"] <= means["rejection"] + 1e-12 <= means["block"] + 2e-12


def chains(models: Models) -> dict[tuple[int, ...], Fraction]:
    """The law of what the drafter draws."""
    law = {(): Fraction(1)}
    for _ in range(LENGTH):
        law = {
            (*text, token): weight * chance
            for text, weight in law.items()
            for token, chance in enumerate(models.row("drafter", text))
            if chance > 0
        }
    return law


def coupled(models: Models, chain: tuple[int, ...]) -> Fraction:
    kept, product = Fraction(0), Fraction(1)
    for i, token in enumerate(chain):
        p, q = models.row("target", chain[:i]), models.row("drafter", chain[:i])
        product *= shared_law(p, q).get((token, token), Fraction(0)) / q[token]
        kept += product
    return kept


def test_the_enumeration_is_of_the_same_models() -> None:
    models = Models(VOCAB, 1)
    assert extend(models, chain_round(models, LENGTH, walk), 1 + LENGTH) == models.target_law(1 + LENGTH)

"""Tokens that a grammar forces, as drafts that cannot miss.

Where one id alone is legal, the target's distribution is certain before its pass: the id is a draft with a
distribution of its own that is certain too, and every rule accepts it. So a chain goes on through what is forced
behind its last draft. Nothing is tokenised: texts that several tokens could spell force nothing.

Drafts that were certain (one-hot) are cut where they leave the grammar, a function of the committed tokens. Sampled
ones are never cut (they were drawn under the same masks): that would pick by value what the rules take for drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.core.proposal import Dense, Distribution, OneHot, Proposal
from paceline.decode.draft.cut import cut
from paceline.decode.verify.grammar import GrammarState

__all__ = ["with_forced"]


def with_forced(proposal: Proposal, grammar: GrammarState, budget: int) -> Proposal:
    """A chain without certain drafts that the grammar forbids, and with what it forces, at most `budget` tokens long;
    trees as they are.
    """
    if not proposal.is_chain or not isinstance(proposal.distribution, OneHot | Dense):
        return proposal
    own = grammar.legal_length(proposal.tokens)
    if own < len(proposal):
        if not isinstance(proposal.distribution, OneHot):
            return proposal
        proposal = cut(proposal, own)
    path = list(proposal.tokens)
    while len(path) < budget and (token := grammar.forced(path)) is not None:
        path.append(token)
    if len(path) == own:
        return proposal
    added = path[own:]
    confidence = proposal.confidence
    if confidence is not None:
        confidence = (*confidence, *(1.0 for _ in added))
    rows = _with_certain(proposal.distribution, added)
    chain = Proposal.chain(path, proposal.drafter if own else "grammar", rows, confidence)
    return replace(chain, forced=len(added))


def _with_certain(distribution: Distribution, tokens: list[int]) -> Distribution:
    if not isinstance(distribution, Dense):
        return distribution
    probs = torch.as_tensor(distribution.probs)
    width = max(probs.shape[1], max(tokens) + 1)
    certain = probs.new_zeros(len(tokens), width)
    certain[range(len(tokens)), tokens] = 1.0
    return Dense(torch.cat([torch.nn.functional.pad(probs, (0, width - probs.shape[1])), certain]))

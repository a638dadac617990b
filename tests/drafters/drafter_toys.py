"""A scripted target and a loop without an engine: what a drafter sees of the world, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.proposal import Proposal, Verdict
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import Drafter, SequenceView

Target = Callable[[list[int]], int]  # the next token as a function of the prefix


def table_target(table: list[int], order: int = 2) -> Target:
    """Next token looked up by a sum over the last `order` tokens: deterministic, and soon repeating."""
    return lambda prefix: table[sum(t * 7**i for i, t in enumerate(prefix[-order:])) % len(table)]


def script_target(script: list[int], prompt_len: int) -> Target:
    """Writes `script` whatever was drafted."""
    return lambda prefix: script[len(prefix) - prompt_len]


def verify(proposal: Proposal, prefix: list[int], target: Target) -> Verdict:
    """Greedy: the path on which every draft is the target's own token, and the token after it."""
    path: list[int] = []
    text = list(prefix)
    while True:
        token, at = target(text), path[-1] if path else None
        found = [i for i, t in enumerate(proposal.tokens) if proposal.parents[i] == at and t == token]
        if not found:
            full = at is not None and at not in proposal.parents
            return Verdict(tuple(path), token, "bonus" if full else "recovered")
        path.append(found[0])
        text.append(token)


@dataclass
class Loop:
    """Drives one drafter over sequences that come and go; every proposal is checked against the contract."""

    drafter: Drafter
    target: Target
    views: dict[int, SequenceView] = field(default_factory=dict)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tree_size: int | None = None

    def begin(self, key: int, prompt: list[int], tenant: str = "") -> SequenceView:
        view = SequenceView(key, list(prompt), len(prompt), SamplingParams(), tenant=tenant, tree_size=self.tree_size)
        self.views[key] = view
        self.drafter.begin(view)
        return view

    def round(self, keys: list[int], budget: int, asked: bool = True) -> list[Proposal]:
        """One round over these sequences: propose twice, verify, commit, observe."""
        views = [self.views[key] for key in keys]
        proposals = [Proposal() for _ in views]
        if asked:
            before = [list(view.tokens) for view in views]
            proposals = self.drafter.propose(views, [budget] * len(views))
            assert self.drafter.propose(views, [budget] * len(views)) == proposals, (
                "the second answer differs"
            )
            assert [view.tokens for view in views] == before, "propose wrote into a view"
            assert len(proposals) == len(views), "not one proposal per view"
            for proposal in proposals:
                assert max(proposal.depths(), default=0) <= budget, "longer than the budget"
                if self.tree_size is None:
                    assert proposal.is_chain, "it branches unasked"
                else:
                    assert len(proposal) <= self.tree_size, "larger than was asked for"
                    children = list(zip(proposal.parents, proposal.tokens, strict=True))
                    assert len(set(children)) == len(children), "equal siblings"
                self.drafted += len(proposal)
        verdicts: list[Verdict | None] = []
        for view, proposal in zip(views, proposals, strict=True):
            verdict = verify(proposal, view.tokens, self.target)
            self.accepted += len(verdict.path)
            view.tokens.extend(verdict.tokens(proposal))
            verdicts.append(verdict if len(proposal) else None)
        self.drafter.observe(views, verdicts)
        self.rounds += 1
        return proposals

    def end(self, key: int) -> None:
        self.drafter.end(self.views.pop(key))

"""A batch judged together gives what each of its sequences gives alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import ToyModel, hashed, request

from paceline.core.proposal import Proposal, Verdict
from paceline.decode.engine import Engine
from paceline.decode.judge import judge
from paceline.errors import RequestFailed

WIDTH, PADDED = 70, 73
ENGINE = Engine(ToyModel(hashed(WIDTH), WIDTH), vocab_size=WIDTH)  # type: ignore[arg-type]
OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "logit_bias": {3: 4.0}},
    {"temperature": 0.8, "min_tokens": 2, "max_tokens": 9},
    {"presence_penalty": 1.0},
]
BAD_ROWS = {"nan": float("nan"), "nothing": float("-inf")}


@st.composite
def members(draw: st.DrawFn) -> tuple[dict[str, object], str, list[int], str | None]:
    """Options, acceptance rule, drafts, and how a row of it is spoilt."""
    options = draw(st.sampled_from(OPTIONS))
    rule = draw(st.sampled_from(["coupled", "block", "rejection"]))
    drafts = draw(st.lists(st.integers(0, 3), max_size=3))
    return options, rule, drafts, draw(st.sampled_from([None] * 6 + sorted(BAD_ROWS)))


@given(st.lists(members(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_together_as_alone(
    batch: Sequence[tuple[dict[str, object], str, list[int], str | None]], order: object
) -> None:
    sequences, proposals, blocks = [], [], []
    for i, (options, rule, drafts, spoilt) in enumerate(batch):
        sequences.append(ENGINE._new_sequence(request([1, 2], verify=rule, **options), 0, i))
        proposals.append(Proposal.chain(drafts, "scripted"))
        rows = torch.randn(1 + len(drafts), PADDED, generator=torch.Generator().manual_seed(i))
        rows[:, 1] += 2.0  # drafts are accepted now and then
        if spoilt is not None:
            rows[len(drafts) // 2] = BAD_ROWS[spoilt]
        blocks.append(rows)
    places = list(range(len(batch)))
    order.shuffle(places)  # type: ignore[attr-defined]
    logits_of, at = [(0, 0)] * len(batch), 0
    for i in places:
        logits_of[i] = (at, len(blocks[i]))
        at += len(blocks[i])
    logits = torch.cat([blocks[i] for i in places] + [torch.full((2, PADDED), 9.0)])
    together = judge(sequences, proposals, logits, logits_of, WIDTH)
    for sequence, proposal, rows, verdict in zip(sequences, proposals, blocks, together, strict=True):
        (alone,) = judge([sequence], [proposal], rows, [(0, len(rows))], WIDTH)
        assert _said(verdict) == _said(alone)


def _said(verdict: Verdict | RequestFailed) -> object:
    return verdict if isinstance(verdict, Verdict) else str(verdict)

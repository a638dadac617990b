"""`rejection`, `block` and `relaxed` through the real engine: the law of whole texts over several rounds.

The law of a text is exact: the twins' probabilities of a small target, multiplied. Chi-square checks have fixed
seeds and fail below p = 1e-4: some false alarm among the 10 here had a chance of 0.1 %. More requests, and the faults
that are small, are in `verify/test_rules_noise.py`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import verify_twins as twins
from oracle import plain_decode
from scipy import stats
from toy import Lab, Scripted, ToyModel, hashed, request

import paceline.decode.verify.chances as chances_module
from paceline.core.proposal import Dense, OneHot, Proposal, Sparse
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.auto import AutoDrafter, Candidate, mild_cost
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.cut import cut
from paceline.decode.draft.draws import draft_key
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.verify.leniency import TopWithin, Typical
from paceline.decode.verify.noise import Purpose, exponential_noise, position_key
from paceline.decode.verify.probabilities import to_probs
from paceline.decode.verify.rules import RULES
from paceline.errors import InvalidParameter
from paceline.plan.control.cost import StepTimes

WIDTH, PROMPT = 3, (1,)
FALSE_ALARM = 1e-4
TARGET = hashed(WIDTH, seed=3, scale=1.0)
DRAFT = hashed(WIDTH, seed=8, scale=1.0)
LOSSLESS = pytest.mark.parametrize("rule", ["rejection", "block"])
Key = Callable[[SequenceView, int], int]


def text_law(params: SamplingParams, length: int, logits: Any = TARGET) -> dict[tuple[int, ...], float]:
    """Probability of each output of `length` tokens under plain decoding."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, weight in law.items():
            row = twins.processed_logits(logits((*PROMPT, *text)), params, PROMPT, text, WIDTH, frozenset())
            for token, chance in enumerate(twins.to_probs(row, params)[0]):
                if chance > 0:
                    grown[(*text, token)] = weight * chance
        law = grown
    return law


def assert_law(texts: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square; texts expected fewer than five times share a cell."""
    counts = Counter(texts)
    assert counts.keys() <= law.keys(), f"impossible texts {counts.keys() - law.keys()}"
    cells = [(counts[text], weight * len(texts)) for text, weight in law.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    seen, expected = np.array(cells).T
    pvalue = stats.chisquare(seen, expected).pvalue
    assert pvalue > FALSE_ALARM, f"p = {pvalue:.1e} over {len(cells)} cells"


def own_noise(view: SequenceView, position: int) -> int:
    return draft_key(view, position)


def sampler(
    key: Key = own_noise, form: str = "dense", reports: Callable[[torch.Tensor], torch.Tensor] = lambda row: row
) -> Scripted:
    """Draws chains from `DRAFT` under the request's options; `reports` is what it says of each row it drew from."""

    def propose(view: SequenceView, budget: int) -> Proposal:
        drafts: list[int] = []
        rows = []
        for _ in range(budget):
            logits = torch.from_numpy(DRAFT((*view.tokens, *drafts)).copy()).unsqueeze(0)
            probs = to_probs(logits, view.params, view.prefix, [drafts])[0]
            noise = exponential_noise(
                torch.tensor([key(view, len(view.tokens) + len(drafts))]), torch.arange(WIDTH)
            )[0]
            drafts.append(int((noise / probs).argmin()))
            rows.append(reports(probs))
        stacked = torch.stack(rows)
        ids = torch.arange(WIDTH).flip(0).expand(len(rows), -1)
        distribution = Dense(stacked) if form == "dense" else Sparse(ids, stacked.flip(1))
        return Proposal.chain(drafts, "scripted", distribution)

    return Scripted(propose)


def texts_of(lab: Lab, drafter: Any, rule: str, count: int, length: int = 5, **options: Any) -> list[tuple[int, ...]]:
    """`count` choices of one request, decoded together, three drafts a round."""
    engine = lab.engine(ToyModel(TARGET, WIDTH), drafter, max_batch=64, max_context=16)
    ask = request(PROMPT, length=3, verify=rule, n=count, max_tokens=length, seed=17, **options)
    return [tuple(ran.tokens) for ran in lab.run(engine, [ask])["r"]]


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "penalties and top_k": {"temperature": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "top_k": 2},
}


@LOSSLESS
@pytest.mark.parametrize(("name", "form"), [("temperature", "dense"), ("penalties and top_k", "sparse")])
def test_texts_of_several_rounds_have_the_targets_law(lab: Lab, rule: str, form: str, name: str) -> None:
    options = OPTIONS[name]
    texts = texts_of(lab, sampler(form=form), rule, 400, **options)
    assert_law(texts, text_law(SamplingParams(**options), 5))
    rounds = [r for r in lab.records if r.kind == "verify"]
    assert max(r.round for r in rounds) > 3 and 0.2 < np.mean([r.accepted / r.proposed for r in rounds]) < 0.9


def judged_by(purpose: Purpose) -> Key:
    """Fault (SD-10): drafts are drawn with the noise that judges them."""
    return lambda view, position: position_key(view.noise_key, position, purpose, len(view.tokens))


def flat(row: torch.Tensor) -> torch.Tensor:
    """Fault (SD-08): what is reported is not what was drawn from."""
    return torch.full_like(row, 1 / len(row))


FAULTY: dict[str, Callable[[], Scripted]] = {
    "SD-08 reports a flat distribution": lambda: sampler(reports=flat),
    "SD-10 drafts by the noise of the test": lambda: sampler(judged_by(Purpose.ACCEPT)),
}


@LOSSLESS
@pytest.mark.parametrize("name", FAULTY)
def test_faults_of_a_drafter_show(lab: Lab, rule: str, name: str) -> None:
    texts = texts_of(lab, FAULTY[name](), rule, 400, length=3, temperature=1.0)
    lab.judge(True, lambda: assert_law(texts, text_law(SamplingParams(temperature=1.0), 3)), match="p = ")


EDGES = ["p all but q", "one-hot elsewhere", "q misses p", "one finite logit"]


@pytest.mark.parametrize(
    ("edge", "fault"),
    [(edge, False) for edge in EDGES] + [(edge, True) for edge in EDGES if edge != "q misses p"],  # all is possible
)
@LOSSLESS
def test_sd_13_an_empty_residual(lab: Lab, monkeypatch: pytest.MonkeyPatch, rule: str, edge: str, fault: bool) -> None:
    """A test that fails although p - q leaves nothing: a token of p comes out. The fault draws from what is left."""
    p, q, drafted = {
        "p all but q": ([0.0, 0.5, 0.5], [0.0, 0.5, 0.5 + 1e-6], 2),
        "one-hot elsewhere": ([0.0, 0.0, 1.0], [0.0, 1.0, 0.0], 1),
        "q misses p": ([0.3, 0.3, 0.4], [0.0, 0.0, 1.0], 2),
        "one finite logit": ([0.0, 0.0, 1.0], [0.5, 0.25, 0.25], 0),
    }[edge]
    if fault:
        lowest = lambda self, ahead, weights, kind: int(weights.argmin())  # noqa: E731
        monkeypatch.setattr(chances_module.RoundNoise, "draw", lowest)
    strict = lambda self, ahead, token, chance: float(chance) > 1 - 1e-9  # noqa: E731
    monkeypatch.setattr(chances_module.RoundNoise, "accept", strict)
    logits = np.array([math.log(x) if x else -math.inf for x in p], dtype=np.float32)
    draft = torch.tensor(q)

    def propose(view: SequenceView, budget: int) -> Proposal:
        return Proposal.chain([drafted] * budget, "scripted", Dense(draft.expand(budget, -1)))

    def check() -> None:
        engine = lab.engine(ToyModel(lambda prefix: logits, WIDTH), propose)
        ran = lab.one(engine, request(PROMPT, length=3, verify=rule, temperature=1.0, seed=5, max_tokens=12))
        assert ran.reason == "length" and all(p[token] > 0 for token in ran.tokens)

    lab.judge(fault, check)


@LOSSLESS
def test_sd_13_nan_behind_a_draft_ends_the_text_where_plain_decoding_ends(lab: Lab, rule: str) -> None:
    """NaN follows token 2 alone. How long a text is has plain decoding's law: nothing is drawn again without drafts."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = TARGET(prefix)
        return np.full_like(row, np.nan) if prefix[-1] == 2 else row

    engine = lab.engine(ToyModel(logits, WIDTH), sampler(), max_batch=64, max_context=16)
    ask = request(PROMPT, length=3, verify=rule, n=400, max_tokens=5, seed=17, temperature=1.0)
    ran = lab.run(engine, [ask])["r"]
    law: dict[tuple[int, ...], float] = {}
    for text, weight in text_law(SamplingParams(temperature=1.0), 5).items():
        ended = text[: text.index(2) + 1] if 2 in text else text
        law[ended] = law.get(ended, 0.0) + weight
    assert_law([tuple(one.tokens) for one in ran], law)
    assert all((one.reason == "error") == (2 in one.tokens[:4]) for one in ran)


# Lengths ----------------------------------------------------------------------------------------------------


class Doubtful(Scripted):
    """Drafts four tokens and says that it does not believe in the last three."""

    def propose(self, views: Any, budgets: Any) -> list[Proposal]:
        made = super().propose(views, budgets)
        doubts = (0.99, 0.01, 0.01, 0.01)
        return [Proposal(p.tokens, p.parents, p.distribution, p.drafter, doubts[: len(p)]) for p in made]


@pytest.mark.parametrize("rule", RULES)
def test_auto_cuts_what_it_has_seen_only_where_that_is_allowed(lab: Lab, rule: str) -> None:
    """A costly candidate is asked for a length chosen before; its doubts then shorten what is verified, or may not."""
    drafter = Doubtful(sampler().propose_one)
    auto = AutoDrafter([Candidate(drafter, StepTimes((1, 2), (0.001, 0.001)))], mild_cost(0.02))
    engine = lab.engine(ToyModel(TARGET, WIDTH), {"auto": auto}, max_context=64, max_draft=4)
    temperature = 0.0 if rule == "greedy" else 1.0
    lab.one(engine, request(PROMPT, draft="auto", verify=rule, temperature=temperature, seed=3, max_tokens=40))
    handed = [r.proposed for r in lab.records if r.kind == "verify"]
    drafted = [len(tokens) for tokens in drafter.drafted]
    assert len(handed) > 5 and max(drafted) > 1
    if RULES[rule].length_may_see_drafts:
        assert sum(handed) < sum(drafted)
    else:
        assert handed == drafted


@LOSSLESS
def test_a_draft_model_that_stops_behind_end_of_text(lab: Lab, rule: str) -> None:
    """The real drafter: its own noise, exact distributions, drafts that end behind id 2 ."""
    made = ModelDrafter(
        ToyModel(DRAFT, WIDTH), name="d", max_positions=64, slots=64, stop_ids=frozenset({2})
    )
    engine = lab.engine(ToyModel(TARGET, WIDTH), {"d": made}, eos=[2], max_batch=64, max_context=16)
    ask = request(PROMPT, draft="d", length=3, verify=rule, n=400, max_tokens=4, seed=9, temperature=1.0)
    law: dict[tuple[int, ...], float] = {}
    for text, weight in text_law(SamplingParams(temperature=1.0), 4).items():
        ended = text[: text.index(2) + 1] if 2 in text else text
        law[ended] = law.get(ended, 0.0) + weight
    assert_law([tuple(ran.tokens) for ran in lab.run(engine, [ask])["r"]], law)


# Trees ------------------------------------------------------------------------------------------------------


@LOSSLESS
def test_certain_trees_have_the_targets_law(lab: Lab, rule: str) -> None:
    """`block` gives trees to `rejection`."""

    def propose(view: SequenceView, budget: int) -> Proposal:
        first = len(view.tokens) % WIDTH
        tokens = (first, (first + 1) % WIDTH, first, 0, 1)
        return cut(Proposal(tokens, (None, None, 0, 0, 1), OneHot(), "scripted"), budget)

    texts = texts_of(lab, propose, rule, 400, temperature=1.0)
    assert_law(texts, text_law(SamplingParams(temperature=1.0), 5))


# Relaxed ----------------------------------------------------------------------------------------------------


def test_relaxed_is_not_exact_and_says_so(lab: Lab) -> None:
    """Its texts do not have the target's law, which is why everything it gives is marked."""
    texts = texts_of(lab, sampler(), "relaxed", 400, length=3, temperature=1.0)
    assert {(r.verify, r.lossless) for r in lab.records} == {("relaxed", False)}
    lab.judge(True, lambda: assert_law(texts, text_law(SamplingParams(temperature=1.0), 3)), match="p = ")


def test_relaxed_that_forgives_nothing_is_coupled(lab: Lab) -> None:
    """No probability is above 1: plain decoding, token for token."""
    for seed in range(6):
        ask = request(
            PROMPT, length=3, verify="relaxed", relaxed=Typical(1.0, 1e30), temperature=1.0, seed=seed, max_tokens=12
        )
        ran = lab.one(lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [len(v.tokens) % WIDTH] * b), ask)
        assert ran.tokens == plain_decode(TARGET, PROMPT, ask.params, vocab_size=WIDTH).tokens


def test_relaxed_that_forgives_all_follows_the_drafts(lab: Lab) -> None:
    all_of_them = TopWithin(WIDTH, 0.999)
    ask = request(PROMPT, length=3, verify="relaxed", relaxed=all_of_them, temperature=1.0, seed=1, max_tokens=9)
    ran = lab.one(lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [0] * b), ask)
    assert ran.sequence.stats.accepted == ran.sequence.stats.drafted > 4


def test_leniency_is_refused_where_it_has_no_effect(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [0] * b)
    with pytest.raises(InvalidParameter, match="under the rule 'block'"):
        engine.add(request(PROMPT, verify="block", relaxed=Typical()))


def test_the_laws_used_here_are_laws() -> None:
    for options in OPTIONS.values():
        assert math.isclose(sum(text_law(SamplingParams(**options), 4).values()), 1)
    assert len(list(itertools.product(range(WIDTH), repeat=3))) == len(text_law(SamplingParams(temperature=1.0), 3))

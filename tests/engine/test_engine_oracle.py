"""The engine against plain decoding by the oracle: every option, any drafts, any company. Token for token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from oracle import Plain, plain_decode
from toy import Lab, Scripted, ToyModel, branching, following, hashed, request

from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.registry import make_auto, make_model_free
from paceline.decode.sequence import Request

WIDTH, VOCAB, EOS, CONTEXT = 24, 22, frozenset({3}), 60
TARGET = hashed(WIDTH, seed=1)
LOOPING = hashed(WIDTH, seed=2, order=1)
TEXT = {i: chr(ord("a") + i) for i in range(VOCAB)} | {5: "st", 6: "op", 9: ""}
CLEAR = 1e-5  # decisions closer than this are left to rounding

ONE_OPTION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "hot": {"temperature": 7.0},
    "cold": {"temperature": 1e-3},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.613},
    "min_p": {"temperature": 1.3, "min_p": 0.117},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.3},
    "negative frequency": {"frequency_penalty": -1.3},
    "logit_bias": {"logit_bias": {2: 4.5, 17: -100.0, 0: 2.5}},
    "bad_words": {"bad_words": ((4,), (7, 8), (1, 2, 1)), "temperature": 1.0},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21), "temperature": 0.8},
    "min_tokens": {"min_tokens": 9, "temperature": 1.0, "logit_bias": {3: 6.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {3: 3.0}, "temperature": 1.0},
    "stop ids": {"stop_token_ids": (5, 11), "temperature": 1.0},
    "stop": {"stop": ("stop", "ab", "op"), "temperature": 1.2, "allowed_token_ids": (0, 1, 5, 6, 9)},
    "logprobs": {"logprobs": 4, "temperature": 1.0},
    "all": {
        "temperature": 1.1,
        "top_k": 12,
        "top_p": 0.93,
        "min_p": 0.011,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 1.5},
        "bad_words": ((1, 2),),
        "min_tokens": 5,
        "stop": ("stop",),
        "logprobs": 2,
    },
}


def truth_of(request: Request, choice: int, logits: Any = TARGET) -> Plain:
    return plain_decode(
        logits,
        request.prompt,
        request.params,
        vocab_size=VOCAB,
        eos=EOS,
        context=CONTEXT,
        choice=choice,
        pieces=TEXT,
    )


def drafters_for(truths: dict[tuple[int, ...], list[list[int]]], plan: list[Any]) -> dict[str, Any]:
    """Drafters that know the answers (which choice a view is, it finds by what was said so far)."""

    def truth(view: SequenceView) -> list[int]:
        said = view.tokens[view.prompt_len :]
        answers = truths[tuple(view.tokens[: view.prompt_len])]
        return next((a for a in answers if a[: len(said)] == said), answers[0])

    return {
        "chain": Scripted(following(truth, plan, VOCAB), "chain"),
        "tree": Scripted(branching(truth, VOCAB), "tree"),
        "ngram": make_model_free("ngram"),
        "suffix": make_model_free("suffix"),
        "auto": make_auto(),
    }


def check_equal(lab: Lab, requests: list[Request], arrivals: list[int], plan: list[Any], **options: Any) -> None:
    plains = {r.request_id: [truth_of(r, c) for c in range(r.params.n)] for r in requests}
    if any(0 < p.margin < CLEAR for ps in plains.values() for p in ps):
        assert currently_in_test_context(), "a decision is too close for the oracle; choose another seed"
        assume(False)
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for r in requests:
        answers.setdefault(r.prompt, []).extend(p.tokens for p in plains[r.request_id])
    engine = lab.engine(
        ToyModel(TARGET, WIDTH, max_positions=CONTEXT),
        drafters_for(answers, plan),
        vocab_size=VOCAB,
        eos=EOS,
        pieces=TEXT,
        max_context=CONTEXT,
        **options,
    )
    ran = lab.run(engine, requests, arrivals)
    for r in requests:
        for plain, got in zip(plains[r.request_id], ran[r.request_id], strict=True):
            assert (got.tokens, got.reason, got.text) == (plain.tokens, plain.reason, plain.text), r
            check_logprobs(r.params, plain, got)


def check_logprobs(params: SamplingParams, plain: Plain, got: Any) -> None:
    if params.logprobs is None:
        assert got.logprobs == []
        return
    for entry, (chosen, ranked) in zip(got.logprobs, plain.logprobs, strict=True):
        assert math.isclose(entry.logprob, chosen, abs_tol=1e-4)
        assert [i for i, _ in entry.top] == [i for i, _ in ranked[: params.logprobs]]
        assert all(
            math.isclose(a, b, abs_tol=1e-4)
            for (_, a), (_, b) in zip(entry.top, ranked[: params.logprobs], strict=True)
        )


@pytest.mark.parametrize("draft", ["chain", "tree"])
@pytest.mark.parametrize("name", ONE_OPTION)
def test_each_option_at_every_block_position(lab: Lab, name: str, draft: str) -> None:
    """Three seeds, drafts right for 0 to 5 tokens: a wrong prefix at any place in a block shows."""
    requests = [
        request([seed + 1, 2], id=str(seed), draft=draft, length=6, max_tokens=24, seed=seed, **ONE_OPTION[name])
        for seed in range(3)
    ]
    check_equal(lab, requests, [0, 0, 0], [3, (6, 6), 0, 5, 1, (4, 4), 2])


@pytest.mark.parametrize("rule", ["rejection", "block", "relaxed"])
@pytest.mark.parametrize("name", [name for name, options in ONE_OPTION.items() if not options.get("temperature")])
def test_every_rule_is_greedy_at_temperature_0(lab: Lab, name: str, rule: str) -> None:
    """Chains right for 0 to 5 tokens, trees, and drafters that find their own, in one batch."""
    requests = [
        request([i + 1, 2], id=str(i), draft=draft, length=6, max_tokens=24, verify=rule, **ONE_OPTION[name])
        for i, draft in enumerate(["chain", "tree", "ngram", "chain"])
    ]
    requests.append(request([5, 2], id="auto", draft="auto", max_tokens=24, verify=rule, **ONE_OPTION[name]))
    check_equal(lab, requests, [0, 0, 1, 3, 0], [3, (6, 6), 0, 5, 1, (4, 4), 2])


option = st.sampled_from(sorted(ONE_OPTION))


@st.composite
def some_requests(draw: st.DrawFn) -> list[Request]:
    made = []
    for i in range(draw(st.integers(1, 5))):
        options: dict[str, Any] = {}
        for name in draw(st.lists(option, min_size=1, max_size=3, unique=True)):
            options |= ONE_OPTION[name]
        cap = draw(st.integers(1, 30))
        draft, tree = draw(st.sampled_from(["none", "chain", "tree", "ngram", "auto", "suffix"])), None
        length = draw(st.one_of(st.none(), st.integers(0, 7)))
        if draft == "suffix" and length:
            tree = draw(st.one_of(st.none(), st.integers(length, length + 9)))
        options["min_tokens"] = min(options.get("min_tokens", 0), cap)
        made.append(
            request(
                draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=45)),
                id=str(i),
                draft=draft,
                length=length,
                tree=tree,
                seed=draw(st.integers(-5, 5)),
                n=draw(st.integers(1, 2)),
                max_tokens=cap,
                **options,
            )
        )
    return made


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=some_requests(),
    arrivals=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    plan=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    batch=st.integers(1, 4),
    chunk=st.integers(1, 50),
    tiled=st.booleans(),
)
def test_any_company_any_drafts(
    requests: list[Request], arrivals: list[int], plan: list[int], batch: int, chunk: int, tiled: bool
) -> None:
    """Requests with different options, drafters, lengths and arrivals; small batches make some wait."""
    lab = Lab()
    check_equal(
        lab,
        requests,
        arrivals[: len(requests)],
        plan,
        max_batch=batch,
        prefill_chunk=chunk,
        deterministic=tiled,
    )
    lab.close()


def test_choices_differ_and_seeds_repeat(lab: Lab) -> None:
    engine = lab.engine(ToyModel(TARGET, WIDTH), lambda v, b: [1] * b, vocab_size=VOCAB)
    ask = {"prompt": [1, 2], "n": 6, "temperature": 1.0, "max_tokens": 12}
    first = lab.run(engine, [request(**ask, id="a", seed=5)])["a"]
    again = lab.run(engine, [request(**ask, id="b", seed=5, draft="none")])["b"]
    other = lab.run(engine, [request(**ask, id="c", seed=6)])["c"]
    texts = [tuple(ran.tokens) for ran in first]
    assert len(set(texts)) == 6
    assert [ran.tokens for ran in again] == [ran.tokens for ran in first]
    assert not set(texts) & {tuple(ran.tokens) for ran in other}
    assert [ran.sequence.choice for ran in first] == list(range(6))

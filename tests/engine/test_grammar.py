"""Structured outputs under speculation: masks against brute force, roll-back, laws, and the faults of public engines.

Finite languages are listed word by word, so that what may follow a prefix is known without any library. Chi-square
checks use fixed seeds and fail below p = 1e-4: some false alarm among the 3 sound ones had a chance of 0.03 %.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from toy import FAULTS, Lab, Scripted, ToyModel, branching, hashed, request

from paceline.core.grammar import Grammar
from paceline.core.proposal import Dense, Proposal
from paceline.core.sampling import SamplingParams
from paceline.decode.draft.base import SequenceView
from paceline.decode.draft.draws import draft_key
from paceline.decode.draft.forced import with_forced
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.registry import make_model_free
from paceline.decode.engine import Engine
from paceline.decode.verify import options as options_module
from paceline.decode.verify.grammar import GrammarCompiler, GrammarState
from paceline.decode.verify.noise import exponential_noise
from paceline.decode.verify.probabilities import to_probs
from paceline.errors import InvalidParameter, RequestFailed, UsageError

EOS, FALSE_ALARM = 0, 1e-4
SMALL = ["", "a", "b", "c", "ab", "bc", "abc", "ca"]  # id 0 ends the text
ASCII = ["", *(chr(code) for code in range(32, 127)), '{"', '": ', "true", ", ", "1", "00", '"}', "name", "]}"]
RULES = ["coupled", "rejection", "block"]


def compiler(words: Sequence[str], ends: frozenset[int] = frozenset({EOS})) -> GrammarCompiler:
    table = {i: word.encode() for i, word in enumerate(words)}
    return GrammarCompiler(lambda: table, ends, len(words), ends)


SMALL_COMPILER, ASCII_COMPILER = compiler(SMALL), compiler(ASCII)


def engine(lab: Lab, logits: Any, drafters: Any = None, words: Sequence[str] = ASCII, **options: Any) -> Engine:
    known = SMALL_COMPILER if words is SMALL else ASCII_COMPILER
    kind: Any = partial(Engine, grammars=known)
    model = ToyModel(logits, len(words))
    return lab.engine(model, drafters, kind=kind, eos=[EOS], pieces=dict(enumerate(words)), **options)


def legal(language: Sequence[str], text: str) -> set[int]:
    """By trying each token: what may follow `text`, in a language of listed words."""
    ends = {EOS} if text in language else set()
    return ends | {i for i, t in enumerate(SMALL) if t and any(word.startswith(text + t) for word in language)}


def spelled(tokens: Sequence[int]) -> str:
    return "".join(SMALL[token] for token in tokens)


LANGUAGES = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5, unique=True)
PATHS = st.lists(st.integers(0, len(SMALL) - 1), max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LANGUAGES, st.lists(st.tuples(PATHS, st.integers(0, 99)), max_size=8))
def test_masks_are_those_of_brute_force_whatever_was_asked_before(
    language: list[str], rounds: list[tuple[list[int], int]]
) -> None:
    """Rounds of any drafts, legal or not, then a commit of some legal tokens: as a matcher that only ever went on."""
    state = SMALL_COMPILER.start(Grammar("regex", "|".join(language)))
    said: list[int] = []
    for drafts, pick in rounds:
        for length in [*range(len(drafts) + 1), 0, len(drafts)]:
            path = drafts[:length]
            mask = state.mask(path)
            prefixes = [spelled([*said, *path[:i]]) for i in range(length + 1)]
            alive = all(path[i] in legal(language, prefixes[i]) and path[i] != EOS for i in range(length))
            assert (mask is None) == (not alive)
            if mask is not None:
                assert set(mask.nonzero().flatten().tolist()) == legal(language, prefixes[-1])
        steps = [path for path in ([], drafts) if state.legal_length(path) == len(path)]
        chosen = list(steps[pick % len(steps)])
        if EOS not in chosen:
            after = sorted(legal(language, spelled([*said, *chosen])) - {EOS})
            chosen += [after[pick % len(after)]] if after else [EOS]
        state.commit(chosen)
        said += chosen
        if EOS in said:
            assert state.mask([]) is None and state.legal_length([1]) == 0
            break


def law_of(
    language: Sequence[str], logits: Any, prompt: Sequence[int], temperature: float
) -> dict[tuple[int, ...], float]:
    """Probability of each whole output under plain decoding with masks by brute force."""
    done: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        grown = {}
        for said, weight in open_.items():
            ids = sorted(legal(language, spelled(said)))
            row = np.asarray(logits((*prompt, *said)), dtype=np.float64)[ids] / temperature
            chances = np.exp(row - row.max())
            for token, chance in zip(ids, chances / chances.sum(), strict=True):
                target = done if token == EOS else grown
                target[(*said, token)] = weight * float(chance)
        open_ = grown
    return done


LANGUAGE = ["ab", "abca", "abcab", "cabca", "cabcb", "b"]
TARGET, DRAFT = hashed(len(SMALL), seed=5, scale=1.0), hashed(len(SMALL), seed=6, scale=1.0)


def sampler() -> Scripted:
    """A draft model under the request's options, drawing with noise of its own where the rule asks for it."""

    def propose(view: SequenceView, budget: int) -> Proposal:
        drafts: list[int] = []
        rows = []
        while len(drafts) < budget and EOS not in drafts:
            logits = torch.from_numpy(DRAFT((*view.tokens, *drafts)).copy()).unsqueeze(0)
            try:
                rows.append(to_probs(logits, view.params, view.prefix, [drafts])[0])
            except RequestFailed:
                break
            key = torch.tensor([draft_key(view, len(view.tokens) + len(drafts))])
            drafts.append(int((exponential_noise(key, torch.arange(len(SMALL)))[0] / rows[-1]).argmin()))
        own = not view.rule.shares_noise
        if not drafts:
            return Proposal()
        return Proposal.chain(drafts, "scripted", Dense(torch.stack(rows)) if own else None)

    return Scripted(propose)


@FAULTS
@pytest.mark.parametrize("rule", RULES)
def test_a_small_grammar_has_the_law_of_plain_decoding(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, rule: str, fault: bool
) -> None:
    """Every output of an enumerable grammar, forced tokens among them. The fault: rows are masked without drafts."""
    if fault:
        real = options_module._constrain
        monkeypatch.setattr(
            options_module, "_constrain", lambda logits, grammar, paths: real(logits, grammar, [[] for _ in paths])
        )

    def check() -> None:
        params = {"temperature": 1.2, "grammar": Grammar("regex", "|".join(LANGUAGE)), "seed": 3, "n": 400}
        run = engine(lab, TARGET, sampler(), SMALL, max_batch=64, max_context=24)
        ran = lab.run(run, [request([1], length=3, verify=rule, max_tokens=12, **params)])["r"]
        law = law_of(LANGUAGE, TARGET, [1], 1.2)
        counts = Counter(tuple(r.tokens) for r in ran)
        assert counts.keys() <= law.keys(), f"impossible outputs {counts.keys() - law.keys()}"
        cells = [(counts[text], weight * len(ran)) for text, weight in law.items()]
        common = [cell for cell in cells if cell[1] >= 5]
        rare = [cell for cell in cells if cell[1] < 5]
        common += [(sum(c for c, _ in rare), sum(e for _, e in rare))] if rare else []
        seen, expected = np.array(common).T
        assert stats.chisquare(seen, expected).pvalue > FALSE_ALARM
        assert sum(r.sequence.stats.accepted for r in ran) > len(ran)
        assert all(r.reason == "stop" for r in ran)

    lab.judge(fault, check)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 300},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
WIDE = hashed(len(ASCII), seed=9, scale=1.5, order=3)


def shorter(prefix: tuple[int, ...]) -> np.ndarray:
    """White space and strings would go on for long in a random text."""
    row = WIDE(prefix).copy()
    row[ASCII.index(" ")] -= 6.0
    row[ASCII.index('"')] += 3.0
    return row


def drafter_of(name: str) -> dict[str, Any]:
    if name == "model":
        draft = hashed(len(ASCII), seed=12, scale=1.0, order=2)
        model = ToyModel(lambda prefix: shorter(prefix) + draft(prefix), len(ASCII))
        return {"scripted": ModelDrafter(model, name="scripted", max_positions=512, slots=8, stop_ids=frozenset({EOS}))}
    if name == "wild":
        return {"scripted": Scripted(lambda view, budget: [len(view.tokens) % len(ASCII)] * budget)}
    return {"scripted": make_model_free(name)} if name != "none" else {}


@pytest.mark.parametrize("name", ["ngram", "suffix", "wild", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_token_and_every_answer_fits_its_schema(
    lab: Lab, name: str, temperature: float
) -> None:
    def asks(draft: str) -> list[Any]:
        grammar = Grammar.from_schema(SCHEMA)
        options: dict[str, Any] = {"temperature": temperature, "grammar": grammar, "max_tokens": 120, "logprobs": 1}
        return [
            request([1, 2, i], id=str(i), draft=draft, length=5 if draft != "none" else None, seed=i, **options)
            for i in range(12)
        ]

    plain = lab.run(engine(lab, shorter), asks("none"))
    drafted = lab.run(engine(lab, shorter, drafter_of(name)), asks("scripted"), arrivals=[i // 3 for i in range(12)])
    for key, (ran,) in drafted.items():
        (wanted,) = plain[key]
        assert ran.tokens == wanted.tokens and ran.logprobs == wanted.logprobs
        assert ran.reason == "stop"
        jsonschema.validate(json.loads(ran.text), SCHEMA)
    assert sum(ran.sequence.stats.accepted for (ran,) in drafted.values()) > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_batch_of_eight_under_the_lossless_rules_is_valid(lab: Lab, rule: str) -> None:
    grammar = Grammar.from_schema(SCHEMA)
    run = engine(lab, shorter, drafter_of("model"), max_batch=8)
    ask = request([1], length=4, verify=rule, n=16, seed=5, temperature=0.8, grammar=grammar, max_tokens=120)
    for ran in lab.run(run, [ask])["r"]:
        jsonschema.validate(json.loads(ran.text), SCHEMA)


def test_trees_are_judged_under_the_masks_of_their_own_paths(lab: Lab) -> None:
    ask = {"grammar": Grammar.from_schema(SCHEMA), "max_tokens": 120, "temperature": 0.8, "seed": 4}
    plain = lab.one(engine(lab, shorter), request([1, 2], draft="none", **ask))  # type: ignore[arg-type]
    tree = engine(lab, shorter, branching(lambda view: plain.tokens, len(ASCII)))
    ran = lab.one(tree, request([1, 2], **ask))  # type: ignore[arg-type]
    assert ran.tokens == plain.tokens and ran.sequence.stats.accepted > len(ran.tokens) // 3


def wants(text: Mapping[int, str] | Sequence[str], early: bool = False) -> Any:
    """A target that says {"a": N} with N by the prompt, and would end at once after its number where `early`."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        said = "".join(ASCII[token] for token in prefix[1:])
        whole = '{"a": ' + str(prefix[0]) + "}"
        row = np.zeros(len(ASCII), dtype=np.float32)
        row[EOS] = 9.0 if said == whole or (early and said == whole[:-1]) else -9.0
        if whole.startswith(said) and said != whole:
            row[ASCII.index(whole[len(said)])] = 8.0
        return row

    return logits


@FAULTS
def test_sd_25_no_mask_is_asked_for_behind_the_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """Drafts go on behind the end. The fault feeds the end to the matcher and asks it for one mask more."""
    if fault:
        sound = GrammarState.mask

        def mask(self: GrammarState, path: Sequence[int]) -> Any:
            if EOS not in path:
                return sound(self, path)
            self._matcher.consume_tokens(list(path))
            self._check()
            return None

        monkeypatch.setattr(GrammarState, "mask", mask)
        monkeypatch.setattr("paceline.decode.engine.with_forced", lambda proposal, *_: proposal)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False

    def drafts(view: SequenceView, budget: int) -> list[int]:
        said = "".join(ASCII[token] for token in view.tokens[1:])
        ahead = ('{"a": ' + str(view.tokens[0]) + "}")[len(said) :]
        return [*(ASCII.index(c) for c in ahead), EOS, 5, 6][:budget]

    def check(early: bool) -> None:
        options: dict[str, Any] = {"grammar": Grammar.from_schema(schema), "max_tokens": 30}
        asks = [request([i % 100], id=str(i), length=15, **options) for i in range(1, 101)]
        run = engine(lab, wants(ASCII, early), drafts, max_batch=16, max_context=64)
        for key, (ran,) in lab.run(run, asks).items():
            assert ran.reason == "stop" and ran.sequence.stats.rounds == 1, "a block failed and was decoded again"
            assert ran.tokens[-1] == EOS and json.loads(ran.text) == {"a": int(key) % 100}
            assert ran.sequence.prefix.grammar is not None and ran.sequence.prefix.grammar.mask([]) is None

    lab.judge(fault, partial(check, True))
    lab.judge(fault, partial(check, False))


def test_an_end_drafted_too_early_is_rejected(lab: Lab) -> None:
    plain = [*(ASCII.index(c) for c in '{"a": 77}'), EOS]
    early = Scripted(lambda view, budget: [plain[len(view.tokens) - 1], EOS, 5])
    ask = {"grammar": Grammar("regex", r'\{"a": \d+\}'), "max_tokens": 30}
    ran = lab.one(engine(lab, wants(ASCII, True), early), request([77], **ask))  # type: ignore[arg-type]
    assert ran.tokens == plain


@pytest.mark.parametrize("rule", RULES)
def test_forced_tokens_are_drafts_that_are_always_right(lab: Lab, rule: str) -> None:
    """One spelling only where no token holds two of its letters: `x=y;` forces, `ab` does not."""
    grammar = Grammar("regex", "x=y;(p|q)z=[0-9]!!!!!!!!")
    for drafter in (Scripted(lambda *_: []), drafter_of("wild")["scripted"], drafter_of("model")["scripted"]):
        run = engine(lab, shorter, {"scripted": drafter}, max_context=64)
        options: dict[str, Any] = {"verify": rule, "temperature": 0.9, "grammar": grammar}
        asks = [request([1], length=6, seed=i, id=str(i), **options) for i in range(8)]
        for (ran,) in lab.run(run, asks).values():
            if not isinstance(drafter, ModelDrafter):
                assert ran.sequence.stats.rounds <= 6 and ran.sequence.stats.accepted >= 10
            assert len(ran.text) == 16


def test_only_a_single_legal_id_is_forced_and_a_sampled_chain_is_not_cut() -> None:
    state = SMALL_COMPILER.start(Grammar("regex", "cab|cb"))
    assert with_forced(Proposal(), state, 8) == Proposal()  # `c` and `ca` may begin it
    state.commit([3])
    assert with_forced(Proposal.chain([1], "d"), state, 8).tokens == (1, 2)
    assert with_forced(Proposal.chain([1, 1, 1], "d"), state, 8).tokens == (1, 2)
    assert with_forced(Proposal.chain([1], "d"), state, 1).forced == 0
    drawn = Proposal.chain([1, 1], "d", Dense(torch.full((2, len(SMALL)), 1 / len(SMALL))))
    assert with_forced(drawn, state, 8) is drawn
    longer = with_forced(Proposal.chain([1], "d", Dense(torch.full((1, 4), 0.25))), state, 8)
    assert isinstance(longer.distribution, Dense) and longer.forced == 1
    assert longer.distribution.probs[1].tolist() == [0, 0, 1, 0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LANGUAGES, PATHS, st.integers(1, 6))
def test_tokens_are_forced_as_far_as_one_id_alone_is_legal(language: list[str], drafts: list[int], budget: int) -> None:
    """Whatever was drafted: each id added is the only legal one by brute force, and none is left out but for room."""
    state = SMALL_COMPILER.start(Grammar("regex", "|".join(language)))
    chain = Proposal.chain(drafts[:budget], "d") if drafts else Proposal()
    made = with_forced(chain, state, budget)
    own = len(made) - made.forced
    assert list(made.tokens[:own]) == drafts[:own]
    for place in range(own, len(made)):
        assert legal(language, spelled(made.tokens[:place])) == {made.tokens[place]}
    if len(made) < budget and EOS not in made.tokens:
        after = legal(language, spelled(made.tokens))
        assert len(after) > 1 or after == {EOS}


def test_a_preempted_answer_goes_on_where_it_was(lab: Lab) -> None:
    block = 512 * 8
    options: dict[str, Any] = {"grammar": Grammar("regex", "[a-z]{240}"), "temperature": 0.8, "max_tokens": 260}
    asks = [request([1 + i] * 380, id=str(i), length=3, seed=i, **options) for i in range(2)]
    order = hashed(len(ASCII), seed=2, order=2)
    run = engine(lab, order, drafter_of("ngram"), max_batch=2, cache_bytes=3 * block, max_context=1024)
    ran = lab.run(run, asks)
    assert sum(r.sequence.stats.preemptions for (r,) in ran.values()) > 0
    free = engine(lab, order, drafter_of("ngram"), max_batch=2, max_context=1024)
    assert [r.tokens for (r,) in ran.values()] == [r.tokens for (r,) in lab.run(free, asks).values()]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.from_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.from_schema({"not": {"type": "null"}, "x-guidance": {"lenient": True}}), "not"),
        (Grammar.from_schema({"type": "strin"}), "strin"),
        (Grammar("regex", "a("), "regex"),
        (Grammar("regex", "a(?=b)"), "look-around|regex"),
        (Grammar("lark", "start: foo"), "foo"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(lab: Lab, grammar: Grammar, says: str) -> None:
    run = engine(lab, shorter)
    with pytest.raises(InvalidParameter, match=says):
        run.add(request([1], draft="none", grammar=grammar))
    assert not run.has_work


def test_requests_that_make_no_sense_are_refused(lab: Lab) -> None:
    with pytest.raises(InvalidParameter, match="ignore_eos"):
        SamplingParams(grammar=Grammar("json_object"), ignore_eos=True)
    with pytest.raises(InvalidParameter, match="not JSON"):
        Grammar("json_schema", "{")
    with pytest.raises(InvalidParameter, match="source"):
        Grammar("regex")
    with pytest.raises(UsageError, match="tokenizer"):
        lab.engine(ToyModel(TARGET, len(SMALL))).add(request([1], draft="none", grammar=Grammar("json_object")))
    with pytest.raises(UsageError, match="end-of-text"):
        compiler(SMALL, frozenset()).start(Grammar("json_object"))

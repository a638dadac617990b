"""`paceline replay`: policies over replayed texts, and what a trace of a real engine tells of itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_toys import made_up_probe, texts

from paceline.cli import main
from paceline.core.records import StepRecord, TraceWriter
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.hindsight import fixed_rounds
from paceline.plan.pass_table import PassTable
from paceline.plan.policies import Outcome, default_policies, run_policies
from paceline.plan.probe_file import Drafts, ReplayedText
from paceline.plan.trace_texts import probe_of_trace, texts_of


def record(index: int, proposed: int, accepted: int, context: int, **more: object) -> StepRecord:
    kind = "prefill" if index == 0 else "verify" if proposed else "plain"
    values: dict[str, object] = {
        "request": "r", "choice": 0, "round": index, "time_s": float(index), "batch": 1, "rows": 1 + proposed,
        "context": context, "kind": kind, "drafter": "ngram" if proposed else "none", "proposed": proposed,
        "accepted": accepted, "emitted": accepted + 1, "draft_s": 0.001, "verify_s": 0.1 + 0.01 * proposed,
        "other_s": 0.0,
    }  # fmt: skip
    return StepRecord(**{**values, **more})  # type: ignore[arg-type]


def trace(rounds: list[tuple[int, int]], prompt: int = 5) -> list[StepRecord]:
    records, context = [record(0, 0, 0, prompt)], prompt + 1
    for index, (proposed, accepted) in enumerate(rounds, start=1):
        records.append(record(index, proposed, accepted, context, confidence=(0.5,) * proposed))
        context += accepted + 1
    return records


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda p: (p[0], min(p))), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_trace_replays_to_its_own_rounds(rounds: list[tuple[int, int]]) -> None:
    """What was proposed at each round's beginning, taken as it is, gives the very rounds back."""
    (text,) = texts_of(trace(rounds), ["ngram"])
    assert (text.prompt_tokens, text.tokens) == (5, 1 + sum(a + 1 for _, a in rounds))
    again = fixed_rounds(text, "ngram", 4)
    assert [(r.drafted, r.accepted) for r in again] == rounds
    drafts = text.drafts["ngram"]
    assert drafts.confidence is not None
    for stated, matched, proposed in zip(drafts.confidence, drafts.matched, drafts.proposed, strict=True):
        assert len(stated) == min(matched + 1, proposed)


def test_a_trace_tells_prices(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, {"model": "m", "threads": 2})
    for one in trace([(0, 0), (3, 2), (1, 1), (3, 0)]):
        writer.write(one)
    writer.close()
    probe = probe_of_trace(path)
    medians = {(p.batch, p.width): p.median_s for p in probe.passes}
    assert medians == pytest.approx({(1, 1): 0.1, (1, 2): 0.11, (1, 4): 0.13})
    (drafter,) = probe.drafters
    assert (drafter.name, drafter.steps, drafter.round_s) == ("ngram", (), 0.001)
    assert PassTable(probe.passes).seconds(1, 3) == pytest.approx(0.12)
    assert probe.longest == 3 and probe.threads == 2
    writer = TraceWriter(path, {})
    for one in trace([(3, 1), (0, 0)]):
        writer.write(dataclasses.replace(one, drafter="model:x", draft_s=0.06) if one.proposed else one)
    writer.close()
    assert probe_of_trace(path).drafters[0].steps[0].median_s == pytest.approx(0.02)


@pytest.mark.parametrize("rounds", [[], [(2, 1), (2, 0)]])
def test_a_trace_that_tells_no_price_is_refused(rounds: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, {})
    for one in trace(rounds):
        writer.write(one)
    writer.close()
    with pytest.raises(UsageError, match=r"no decode rounds|one width alone"):
        probe_of_trace(path)


@given(st.lists(texts(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=25)
def test_nothing_beats_the_bound(made: list[ReplayedText]) -> None:
    if all(t.tokens < 2 for t in made):
        return
    probe = made_up_probe(made)
    outcomes = {o.policy: o for o in run_policies(probe, default_policies(probe))}
    tokens = sum(t.tokens - 1 for t in made)
    for outcome in outcomes.values():
        assert outcome.of_oracle <= 1 + 1e-9 and outcome.tokens == tokens
        assert outcome.rounds + outcome.accepted >= tokens, "every token came from a draft or a round"
    assert outcomes["plain"].over_plain == 1.0 and outcomes["plain"].rounds == tokens
    assert outcomes["oracle"].accepted == outcomes["oracle"].drafted, "it drafts nothing in vain"


def test_auto_is_the_engines_auto() -> None:
    """`ngram` is always right, and the engine's `auto` would not ask it beside `suffix`; a draft model it would."""
    size = 60
    right = Drafts((4,) * size, tuple(min(4, size - i) for i in range(size)))
    wrong = Drafts((4,) * size, (0,) * size)

    def auto(**along: Drafts) -> Outcome:
        probe = made_up_probe([ReplayedText("chat", "1", 0.0, 5, size + 1, True, False, along)], step_s=0.01)
        free, model = probe.drafters
        named = [dataclasses.replace(model if name == "b" else free, name=name) for name in along]
        (found,) = run_policies(dataclasses.replace(probe, drafters=tuple(named)), ["auto"])
        return found

    for ngram, suffix in ((right, wrong), (wrong, right)):
        both, alone = auto(ngram=ngram, suffix=suffix), auto(suffix=suffix)
        assert (both.seconds, both.lengths) == (alone.seconds, alone.lengths)
    assert auto(suffix=wrong, b=right).over_plain > auto(suffix=wrong).over_plain
    assert auto(ngram=right).over_plain > 2.0, "a probe without suffix: what there is"


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    along = {"a": Drafts((4,) * 8, (4, 3, 2, 1, 0, 0, 1, 0))}
    probe = made_up_probe([ReplayedText("chat", "1", 0.0, 5, 9, True, False, along)])
    probe = dataclasses.replace(probe, drafters=probe.drafters[:1])
    path = tmp_path / "probe.json"
    probe.write(path)
    assert main(["replay", str(path), "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "oracle" in out and "a:4" in out
    assert main(["replay", str(path), "--controller", "a:4", "--controller", "oracle", "--json"]) == 0
    (fixed, bound) = json.loads(capsys.readouterr().out)["policies"]
    assert fixed["policy"] == "a:4" and fixed["of_oracle"] < bound["of_oracle"] == 1.0
    for options, word in (
        (["--controller", "c:2"], "--controller"),
        (["--controller", "a:9"], "longest"),
        (["--batch", "0"], "--batch"),
    ):
        assert main(["replay", str(path), *options]) == 2
        assert word in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2


def test_a_trace_with_the_prices_of_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ReplayedText("chat", "1", 0.0, 5, 3, True, False, {"ngram": Drafts((1, 1), (1, 0))})
    priced = made_up_probe([text])
    cheap = dataclasses.replace(priced.drafters[0], name="ngram")
    probe, path = tmp_path / "probe.json", tmp_path / "trace.jsonl"
    dataclasses.replace(priced, drafters=(cheap,)).write(probe)
    writer = TraceWriter(path, {})
    for one in trace([(2, 1), (2, 0)]):
        writer.write(one)
    writer.close()
    assert main(["replay", str(path), "--probe", str(probe), "--json", "--controller", "plain"]) == 0
    (plain,) = json.loads(capsys.readouterr().out)["policies"]
    assert plain["seconds"] == pytest.approx(3 * 1.0)
    other = dataclasses.replace(cheap, name="suffix")
    dataclasses.replace(priced, drafters=(other,), texts=()).write(probe)
    assert main(["replay", str(path), "--probe", str(probe)]) == 2
    assert "ngram" in capsys.readouterr().err


def test_a_policy_without_texts_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="texts"):
        run_policies(made_up_probe([]), ["plain"])

"""`plan --probe`: shape, machine, timings and acceptance come from the probe; advice is what counting says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_toys import machine, made_up_probe, texts

from paceline.cli import main
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.advice import advise, loss_under
from paceline.plan.hindsight import fixed_rounds
from paceline.plan.importers import read_acceptance
from paceline.plan.pass_table import PassTable
from paceline.plan.probe_file import Drafts, PassTime, ProbeFile, ReplayedText
from paceline.plan.probe_summary import compare_probes, summarise_probe, within_context

CONFIG = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "model_type": "llama",
}  # fmt: skip


def answer(matched: tuple[int, ...], task: str = "chat", prompt: str = "0", loops: bool = False) -> ReplayedText:
    """Drafter `a` offers four drafts everywhere, `b` none."""
    size = len(matched)
    drafts = {"a": Drafts((4,) * size, matched), "b": Drafts((0,) * size, (0,) * size)}
    return ReplayedText(task, prompt, 0.0, 40, size + 1, True, loops, drafts)


def probe_of(*made: ReplayedText) -> ProbeFile:
    def seconds(batch: int, width: int, context: int) -> float:
        return 0.02 + 0.0005 * batch * width + 2e-7 * batch * context

    passes = machine(seconds, contexts=(256, 1024))
    return dataclasses.replace(
        made_up_probe(made), dtype="bfloat16", config=CONFIG, weight_bytes=270_000_000, memory_bytes=64e9, passes=passes
    )


GOOD = answer((4, 3, 2, 1, 0) * 8)


def test_plan_from_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "probe.json"
    probe_of(GOOD, answer((1, 0, 2, 0, 0) * 8, prompt="1")).write(path)
    asked = ["plan", "--probe", str(path), "--context-tokens", "256", "--output-tokens", "64", "--concurrency", "4"]
    assert main([*asked, "--draft", "a", "--json"]) == 2, "the made-up drafter is no kind the planner knows"
    capsys.readouterr()
    renamed = json.loads(path.read_text().replace('"a":', '"ngram":').replace('"b":', '"suffix":'))
    for drafter, name in zip(renamed["drafters"], ("ngram", "suffix"), strict=True):
        drafter["name"], drafter["steps"] = name, []
    path.write_text(json.dumps(renamed))
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {c["mechanism"] for c in plan["candidates"]} == {"none", "ngram", "suffix"}
    assert plan["calibration"]["median_error"] < 0.1, "the machine is near the cost model's kind"
    assert plan["answer"]["best"]["mechanism"] == "ngram" and plan["answer"]["best"]["draft_length"] >= 2
    assert main([*asked, "--draft", "eagle3"]) == 2
    assert "eagle3" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-3.1-8b"]) == 2
    assert "--probe" in capsys.readouterr().err


def test_acceptance_has_the_acceptance_length_of_real_rounds(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    text = answer((2, 0, 1) * 20)
    probe_of(text).write(path)
    found = read_acceptance(f"probe:{path}#a")
    for length, lengths in ((1, 1.5), (2, 3.0), (3, 3.0), (4, 3.0)):
        assert 60 / len(fixed_rounds(text, "a", length)) == lengths
    assert list(found.lengths(4)) == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0]), "increments that rise are pooled"
    with pytest.raises(InvalidParameter, match="one the probe measured"):
        read_acceptance(f"probe:{path}#c")
    dataclasses.replace(probe_of(GOOD), dtype="float32").write(tmp_path / "float.json")
    with pytest.raises(UsageError, match="float32"):
        read_acceptance(f"probe:{tmp_path / 'float.json'}#a")


@given(st.lists(texts(), min_size=1, max_size=3), st.sampled_from([1, 4]))
@settings(max_examples=15, deadline=None)
def test_advice_is_the_best_of_all_settings(made: list[ReplayedText], batch: int) -> None:
    """Twin: seconds of every setting on every text, one by one."""
    made = [t for t in made if t.tokens > 1]
    if not made:
        return
    probe = made_up_probe(made)
    (advice,) = advise(probe, made, [batch])
    table = PassTable(probe.passes)
    for (name, length), gain in advice.gains:
        logs = []
        for text in made:
            plain = (text.tokens - 1) * table.seconds(batch, 1)
            if name is None:
                logs.append(0.0)
                continue
            extra = {"a": lambda k: 0.001 * batch, "b": lambda k: 0.1 * k}[name]
            rounds = fixed_rounds(text, name, length)
            took = sum(
                table.seconds(batch, 1 + r.drafted) + (extra(r.drafted) if r.drafted else 0) for r in rounds
            )
            asked = sum(batch * 0.001 for r in rounds if name == "a" and not r.drafted)
            logs.append((math.log(plain / (took + asked)), math.log(plain / took)))
        low = math.exp(sum(x if isinstance(x, float) else min(x) for x in logs) / len(logs))
        high = math.exp(sum(x if isinstance(x, float) else max(x) for x in logs) / len(logs))
        assert low - 1e-9 <= gain <= high + 1e-9
    assert advice.gain.value == advice.gains[0][1] == max(g for _, g in advice.gains)
    assert advice.oracle >= advice.gain.value - 1e-9 and 0 <= advice.regret < 1


def test_two_probes_of_one_machine_lose_nothing_to_one_another() -> None:
    one, other = probe_of(GOOD), probe_of(GOOD)
    rows = compare_probes(one, other)
    assert [r["batch"] for r in rows] == [1, 2, 4, 8] and all(r["second_loses_under_first"] == 0.0 for r in rows)
    worse = advise(one, [GOOD], [1])
    never = [dataclasses.replace(worse[0], setting=(None, 0))]
    lost = loss_under(worse, never)[1]
    assert lost == pytest.approx(1 - 1 / worse[0].gain.value)


def test_summary_counts_loops_and_contexts() -> None:
    looping = answer((4,) * 20, prompt="1", loops=True)
    summary = summarise_probe(probe_of(answer((1, 0) * 20), looping))
    assert {a["group"] for a in summary["advice"]} == {"all", "without loops", "chat"}
    both, kept = (
        next(a for a in summary["advice"] if (a["group"], a["batch"]) == (g, 1)) for g in ("all", "without loops")
    )
    assert both["gain"] > kept["gain"]
    part = within_context(GOOD, "a", 45, 50)
    assert part is not None and part.matched == GOOD.drafts["a"].matched[5:10]
    assert within_context(GOOD, "a", 0, 30) is None


def test_few_repeats_do_not_look_sure() -> None:
    """One repeat says nothing of its spread: the interval is wider than that of many equal ones."""
    many = probe_of(GOOD, answer((0,) * 40, prompt="1"))
    single = tuple(PassTime(p.batch, p.width, p.context, p.seconds[:1]) for p in many.passes)
    once = dataclasses.replace(many, passes=single)
    widths = [a.gain.high - a.gain.low for (a,) in (advise(p, [GOOD], [1]) for p in (many, once))]
    assert widths[0] == pytest.approx(0.0) and widths[1] > 0.05

"""Tables of paired runs: what is counted, what is left out, and that looping prompts leave for every arm."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from paceline.bench.paired import Run, RunKey, Sample, first_speed
from paceline.bench.speed_report import (
    arm_table,
    content,
    looping_prompts,
    markdown,
    partings,
    ratio_table,
    summarise_arm,
)


def run(kind: str, prompt: str, arm: str, decode_s: float, tokens: tuple[int, ...] = tuple(range(21))) -> Run:
    drafting = arm == "auto"
    sample = Sample(
        prompt_tokens=4,
        token_ids=tokens,
        finish_reason="stop",
        first_s=0.1 if arm == "plain" else 0.2,
        decode_s=decode_s,
        rounds=10 if drafting else 20,
        draft_rounds=5 if drafting else 0,
        emitted=20,
        emitted_in_draft_rounds=15 if drafting else 0,
        target_s=0.6 * decode_s,
        draft_s=0.3 * decode_s if drafting else 0.0,
        other_s=0.1 * decode_s if drafting else 0.4 * decode_s,
    )
    return Run(RunKey(kind, prompt, arm, 0), sample)


def two_kinds() -> list[Run]:
    runs = [run("chat", p, "plain", 1.0) for p in "ab"] + [run("chat", p, "auto", 0.5) for p in "ab"]
    return [*runs, run("code", "a", "plain", 1.0), run("code", "a", "auto", 0.125)]


def test_ratios_by_kind_and_over_the_mix() -> None:
    lines = ratio_table(two_kinds(), {"auto": "plain"}).splitlines()
    assert lines[0] == "| kind | prompts | outputs that loop | auto / plain |"
    assert lines[2] == "| chat | 2 | 0 % | 2.00 (2.00 to 2.00) |"
    assert lines[3] == "| code | 1 | 0 % | 8.00 |"
    assert lines[4].startswith("| mix | 3 | 0 % | 3.17")  # (2 * 2 * 8) ** (1/3)
    first = ratio_table(two_kinds(), {"auto": "plain"}, first_speed).splitlines()
    assert first[3] == "| code | 1 | 0 % | 0.50 |"


def test_what_an_arm_did() -> None:
    auto = summarise_arm(two_kinds(), "auto", "plain")
    assert (auto.prompts, auto.same, auto.compared) == (3, 3, 3)
    assert auto.acceptance_length == 3.0 and auto.tokens_per_round == 2.0
    assert auto.outside_share == pytest.approx(0.4) and auto.first_s == pytest.approx(0.2)
    by_model = summarise_arm(two_kinds(), "auto", "plain", drafts_by_model=True)
    assert by_model.outside_share == pytest.approx(0.1)
    plain = summarise_arm(two_kinds(), "plain", "plain")
    assert plain.acceptance_length is None and plain.compared == 0
    assert plain.tokens_per_s == pytest.approx(20.0)


def test_an_arm_that_does_not_say_has_no_share() -> None:
    runs = [Run(r.key, replace(r.sample, target_s=None)) for r in two_kinds()]
    assert summarise_arm(runs, "plain", "plain").outside_share is None
    assert "| chat | plain | 20.0 | 100 |  | 1.00 |  |  |" in arm_table(runs, ["plain", "none"], "plain")


def test_a_looping_output_takes_its_prompt_out_for_every_arm() -> None:
    runs = [*two_kinds(), run("chat", "a", "model", 1.0, (*range(9), *[7] * 40, 2))]
    assert looping_prompts(runs) == {("chat", "a")}
    assert "| chat | 2 | 50 % |" in ratio_table(runs, {"auto": "plain"})


def test_the_ending_token_is_no_content() -> None:
    sample = run("chat", "a", "plain", 1.0).sample
    assert content(sample) == tuple(range(20))
    assert content(replace(sample, finish_reason="length")) == tuple(range(21))


@pytest.mark.parametrize("blind", [False, True], ids=["sound", "fault"])
def test_pl_12_arms_with_other_outputs_are_named(blind: bool) -> None:
    """The report flags every run whose text is not its baseline's. The fault compares lengths alone."""
    other = (*range(20), 99)
    runs = [run("chat", "a", "plain", 1.0), run("chat", "a", "auto", 1.0, other)]
    found = [
        (parted.key.arm, index)
        for parted, index in partings(runs, "plain")
        if not blind or len(parted.sample.token_ids) != len(runs[0].sample.token_ids)
    ]
    with pytest.raises(AssertionError) if blind else nullcontext():
        assert found == [("auto", 20)], "outputs of one length and other tokens pass for equal"


def test_partings_say_where() -> None:
    runs = [run("chat", "a", "plain", 1.0), run("chat", "a", "auto", 1.0, (0, 1, 9))]
    ((parted, index),) = partings(runs, "plain")
    assert parted.key.arm == "auto" and index == 2
    assert summarise_arm(runs, "auto", "plain").same == 0
    assert partings(runs, "absent") == []


def test_markdown() -> None:
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"

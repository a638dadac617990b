"""A controller that starts from a probe knows its prices and what its texts showed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "plan"))

from probe_toys import machine, made_up_probe

from paceline.errors import UsageError
from paceline.plan.control.controller import Controller
from paceline.plan.control.cost import LiveCost, StepTimes
from paceline.plan.control.from_probe import check_same_engine, draft_steps, pass_steps, teach
from paceline.plan.control.records import DrafterFacts
from paceline.plan.probe_file import DrafterTimes, Drafts, ProbeFile, ReplayedText


def probe() -> ProbeFile:
    """Drafter `a` matches three of its four drafts everywhere, `b` none of its own."""
    size = 30
    three, none = Drafts((4,) * size, (3,) * size), Drafts((4,) * size, (0,) * size, ((0.9,),) * size)
    return made_up_probe([ReplayedText("chat", "1", 0.8, 5, size + 1, False, False, {"a": three, "b": none})])


def controller(names: tuple[str, ...] = ("a", "b", "c")) -> Controller:
    return Controller([DrafterFacts(n) for n in names], LiveCost(StepTimes((1, 2), (1.0, 1.1))))


def test_outcomes_of_the_replay_are_learnt() -> None:
    made = controller()
    taught = teach(made, probe())
    a, b, unknown = made.tables
    assert taught == sum(min(4, 30 - i) for i in range(30)) + 30, "a is tried as deep as the text is long, b once"
    assert a.estimate(0, None, 2) > 0.9 and a.estimate(3, None, 2) < 0.3
    assert b.estimate(0, 0.9, 2) < 0.3 and b.estimate(0, None, 2) < 0.3, "whatever it claims"
    assert unknown.outcomes(0) == 0.0
    assert a.estimate(0, None, 2) >= a.estimate(0, None, 0), "greedy text knows it by way of all temperatures"


def test_prices_are_the_probes() -> None:
    seed = pass_steps(probe())
    assert [seed.at(r) for r in (1, 4, 16)] == pytest.approx([1.0, 1.15, 1.75])
    four = pass_steps(probe(), 4)
    assert four.at(1) == pytest.approx(1.15) and four.key_s == four.sequence_s == 0.0
    steps = draft_steps(probe().drafter("b"))
    assert steps is not None and steps.at(1) == pytest.approx(0.1)
    assert draft_steps(probe().drafter("a")) is None
    single = DrafterTimes("b", "model", 0.0, probe().drafter("b").steps[:1])
    made = draft_steps(single)
    assert made is not None and made.at(32) > made.at(1)


def test_what_a_sequence_adds_is_the_probes() -> None:
    passes = machine(lambda batch, width, _: 1.0 + 0.05 * batch * width + 0.02 * batch)
    seed = pass_steps(replace(probe(), passes=passes))
    assert seed.sequence_s == pytest.approx(0.02)
    assert LiveCost(seed).seconds(8, 0, 4) == pytest.approx(1.0 + 0.4 + 0.08)


@pytest.mark.parametrize(
    ("dtype", "weights", "threads", "word"),
    [("bfloat16", 1000, 1, "dtype"), ("float32", 999, 1, "weights"), ("float32", 1000, 8, "threads")],
)
def test_a_probe_of_another_engine_is_refused(dtype: str, weights: int, threads: int, word: str) -> None:
    check_same_engine(probe(), "float32", 1000, 1)
    with pytest.raises(UsageError, match=word):
        check_same_engine(probe(), dtype, weights, threads)

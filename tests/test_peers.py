"""`bench.peers`: names of arms, children and their failures, ratios and partings; end to end with Paceline's arms."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_folder, tiny_backend, tiny_model

from paceline.bench.results import ResultFile
from paceline.errors import InvalidParameter, RequestFailed, UsageError

sys.path.append(str(Path(__file__).parents[1]))  # the programs lie outside the package

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def module(name: str) -> ModuleType:
    return importlib.import_module(f"bench.peers.{name}")


# -- arms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["paceline:int8:auto", "llama.cpp:file:ngram-mod/8/4/16", "openvino:fp16:plain*8", "llama.cpp:Q8_0:draft/8/0.5"],
)
def test_an_arm_is_read_as_it_is_written(text: str) -> None:
    assert str(module("arms").parse_arm(text)) == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("openvino:fp16", "ENGINE:WEIGHTS:MODE"),
        ("vllm:fp16:plain", "engines paceline"),
        ("openvino:Q4_1:plain", "weights fp16"),
        ("openvino:fp16:lookup/a", "modes plain"),
        ("openvino:fp16:plain/3", "modes plain"),
        ("openvino:fp16:ngram-mod", "lookup/N"),
        ("transformers:bfloat16:plain*8", "one stream"),
    ],
)
def test_an_arm_that_cannot_be_is_refused_with_what_is_allowed(text: str, names: str) -> None:
    with pytest.raises(InvalidParameter, match=names):
        module("arms").parse_arm(text)


def test_every_default_arm_is_one() -> None:
    arms = module("arms")
    assert [str(arms.parse_arm(text)) for text in arms.DEFAULT_ARMS] == list(arms.DEFAULT_ARMS)


def test_arms_of_a_peer_that_is_not_installed_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms, program = module("arms"), module("__main__")
    both = [arms.parse_arm(t) for t in ("openvino:fp16:plain", "paceline:float32:plain")]
    kept, envs = program.available(tmp_path, both, None)
    assert (kept, list(envs)) == (both[1:], ["paceline"])
    assert "openvino:fp16:plain is left out" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no arm is left"):
        program.available(tmp_path, both[:1], None)
    with pytest.raises(UsageError, match="--draft"):
        program.available(tmp_path, [arms.parse_arm("paceline:float32:auto+draft")], None)


# -- children --------------------------------------------------------------------------------------------------


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A child that prints where it should not, answers, fails when asked to, and ends when asked to."""
    child = module("child")
    lines = (child.CHILDREN / "lines.py").read_text()
    (tmp_path / "lines.py").write_text(lines)
    (tmp_path / "echo.py").write_text(
        "import sys\nfrom lines import serve\nprint('a library says hello')\n"
        "serve({'twice': lambda x: print('noise') or {'x': 2 * x}, 'fail': lambda: 1 / 0, 'end': lambda: sys.exit(3)})"
    )
    monkeypatch.setattr(child, "CHILDREN", tmp_path)
    return tmp_path


def test_a_child_answers_and_tells_of_failures(echo: Path) -> None:
    log = echo / "log"
    with module("child").Child(Path(sys.executable), "echo.py", "echo", 1, log) as child:
        assert child.ask("twice", x=21) == {"x": 42}
        with pytest.raises(RequestFailed, match="echo: ZeroDivisionError"):
            child.ask("fail")
        assert child.ask("twice", x="a") == {"x": "aa"}
        with pytest.raises(RequestFailed, match="ended with code 3"):
            child.ask("end")
    assert "noise" in log.read_text()


# -- comparing -------------------------------------------------------------------------------------------------

SPEEDS = st.floats(0.5, 100.0)


@settings(deadline=None)  # the first example imports what is tested
@given(st.lists(st.tuples(SPEEDS, SPEEDS), min_size=1, max_size=6))
def test_a_ratio_is_of_the_same_prompt_in_the_same_round(pairs: list[tuple[float, float]]) -> None:
    speed, arms = module("speed"), module("arms")
    one, other = arms.parse_arm("paceline:float32:plain"), arms.parse_arm("openvino:fp16:plain")
    runs = [
        speed.Measured(str(arm), "k", f"p{i % 2}", i // 2, ((1,),), 11, 0.1, 10.0 / value)
        for i, pair in enumerate(pairs)
        for arm, value in zip((one, other), pair, strict=True)
    ]
    alone = speed.Measured(str(one), "k", "p9", 0, ((1,),), 11, 0.1, 1.0)
    found = speed.paired([*runs, alone], one, other)
    assert found == pytest.approx({("k", f"p{i % 2}", i // 2): a / b for i, (a, b) in enumerate(pairs)})


def test_a_report_counts_texts_that_part_from_their_own_engines_plain() -> None:
    speed, arms = module("speed"), module("arms")
    names = ["openvino:fp16:plain", "openvino:fp16:lookup/10", "openvino:fp16:plain*2"]
    plain = [((1, 2, 3),), ((4, 5, 6),)]
    runs = [speed.Measured(names[0], "k", f"p{i}", 0, text, 3, 0.1, 1.0) for i, text in enumerate(plain)]
    runs.append(speed.Measured(names[1], "k", "p0", 0, ((1, 2, 3),), 3, 0.1, 0.5))
    runs.append(speed.Measured(names[1], "k", "p1", 0, ((4, 9, 6),), 3, 0.1, 0.5))
    runs.append(speed.Measured(names[2], "k", speed.ALL, 0, ((1, 2, 3), (4, 5)), 5, None, 1.0))
    text = speed.report(runs, [arms.parse_arm(n) for n in names])
    assert "| openvino:fp16:lookup/10 | 4.0 | 100 | 0.50 | 1 of 2 |" in text
    assert "- openvino:fp16:lookup/10: k 2 at token 1" in text
    assert "- openvino:fp16:plain*2: k 2 at token 2" in text


def test_divergence_is_that_of_its_definition() -> None:
    quality = module("quality")
    generator = np.random.default_rng(0)
    one, two = generator.normal(size=(2, 5, 7)).astype(np.float32)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (one.astype(float), two.astype(float)))
    found = quality.divergence(one, two)
    slow = [sum(a * math.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    assert found.nats == pytest.approx(slow)
    assert found.same.tolist() == [
        a.tolist().index(max(a)) == b.tolist().index(max(b)) for a, b in zip(p, q, strict=True)
    ]
    assert quality.divergence(one, one + 3.0).nats == pytest.approx(np.zeros(5), abs=1e-6)


def test_a_beginning_that_texts_share_counts_once() -> None:
    seen: set[tuple[int, ...]] = set()
    texts = [[1, 2, 3], [1, 2, 4, 5], [2], [1, 2, 4, 6]]
    assert [module("quality").new_positions(ids, seen) for ids in texts] == [[0, 1, 2], [2, 3], [0], [3]]


# -- measuring -------------------------------------------------------------------------------------------------


class Fake:
    """Answers with the prompt backwards, end token and all."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, ...]]] = []

    def ask(self, op: str, prompts: list[tuple[int, ...]], max_tokens: int) -> dict[str, Any]:
        self.asked.append(prompts)
        answers = [{"token_ids": [*p[::-1], 0], "tokens": len(p) + 1, "first_s": 0.1, "decode_s": 0.2} for p in prompts]
        return {"answers": answers, "wall_s": 1.0}


def test_arms_are_asked_in_turns_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    speed, arms = module("speed"), module("arms")
    prompts = [speed.Prompt("k", "a", (1, 2)), speed.Prompt("k", "b", (3, 4, 5))]
    names = ["paceline:float32:plain", "openvino:fp16:plain", "openvino:fp16:plain*2"]

    def run(path: Path) -> tuple[list[Any], list[Fake]]:
        fakes = [Fake() for _ in names]
        children = {arms.parse_arm(name): fake for name, fake in zip(names, fakes, strict=True)}
        with ResultFile(path, {"program": "peers"}) as results:
            found = speed.measure(
                children,
                prompts,
                results,
                rounds=2,
                max_tokens=8,
                stop_ids=frozenset({0}),
                seconds=60.0,
                say=lambda text: None,
            )
        return found, fakes

    whole, fakes = run(tmp_path / "r")
    assert [len(f.asked) - 1 for f in fakes] == [4, 4, 2]  # but for the first call, which is not measured
    assert fakes[2].asked[1] == [(1, 2), (3, 4, 5)]
    assert [m.texts for m in whole if m.arm == names[2]] == [((2, 1), (5, 4, 3))] * 2
    assert next(m for m in whole if m.arm == names[0]).speed == pytest.approx(2 / 0.2)
    assert next(m for m in whole if m.arm == names[2]).speed == pytest.approx(7 / 1.0)
    lines = (tmp_path / "r").read_text().splitlines()
    (tmp_path / "cut").write_text("\n".join(lines[:4]) + "\n")
    again, fakes = run(tmp_path / "cut")
    assert sum(len(f.asked) - 1 for f in fakes) == len(whole) - 3
    assert {(m.arm, *m.place) for m in again} == {(m.arm, *m.place) for m in whole}


def test_first_tokens_of_long_prompts_are_held_against_the_same_round() -> None:
    speed, arms = module("speed"), ["transformers:bfloat16:plain", "paceline:int8:plain"]
    seconds = {(arms[0], 0): 3.0, (arms[0], 1): 8.0, (arms[1], 0): 1.0, (arms[1], 1): 2.0}
    results = [
        speed.Measured(arm, speed.LONG, "99 tokens", number, ((1,),), 1, first, 0.0)
        for (arm, number), first in seconds.items()
    ]
    told = speed.report(results, [module("arms").parse_arm(a) for a in arms])
    assert f"| {arms[0]} | 5.500 (3.50; 3.00 to 4.00) |" in told
    assert f"| {arms[1]} | 1.500 (1.00; 1.00 to 1.00) |" in told


def test_a_picture_has_a_bar_an_arm_to_one_scale() -> None:
    speed, arms = module("speed"), [module("arms").parse_arm(a) for a in ("llama.cpp:file:plain", "paceline:int8:auto")]
    spent = dict(zip(arms, (1.0, 0.5), strict=True))
    results = [speed.Measured(str(arm), "peers", "one", 0, ((1,),), 11, 0.1, s) for arm, s in spent.items()]
    drawn = ElementTree.fromstring(module("picture").picture(results, arms, "a < b"))
    bars = [e for e in drawn.iter() if e.tag.endswith("rect")]
    texts = [e.text for e in drawn.iter() if e.tag.endswith("text")]
    assert texts == ["a < b", "1 stream, tokens/s", "paceline int8 auto", "20", "llama.cpp file plain", "10"]
    assert float(bars[0].get("width", 0)) == pytest.approx(2 * float(bars[1].get("width", 0)), rel=1e-2)


def test_paceline_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_folder(tmp_path / "m", tiny_model(seed=3, max_position_embeddings=1024), tiny_backend())
    (Path(model) / "chat_template.jinja").write_text(TEMPLATE)
    cases = tmp_path / "shared" / "cases"
    cases.mkdir(parents=True)
    (cases / "peer_prompts.py").write_text("PROMPTS = [('one', 'the fox'), ('two', 'a fox a fox a fox')]")
    common = ["--envs", str(tmp_path), "--model", str(model), "--shared", str(cases.parent), "--threads", "1"]
    speed = ["speed", *common, "--max-tokens", "6", "--rounds", "1"]
    assert module("__main__").main([*speed, "--arms", "paceline:float32:plain", "paceline:float32:auto*2"]) == 0
    out = capsys.readouterr().out
    assert "| paceline:float32:auto*2 |" in out and "2 of 2" in out and "- none" in out
    assert module("__main__").main(["quality", *common, "--arms", "paceline:float32"]) == 0
    assert " 100.00 % | 0.00000 (0.00000 to 0.00000) |" in capsys.readouterr().out.replace("-0.00000", "0.00000")

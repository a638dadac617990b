"""The planner's verbs: what they print, their exit codes, their speed of loading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_cli

from paceline.plan.document import SCHEMA, Plan, read_plan
from paceline.report.plan_html import plan_page

BASE = ["plan", "--model", "llama-3.1-8b", "--hardware", "h100", "--concurrency", "64"]
EAGLE = ["--draft", "eagle3:org/head", "--acceptance", "published:llama-3.1-8b-eagle3-sharegpt"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plan.json"
    assert run_cli([*BASE, *EAGLE, "--output", str(path)]) == 0
    capsys.readouterr()
    return path


def test_a_plan_says_what_a_person_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_cli(
            [
                *BASE,
                *EAGLE,
                "--draft",
                "ngram:0.3",
                "--acceptance",
                "ngram=0.5,0.4",
                "--min-tokens-per-user",
                "80",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for words in (
        "with 80 tokens/s a user",
        "next best",
        "Draft length of eagle3",
        "Break-even",
        "Where a round's",
        "1. Fill the products",
        "5. Choose the mechanism",
    ):
        assert words in out


def test_json_is_the_plan_that_output_writes(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*BASE, *EAGLE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan_file.read_text(encoding="utf-8"))
    assert read_plan(plan_file)["schema"] == SCHEMA


def test_every_figure_of_a_plan_has_unit_range_and_origin(plan_file: Path) -> None:
    def check(value: object) -> int:
        if isinstance(value, dict):
            if {"value", "low", "high"} <= value.keys():
                assert value["low"] <= value["value"] <= value["high"]
                assert value["unit"]
                assert value["origin"] in ("measured", "interpolated", "roofline", "assumed")
                assert value["source"]
                return 1
            return sum(check(v) for v in value.values())
        return sum(check(v) for v in value) if isinstance(value, list) else 0

    assert check(read_plan(plan_file).data) > 100


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("deepseek-v3", "b300", "dspark", "published:"))
    assert run_cli(["plan", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) >= 25


def test_explain_whatif_export(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["explain", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("Why this", "Why not that", "AL(3)", "(roofline:", "aiconfigurator"))
    assert run_cli(["whatif", str(plan_file), "--hardware", "h200", "--acceptance", "0.9,0.9"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200 SXM" in out
    assert run_cli(["export", str(plan_file), "--to", "vllm", "--output", str(tmp_path / "out")]) == 0
    assert (
        (tmp_path / "out" / "launch.sh")
        .read_text(encoding="utf-8")
        .startswith("vllm serve meta-llama/Llama-3.1-8B")
    )
    assert run_cli(["export", str(plan_file), "--to", "transformers"]) == 3
    assert "cannot draft with eagle3" in capsys.readouterr().err


def test_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timings = tmp_path / "t.csv"
    rows = ["batch,draft_length,round_ms,acceptance_length", "1,0,7.6,", "1,3,10.9,2.3", "1,6,12.8,2.5",
            "64,0,13.1,", "64,3,19,2.3", "64,6,23,2.5"]  # fmt: skip
    timings.write_text("\n".join(rows) + "\n", encoding="utf-8")
    out = tmp_path / "c.json"
    command = [
        "calibrate",
        "llama-3.1-8b",
        "--hardware",
        "h100",
        "--draft",
        "eagle3",
        "--acceptance",
        "AL:2.3@3",
    ]
    assert run_cli([*command, "--timings", str(timings), "--suggest", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6 timings fitted" in printed
    assert "measure next: batch" in printed
    assert read_plan(out)["calibration"]["rows"] == 6
    assert run_cli(["calibrate", str(out), "--suggest"]) == 0
    assert capsys.readouterr().out.count("batch") == 6


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["validate"]) == 0
    assert "median error" in capsys.readouterr().out
    assert run_cli(["validate", "--set", "dspark"]) == 2
    assert run_cli(["validate", "--data", "nowhere", "--set", "dspark"]) == 2


BAD = [
    (["--model", "llama-3.1-9b"], 2, "llama-3.1-8b"),
    (["--hardware", "h150"], 2, "h100"),
    (["--draft", "medusa:x", "--acceptance", "0.5"], 2, "draft kind"),
    (["--draft", "eagle3"], 2, "one for each --draft"),
    (["--draft", "eagle3", "--acceptance", "1.5"], 2, "from 0 to 1"),
    (["--draft", "eagle3", "--acceptance", "AL:5@3"], 2, "1 to 4"),
    (
        ["--draft", "eagle3", "--acceptance", "published:llama-3.1-8b-eagle3-gsm"],
        2,
        "published:llama-3.1-8b-eagle3-gsm",
    ),
    (["--draft", "eagle3", "--survival", "0.5,0.6"], 2, "--acceptance"),
    (["--draft", "auto", "--acceptance", "0.5"], 2, "at run time"),
    (["--draft", "eagle3", "--acceptance", "0.5", "--acceptance", "0.6"], 2, "one for each --draft"),
    (["--devices", "3", "--tp", "2"], 2, "multiple of the 2"),
    (["--context-tokens", "-5"], 2, "context-tokens"),
    (["--output-tokens", "0"], 2, "output-tokens"),
    (["--concurrency", "0"], 2, "concurrency"),
    (["--max-draft-length", "0"], 2, "1 to 64"),
    (["--model", "llama-3.1-70b"], 3, "GB too little"),
    (["--min-tokens-per-user", "100000"], 3, "the fastest reaches"),
    (["--max-ttft", "0.000001"], 3, "first token"),
    (["--engine", "triton"], 2, "vllm"),
]


@pytest.mark.parametrize(
    ("extra", "code", "words"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_bad_input_gets_a_sentence(
    extra: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli([*BASE, *extra]) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_model_that_does_not_fit_hears_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    run_cli([*BASE, "--model", "llama-3.1-70b"])
    err = capsys.readouterr().err
    assert "--tp 4 would fit" in err
    assert run_cli([*BASE, "--model", "llama-3.1-70b", "--tp", "4"]) == 0


def test_broken_plans_are_refused(
    tmp_path: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    for text, words in (
        ("{", "not JSON"),
        ("{}", "schema"),
        ("[]", "object"),
        (json.dumps({"schema": SCHEMA}), "lacks"),
    ):
        broken.write_text(text, encoding="utf-8")
        assert run_cli(["explain", str(broken)]) == 2
        assert words in capsys.readouterr().err
    assert run_cli(["explain", str(tmp_path / "none.json")]) == 2


def test_the_page_stands_alone(plan_file: Path) -> None:
    page = plan_page(read_plan(plan_file))
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<link" not in page
    assert "src=" not in page
    assert page.count("<script") == 2
    evil = json.loads(plan_file.read_text(encoding="utf-8"))
    evil["scenario"]["model"] = "</script><script>alert(1)</script>"
    assert "<script>alert" not in plan_page(Plan(evil))


def test_neither_torch_nor_scipy_is_loaded() -> None:
    code = (
        "import sys, importlib\n"
        "for verb in ('plan', 'explain', 'whatif', 'export', 'calibrate', 'validate'):\n"
        "    importlib.import_module('paceline.cli.' + verb)\n"
        "assert 'numpy' not in sys.modules, 'a verb loads numpy before it runs'\n"
        "import paceline.plan.planner, paceline.plan.export, paceline.report.plan_html, "
        "paceline.plan.validate.runner\n"
        "assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

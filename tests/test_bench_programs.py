"""The benchmark programs end to end on a tiny random model: they measure, go on, report, and see a fault."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import save_folder, tiny_backend, tiny_model

BENCH = Path(__file__).parents[1] / "bench"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = tiny_model(seed=3, max_position_embeddings=1024)
    return str(save_folder(tmp_path_factory.mktemp("model") / "m", tiny, tiny_backend()))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("shared")
    files = {
        "spec_bench/question.clean_subset.jsonl": [{"question_id": i, "turns": [f"fox {i} {i} {i}"]} for i in range(4)],
        "code_edit_humanevalfix/edit_prompts.jsonl": [
            {"id": str(i), "lang": "python", "prompt": f"print({i})\n" * 3} for i in range(4)
        ],
        "json_extraction_snips/snips_slots.jsonl": [
            {"intent": f"Do{i % 2}", "prompt": f'with keys from ["a", "b{i}"] of {i}'} for i in range(4)
        ],
    }
    for name, rows in files.items():
        path = root / "workloads" / name
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(root)


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    return int(module.main())


def test_equality_goes_on_and_sees_a_planted_difference(
    model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five tokens: the sixth of Transformers' first text is a padding id, which we never produce."""
    module, output = program("equality"), tmp_path / "r.jsonl"
    arguments = ["--model", model, "--shared", prompts, "--output", str(output), "--max-tokens", "5"]
    arguments += ["--spec-bench", "2", "--code-edit", "2", "--threads", "1", "--drafters", "ngram", "model"]
    assert call(module, monkeypatch, *arguments) == 0
    assert "Texts that differ and may not: 0." in capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    kept = [lines[0]]
    for row in lines[1:]:
        if (row["arm"], row["temperature"]) == ("ngram", 0.0):
            continue  # to be made again
        if row["arm"] == "plain" and row["batch"] == 8 and row["temperature"] == 0.0:
            row["token_ids"][2] += 1  # the fault
        kept.append(row)
    output.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert call(module, monkeypatch, *arguments) == 1
    assert "T=0 ngram D=7 batch 8, spec_bench/0: at token 2, gap" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == len(lines)


def test_acceptance_by_rule_goes_on_and_gives_both_comparisons(
    model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft is the target itself: each rule keeps every draft, on the same proposals exactly so."""
    output = tmp_path / "r.jsonl"
    arguments = ["--model", model, "--draft", model, "--shared", prompts, "--output", str(output), "--prompts", "5"]
    arguments += ["--max-tokens", "10", "--draft-length", "2", "--threads", "1", "--dtype", "float32"]
    assert call(program("acceptance_by_rule"), monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    lines = output.read_text().splitlines(keepends=True)
    assert len(lines) == 16 and "| own runs | 15 | 3.000" in out
    for row in (json.loads(line) for line in lines[1:]):
        expected = 0 if row["arm"] == "coupled" else 2 * row["proposals"]
        assert all(abs(value - expected) < 1e-3 for value in row["expected"].values())
    output.write_text("".join(lines[:-4]))
    assert call(program("acceptance_by_rule"), monkeypatch, *arguments) == 0
    assert len(output.read_text().splitlines()) == 16


def test_the_cost_of_tiles_is_a_table(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--dtype", "float32", "--rows", "8", "12", "--context", "16"]
    assert call(program("deterministic_cost"), monkeypatch, *arguments, "--repeats", "2", "--threads", "1") == 0
    out = capsys.readouterr().out
    assert "\n| 8 | " in out and "\n| 12 | " in out
    assert call(program("deterministic_cost"), monkeypatch, *arguments, "--repeats", "1") == 2


def test_round_overhead_counts_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = program("round_overhead")
    monkeypatch.setattr(module, "TOKENS", 24)
    before = {(owner, name): vars(owner)[name] for owner, name, _ in module.PARTS}
    arguments = ["--batch", "1", "2", "--draft", "none", "auto+model", "--temperature", "0.8", "--repeats", "1"]
    arguments.append("--trace")
    assert call(module, monkeypatch, *arguments) == 0
    plain, drafted = capsys.readouterr().out.split("batch 1, auto+model")
    assert "0.00 drafts" in plain and "controller" not in plain and "0.00 drafts" not in drafted
    assert drafted.count("controller: choose") == drafted.count("trace lines") == 2 and "model: propose" in drafted
    assert all(vars(owner)[name] is function for (owner, name), function in before.items()), "a clock was left behind"


def test_round_overhead_in_the_rounds_of_a_model(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = program("round_overhead")
    monkeypatch.setattr(module, "TOKENS", 12)
    monkeypatch.setattr(module, "PROMPT", 20)
    assert call(module, monkeypatch, "--model", model, "--batch", "1", "2", "--repeats", "1") == 0
    out = capsys.readouterr().out
    for words in ("ms a round, the controller ", "controller: choose", "suffix: propose"):
        assert out.count(words) == 2, words


def test_kinds_of_drafts_are_a_table(
    model: str, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--shared", prompts, "--draft", "layer-skip:1", "--draft", f"model:{model}"]
    arguments += ["--kinds", "code_edit", "--max-tokens", "6", "--threads", "1", "--dtype", "float32"]
    assert call(program("draft_kinds"), monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    for name in ("plain", "auto", "auto+", "layer-skip:1", f"model:{model}"):
        assert f"\n| {name} | " in out
    assert "Texts that differ from plain's: none." in out


@pytest.mark.parametrize("own_draft", [False, True], ids=["suffix", "model"])
def test_trees_over_chains_is_a_table_for_each_batch(
    own_draft: bool,
    model: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", model, "--shared", prompts, "--kinds", "code_edit", "--prompts", "4", "--tokens", "6"]
    arguments += ["--batch", "1", "4", "--threads", "1", "--dtype", "float32", "--max-context", "512"]
    arguments += ["--arms", "plain", "chain:2", "tree:2/5", *(["--draft", model] if own_draft else [])]
    assert call(program("trees"), monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert "batch 1," in out and "batch 4," in out and out.count("0 texts differ") == 2
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| tree:2/5")]
    assert len(rows) == 2
    assert not own_draft or all(float(row[1]) > 1 and float(row[2]) > 3 for row in rows)
    assert call(program("trees"), monkeypatch, "--model", model, "--arms", "bush:2") == 2


def test_soak_runs_and_sees_a_wrong_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.decode.cache import KVCache

    module = program("soak")
    monkeypatch.setattr(KVCache, "block", KVCache.block)  # the program makes it small
    arguments = ["--requests", "8", "--rounds", "40", "--growth", "1"]
    assert call(module, monkeypatch, *arguments) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["finished"] and not facts["different"] and not facts["held"]
    monkeypatch.setattr(module.Soak, "_alone", lambda self, known=module.Soak._alone: _flipped(known(self)))
    assert call(module, monkeypatch, *arguments) == 1


def _flipped(texts: dict[tuple[str, int], list[int]]) -> dict[tuple[str, int], list[int]]:
    """The last token of each another one."""
    return {name: [*text[:-1], text[-1] ^ 1] for name, text in texts.items()}


def test_second_turn_reuses_the_first(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--prefix", "200", "--rounds", "1", "--max-tokens", "3", "--dtype", "float32"]
    assert call(program("second_turn"), monkeypatch, *arguments) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["equal"] and result["cached"] > 100 and set(result["seconds"]) == {"cold", "warm", "new"}


def test_grammar_counts_what_does_not_fit(
    model: str, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = program("grammar")
    arguments = ["--model", model, "--shared", prompts, "--requests", "4", "--block", "2", "--concurrency", "2"]
    arguments += ["--threads", "1", "--dtype", "float32", "--tokens", "600", "--draft", "ngram"]
    assert call(module, monkeypatch, *arguments) == 0
    assert "0 of 8 answers invalid, 0 cut, 0 texts differ" in capsys.readouterr().out
    monkeypatch.setattr(module, "fits", lambda text, schema: False)
    assert call(module, monkeypatch, *arguments) == 1
    assert "8 of 8 answers invalid" in capsys.readouterr().out


def test_round_grid_holds_predictions_against_rounds(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--batch", "1", "2", "--lengths", "0", "2", "--rounds", "2", "--repeats", "1"]
    module = program("round_grid")
    monkeypatch.setattr(module, "PROMPT", 20)
    assert call(module, monkeypatch, *arguments, "--dtype", "float32", "--threads", "1") == 0
    told = capsys.readouterr().out
    assert all(f"| {batch} | {length} | " in told for batch in (1, 2) for length in (0, 2))
    assert "passes: median error" in told and "live: median error" in told
    measured = {(1, 0): 1.0, (1, 2): 1.5}
    assert max(module.losses(measured, measured, [0, 2], 1)) == 0.0
    blind = {(1, 0): 1.0, (1, 2): 9.0}
    assert max(module.losses(blind, measured, [0, 2], 1)) == pytest.approx(1 - 1.5 / (1 + 0.95 + 0.95**2))


def test_start_is_measured_in_fresh_processes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    module = program("start")
    assert call(module, monkeypatch, "--model", model, "--dtype", "float32", "--rounds", "1", "--threads", "1") == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    (starts,) = result["rounds"]
    assert set(starts) == {"cold", "warm"} and all(len(s["tokens"]) == module.TOKENS for s in starts.values())
    starts["warm"]["tokens"][0] += 1
    monkeypatch.setattr(module, "one_round", lambda *_: starts)
    assert call(module, monkeypatch, "--model", model, "--dtype", "float32", "--rounds", "1") == 1
    assert "texts DIFFER" in capsys.readouterr().out

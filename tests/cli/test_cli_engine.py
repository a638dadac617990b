"""The verbs of the engine on tiny models: what they print, and one sentence with exit code 2 for every mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tiny_models import MARKERS, save_folder, tiny_backend, tiny_model, write_gguf

from paceline.cli import main
from paceline.core.records import read_trace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "target"
    return str(save_folder(folder, tiny_model(), tiny_backend()))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse ends the program itself
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_run_prints_one_json_object(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ["--max-tokens", "24", "--ignore-eos", "--dtype", "float32", "--json"]
    code, out, _ = run(capsys, "run", model, "--prompt", "the cat", "--trace", str(trace), *options)
    assert code == 0
    value = json.loads(out)
    assert set(value) == {
        *("text", "token_ids", "finish_reason", "usage", "rounds", "acceptance_length", "tokens_per_round"),
        *("drafted", "accepted", "seconds", "verify", "lossless_rule"),
    }
    assert value["usage"]["completion_tokens"] == len(value["token_ids"]) == 24
    assert value["finish_reason"] == "length" and value["lossless_rule"] is True
    assert set(value["seconds"]) == {"load", "prefill", "decode", "saved"}
    plain = json.loads(run(capsys, "run", model, "--prompt", "the cat", "--draft", "none", *options)[1])
    assert plain["text"] == value["text"] and plain["drafted"] == 0
    header, records = read_trace(trace)
    emitted = sum(r.emitted for r in records)
    assert emitted == 24 and header["model"] == model


def test_every_output_of_a_relaxed_run_says_so(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ["--verify", "relaxed", "--relaxed", "top:3,0.5", "--max-tokens", "8", "--ignore-eos"]
    code, out, err = run(capsys, "run", model, "--prompt", "the cat", "--trace", str(trace), "--json", *options)
    value = json.loads(out)
    assert code == 0 and value["verify"] == "relaxed" and value["lossless_rule"] is False
    assert "not exact" in err
    header, records = read_trace(trace)
    assert header["lossless"] is False and header["relaxed"] == "top:3,0.5"
    assert {(r.verify, r.lossless) for r in records} == {("relaxed", False)}
    assert "not exact (relaxed)" in run(capsys, "run", model, "--prompt", "the cat", *options)[2].splitlines()[-1]


@pytest.mark.parametrize("rule", ["rejection", "block", "relaxed"])
def test_every_rule_gives_the_greedy_text_at_temperature_0(
    model: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "24", "--ignore-eos", "--dtype", "float32"]
    plain = run(capsys, "run", model, "--prompt", "the cat", "--draft", "none", *options)[1]
    assert run(capsys, "run", model, "--prompt", "the cat", "--draft", "ngram", "--verify", rule, *options)[1] == plain


def test_run_streams_text_and_keeps_words_off_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "8", "--ignore-eos", "--dtype", "float32"]
    code, out, err = run(capsys, "run", model, "--prompt", "the cat", *options)
    value = json.loads(run(capsys, "run", model, "--prompt", "the cat", *options, "--json")[1])
    assert code == 0 and out == value["text"] + "\n"
    assert "tokens/s" in err


def test_run_reads_standard_input_and_files(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", "4", "--dtype", "float32"]
    (tmp_path / "p.txt").write_text("the cat")
    whole = run(capsys, "run", model, "--prompt", "the cat", *options)[1]
    assert run(capsys, "run", model, "--prompt-file", str(tmp_path / "p.txt"), *options)[1] == whole
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    assert run(capsys, "run", model, *options)[1] == whole


def test_chat_answers_until_it_is_told_to_leave(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/new\nhello\n/exit\nnever read\n"))
    code, out, err = run(capsys, "chat", model, "--max-tokens", "6", "--ignore-eos", "--dtype", "float32")
    first, second = out.splitlines()[: len(out.splitlines()) // 2], out.splitlines()[len(out.splitlines()) // 2 :]
    assert code == 0 and first == second, "the same first message, greedily, has the same answer"
    assert err.count("\n6 tokens, ") == 2


def test_demo_says_what_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "demo", model, "--max-tokens", "4", "--max-context", "128", "--dtype", "float32")
    assert code == 2 and out.count("=== ") == 2, "the second prompt does not fit 128 tokens of this tokenizer"
    assert "context" in err.splitlines()[-1]


def test_mistakes_are_one_sentence(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "whole.gguf", tiny_model(), backend=tiny_backend())
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    elsewhere = str(save_folder(tmp_path / "other", tiny_model(seed=1), _foreign_backend()))
    long = "the cat " * 3000
    cases: list[tuple[list[str], str]] = [
        (["run", str(tmp_path / "no.gguf"), "--prompt", "x"], "no.gguf"),
        (["run", str(tmp_path / "cut.gguf"), "--prompt", "x"], "cut.gguf"),
        (["run", str(tmp_path / "empty"), "--prompt", "x"], "empty"),
        (["run", model, "--prompt", long], "context"),
        (["run", model, "--prompt", ""], "empty"),
        (["run", model, "--prompt", "x", "--draft", elsewhere], "too few of its tokens"),
        (["run", model, "--prompt", "x", "--draft", "layer-skip:2"], "exit layer"),
        (["run", model, "--prompt", "x", "--draft", "ngrm"], "ngram"),
        (["run", model, "--prompt", "x", "--draft", "eagle3"], "eagle3"),
        (["run", model, "--prompt", "x", "--verify", "blok"], "blok"),
        (["run", model, "--prompt", "x", "--relaxed", "typical"], "coupled"),
        (["run", model, "--prompt", "x", "--verify", "relaxed", "--relaxed", "top:0,0.5"], "relaxed count"),
        (["run", model, "--prompt", "x", "--verify", "relaxed", "--relaxed", "loose"], "typical:EPSILON,DELTA"),
        (["run", model, "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["run", model, "--prompt", "x", "--top-p", "7"], "top_p"),
        (["run", model, "--prompt", "x", "--max-tokens", "0"], "max_tokens"),
        (["run", model, "--prompt", "x", "--draft-length", "-2"], "draft-length"),
        (["run", model, "--prompt", "x", "--tree-size", "8"], "tree_size"),
        (["run", model, "--prompt", "x", "--draft", "suffix", "--tree-size", "8"], "draft_length"),
        (["run", model, "--prompt", "x", "--dtype", "float8"], "dtype"),
        (["run", model, "--prompt", "x", "--max-context", "99999999"], "max_context"),
        (["run", model, "--prompt", "x", "--threads", "0"], "threads"),
        (["run", model, "--prompt-file", str(tmp_path / "none.txt")], "none.txt"),
        (["run", model, "--prompt", "x", "--no-such-option"], "--no-such-option"),
    ]
    for argv, word in cases:
        code, out, err = run(capsys, *argv)
        last = err.strip().splitlines()[-1]
        assert code == 2, (argv, err)
        assert word in last and "Traceback" not in err, (argv, err)
        assert out == "", argv


def test_a_draft_of_another_tokenizer_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(save_folder(tmp_path / "other", tiny_model(seed=1), _shuffled_backend()))
    options = ["--prompt", "the cat", "--max-tokens", "12", "--dtype", "float32"]
    code, out, err = run(capsys, "run", model, "--draft", other, *options)
    assert code == 0 and "drafts are translated" in err and "sample text" in err
    assert run(capsys, "run", model, "--draft", "none", *options)[1] == out


def _shuffled_backend():  # type: ignore[no-untyped-def]
    """The same vocabulary with two ids exchanged."""
    from tokenizers import Tokenizer

    value = json.loads(tiny_backend().to_str())
    vocab = value["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return Tokenizer.from_str(json.dumps(value))


def _foreign_backend():  # type: ignore[no-untyped-def]
    """Three letters and the markers."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    return Tokenizer(BPE({token: i for i, token in enumerate(("x", "y", "z", *MARKERS))}, []))


def test_run_keeps_to_a_grammar(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, lark, gbnf = tmp_path / "schema.json", tmp_path / "g.lark", tmp_path / "g.gbnf"
    schema.write_text('{"enum": [1, "two"]}')
    lark.write_text("start: /[a-z]{2}[0-9]/")
    gbnf.write_text("root ::= [a-z]{2} [0-9]")
    base = ["run", model, "--prompt", "the cat", "--dtype", "float32", "--temperature", "1", "--seed", "1"]
    assert json.loads(run(capsys, *base, "--json-schema", str(schema))[1]) in (1, "two")
    for option in (["--regex", "[a-z]{2}[0-9]"], ["--grammar", str(lark)], ["--grammar", str(gbnf)]):
        code, out, _ = run(capsys, *base, *option)
        assert code == 0 and len(out.strip()) == 3 and out.strip()[2].isdigit()
    schema.write_text('{"type": "array", "uniqueItems": true}')
    for wrong, says in ((["--json-schema", str(schema)], "uniqueItems"), (["--grammar", str(tmp_path / "no")], "read")):
        code, _, err = run(capsys, *base, *wrong)
        assert code == 2 and says in err

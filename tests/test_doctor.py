"""The doctor: pairs that do not fit are named before any weight is read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_folder, tiny_backend, tiny_model, write_gguf
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from paceline.cli import doctor as command
from paceline.decode.model.checkpoint import CheckpointInfo, inspect_checkpoint
from paceline.decode.model.doctor import (
    Level,
    Load,
    MemoryNeed,
    available_memory_bytes,
    check_draft_vocabulary,
    compare_vocabularies,
    examine_pair,
    memory_need,
)
from paceline.decode.model.tokenizer import TextTokenizer, byte_alphabet
from paceline.errors import IncompatibleDraft, InvalidParameter

LOAD = Load(batch=2, context_tokens=100, draft_length=4)


def words(*tokens: str) -> TextTokenizer:
    """A byte-level tokenizer whose ids are these words."""
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend)


def info(
    name: str,
    tokenizer: TextTokenizer | None,
    rows: int = 0,
    parameters: int = 1000,
    positions: int = 128,
    vocab_size: int = 4,
) -> CheckpointInfo:
    size = vocab_size if tokenizer is None else tokenizer.size
    config = SimpleNamespace(
        model_type="llama",
        vocab_size=rows or size,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        num_attention_heads=4,
    )
    return CheckpointInfo(name, config, tokenizer, frozenset(), size, positions, parameters, parameters)


def topics(report: Any) -> dict[str, tuple[Level, str]]:
    return {finding.topic: (finding.level, finding.text) for finding in report.findings}


def check_padded_pair(check: Callable[[CheckpointInfo, CheckpointInfo], None]) -> None:
    """104 and 100 rows over the same 98 tokens are accepted, either way round."""
    tokens = [f"w{i}" for i in range(98)]
    wide, narrow = info("wide", words(*tokens), rows=104), info("narrow", words(*tokens), rows=100)
    for target, draft in ((wide, narrow), (narrow, wide)):
        check(target, draft)
        found = topics(examine_pair(target, draft, LOAD, 1 << 40))
        assert found["vocabulary"] == (Level.OK, "all 98 ids mean the same text in both.")
        assert found["padding"][0] is Level.OK
        assert "104 rows for 98 ids" in found["padding"][1]


def test_sd_26_padding_alone_does_not_refuse_a_pair() -> None:
    check_padded_pair(check_draft_vocabulary)


def test_sd_26_seen_red() -> None:
    """The fault of the case: the heads' rows are compared instead of the tokens."""

    def by_rows(target: CheckpointInfo, draft: CheckpointInfo) -> None:
        if target.config.vocab_size != draft.config.vocab_size:
            raise IncompatibleDraft("rows differ")

    with pytest.raises(IncompatibleDraft):
        check_padded_pair(by_rows)


def test_ids_one_of_them_lacks_are_no_conflict() -> None:
    target, draft = info("t", words("a", "b", "c", "d")), info("d", words("a", "b"))
    check_draft_vocabulary(target, draft)
    check_draft_vocabulary(draft, target)
    level, text = topics(examine_pair(target, draft, LOAD, 1 << 40))["vocabulary"]
    assert level is Level.OK
    assert "2 ids only the target has are never proposed" in text


def test_another_text_under_one_id_is_translated() -> None:
    target, draft = info("t", words("a", "b", "c", "d")), info("d", words("a", "b", "d", "c"))
    translation = check_draft_vocabulary(target, draft)
    assert translation is not None and translation.pairs == ((0, 0), (1, 1), (2, 3), (3, 2))
    level, text = topics(examine_pair(target, draft, LOAD, 1 << 40))["vocabulary"]
    assert level is Level.WARN
    assert "2 ids mean another text: id 2 is 'c' and 'd'" in text
    assert "4 tokens mean the same in both: 100.0% of the target's vocabulary" in text


def test_vocabularies_that_hardly_overlap_are_refused_with_the_overlap() -> None:
    target, draft = info("t", words("a", "e", "i", "t")), info("d", words("w", "a", "x", "z"))
    with pytest.raises(IncompatibleDraft, match=r"1 tokens mean the same.*25\.0%.*sample") as caught:
        check_draft_vocabulary(target, draft)
    assert "ngram" in str(caught.value)
    report = examine_pair(target, draft, LOAD, 1 << 40)
    assert report.worst is Level.ERROR
    assert topics(report)["vocabulary"][0] is Level.ERROR


@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8),
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8),
)
@settings(deadline=None)
def test_overlap_against_a_slow_twin(ours: list[str], theirs: list[str]) -> None:
    overlap = compare_vocabularies(words(*ours), words(*theirs))
    pairs = list(zip(ours, theirs, strict=False))
    assert overlap.shared == sum(a == b for a, b in pairs)
    assert overlap.differing == sum(a != b for a, b in pairs)
    assert overlap.only_target == max(len(ours) - len(theirs), 0)
    assert overlap.only_draft == max(len(theirs) - len(ours), 0)
    assert overlap.same_text == len(set(ours) & set(theirs))
    assert overlap.compatible == (all(a == b for a, b in pairs) and bool(pairs))
    assert len(overlap.examples) == min(overlap.differing, 3)


def test_tokens_are_compared_by_their_bytes() -> None:
    """Byte-level and SentencePiece spell a leading space differently and mean the same."""
    pieces = Tokenizer(BPE({"\u2581a": 0, "<0xC3>": 1}, []))
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    byte_level = words(spelled[32] + "a", spelled[0xC3])
    assert compare_vocabularies(byte_level, TextTokenizer(pieces)).compatible


def test_models_without_tokenizers() -> None:
    check_draft_vocabulary(info("t", None), info("d", None))
    for target, draft in (
        (info("t", None), info("d", None, vocab_size=5)),
        (info("t", words("a")), info("d", None)),
    ):
        with pytest.raises(IncompatibleDraft, match="cannot be compared"):
            check_draft_vocabulary(target, draft)


Need = Callable[[CheckpointInfo, CheckpointInfo | None, Load], MemoryNeed]


def check_draft_is_counted(need_of: Need) -> None:
    target, draft = info("t", words("a"), parameters=60_000), info("d", words("a"), parameters=6_000)
    draft = replace(draft, config=SimpleNamespace(**(vars(draft.config) | {"num_hidden_layers": 1})))
    need, alone = need_of(target, draft, LOAD), need_of(target, None, LOAD)
    assert (need.target_weights, need.draft_weights) == (120_000, 12_000)
    assert need.target_kv == 2 * 100 * (2 * 2 * 2 * 8 * 2)
    assert need.draft_kv == need.target_kv // 2
    assert need.total - alone.total == need.draft_weights + need.draft_kv
    assert examine_pair(target, draft, LOAD, need.total).worst is Level.OK
    assert examine_pair(target, draft, LOAD, need.total - 1).worst is Level.ERROR
    assert examine_pair(target, None, LOAD, need.total - 1).worst is Level.OK


def test_pl_04_draft_weights_and_draft_kv_are_counted() -> None:
    check_draft_is_counted(memory_need)


def test_pl_04_seen_red() -> None:
    """The fault of the case: the memory is that of the target alone."""
    with pytest.raises(AssertionError):
        check_draft_is_counted(lambda target, draft, load: memory_need(target, None, load))


def check_workspace(need_of: Need) -> None:
    """16 sequences, vocabulary 248,320, D = 16: 272 rows, 258 MiB for each of three float32 copies."""
    target = info("t", None, rows=248_320)
    at = {d: need_of(target, None, Load(16, 128, d)).verify_workspace for d in (1, 16)}
    assert at[16] == 272 * 248_320 * 4 * 3
    assert at[16] / 3 / (1 << 20) == pytest.approx(258, abs=1)
    assert at[16] * 2 == at[1] * 17


def test_pl_05_verify_workspace_grows_with_the_draft_length() -> None:
    check_workspace(memory_need)


def test_pl_05_seen_red() -> None:
    """The fault of the case: the workspace is that of one draft token."""
    with pytest.raises(AssertionError):
        check_workspace(lambda target, draft, load: memory_need(target, draft, replace(load, draft_length=1)))


def test_a_draft_with_a_shorter_context() -> None:
    target, draft = info("t", words("a"), positions=100), info("d", words("a"), positions=48)
    level, text = topics(examine_pair(target, draft, LOAD, 1 << 40))["draft context"]
    assert level is Level.WARN
    assert "from token 48 on it proposes nothing" in text
    assert memory_need(target, draft, LOAD).draft_kv == 2 * draft.kv_bytes(48, 2)
    too_long = replace(LOAD, context_tokens=101)
    assert topics(examine_pair(target, draft, too_long, 1 << 40))["context"][0] is Level.ERROR


def test_a_draft_as_heavy_as_the_target() -> None:
    target, draft = info("t", words("a")), info("d", words("a"), parameters=501)
    assert topics(examine_pair(target, draft, LOAD, 1 << 40))["draft weight"][0] is Level.WARN
    assert topics(examine_pair(target, replace(draft, parameters_read=500), LOAD, 1 << 40))["draft weight"][0] is (
        Level.OK
    )


def test_unknown_memory_and_bad_loads(tmp_path: Path) -> None:
    assert examine_pair(info("t", None), None, LOAD, None).worst is Level.WARN
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:   4 kB\n")
    assert available_memory_bytes("cpu", tmp_path / "meminfo") == 4096
    assert available_memory_bytes("cpu", tmp_path / "none") is None
    for changes in ({"batch": 0}, {"context_tokens": 0}, {"draft_length": -1}):
        with pytest.raises(InvalidParameter):
            replace(LOAD, **changes)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", *words])
    return args.func(args), capsys.readouterr().out


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend()))
    draft = str(save_folder(tmp_path / "d", tiny_model("qwen2", num_hidden_layers=1), tiny_backend()))
    code, out = run(capsys, target, "--draft", draft, "--context", "64")
    assert code == 0
    assert "all 374 ids mean the same text" in out
    code, out = run(capsys, target, "--draft", f"model:{draft}", "--context", "129", "--json")
    assert code == 3
    report = json.loads(out)
    assert report["worst"] == "error"
    assert report["memory"]["total"] == sum(v for k, v in report["memory"].items() if k != "total")
    code, out = run(capsys, target, "--draft", "ngram")
    assert code == 0
    assert "no model" in out
    code, out = run(capsys, target, "--draft", "layer-skip:1")
    assert code == 0 and "1 of 2 layers draft" in out
    code, out = run(capsys, target, "--draft", "layer-skip:2")
    assert code == 3 and "layer-skip:N with N from 1 to 1" in out
    with pytest.raises(InvalidParameter, match="draft"):
        run(capsys, target, "--draft", "model:")


def test_a_real_tiny_pair_agrees_with_its_modules(tmp_path: Path) -> None:
    model = tiny_model()
    target = inspect_checkpoint(str(write_gguf(tmp_path / "m.gguf", model, backend=tiny_backend())))
    need = memory_need(target, None, LOAD)
    assert need.target_weights == sum(p.numel() * 2 for p in model.parameters())


def test_windows_keep_no_more_than_their_rings(tmp_path: Path) -> None:
    """One layer sees everything, the other 16 tokens, which take 1,024 rows and no more."""
    model = tiny_model("gemma3_text", max_position_embeddings=8192)
    found = inspect_checkpoint(str(save_folder(tmp_path, model, None)))
    assert [found.kv_bytes(tokens, 2) for tokens in (100, 5000)] == [2 * n * 2 * 32 * 2 for n in (200, 6024)]


@pytest.mark.parametrize(
    ("precision", "missing", "on_cpu", "level", "said"),
    [
        ("bfloat16", "", True, Level.OK, "compiled for this processor"),
        ("bfloat16", "no compiler", True, Level.OK, "PyTorch's products, not compiled: no compiler"),
        ("bfloat16", "no CPU", False, Level.OK, "PyTorch's products, not compiled: no CPU"),
        ("int8", "", True, Level.OK, "compiled for this processor"),
        ("int8", "no compiler", True, Level.OK, "PyTorch's weight-only kernels, not compiled: no compiler"),
        ("int8", "no CPU", False, Level.ERROR, "runs on a CPU alone"),
    ],
)
def test_the_decoder_is_named(
    tmp_path: Path, precision: str, missing: str, on_cpu: bool, level: Level, said: str
) -> None:
    save_folder(tmp_path, tiny_model(), tiny_backend())
    info = inspect_checkpoint(str(tmp_path))
    load = Load(1, 16, 0, target_precision=precision)
    report = examine_pair(info, None, load, None, uncompiled=(missing, None), on_cpu=on_cpu)
    finding = next(f for f in report.findings if f.topic == "decoder")
    assert finding.level is level and said in finding.text
    assert memory_need(info, None, load).target_weights == info.parameters * {"bfloat16": 2, "int8": 1.0625}[precision]

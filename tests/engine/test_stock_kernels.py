"""Without the compiled decoder: why is said, and int8 and int4 run on PyTorch's weight-only kernels."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_texts import check_texts_are_plain
from tiny_models import save_folder, tiny_backend, tiny_model
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.decode.llm import LLM
from paceline.decode.loading import load_model
from paceline.decode.model.blocks import BLOCK, quantise_int4
from paceline.decode.model.linear import Form, Int4Weight, Int8Weight, Linear
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.stored import Stored
from paceline.decode.native import build
from paceline.errors import InvalidParameter

CPU = torch.device("cpu")
LACKING = build.Availability("the processor lacks avx512_bf16")


# -- products ----------------------------------------------------------------------------------------------------


def as_held(weight: Tensor, form: Form) -> Tensor:
    """The floats that a weight stands for in this form. The slow, obvious twin."""
    if form is Form.INT8 or len(weight) % 16 or weight.shape[1] % BLOCK:
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16().float()
        return (weight.float() / scale).round().clamp(-127, 127) * scale
    blocks = quantise_int4(weight)
    scale = blocks.scale.float()
    middle = (blocks.least.float() + 8 * scale).bfloat16().float()
    groups = blocks.whole.view(*scale.shape, BLOCK).float() - 8
    return (groups * scale.bfloat16().float()[..., None] + middle[..., None]).view_as(weight)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([Form.INT8, Form.INT4]),
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_a_product_is_its_twin(form: Form, rows: int, outputs: int, groups: int, even: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    outputs = outputs * 16 if even else outputs
    x = torch.randn(rows, groups * BLOCK, generator=generator).bfloat16()
    weight = torch.randn(outputs, groups * BLOCK, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    product = Linear(Stored.of(weight), bias, form=form)
    assert isinstance(product.weight, Int4Weight if form is Form.INT4 and outputs % 16 == 0 else Int8Weight)
    made, held = product(x), as_held(weight, form).double()
    exact = x.double() @ held.T + (0.0 if bias is None else bias.double())
    scale = x.double().abs() @ held.abs().T + 1
    assert ((made.double() - exact).abs() <= 2**-7 * scale).all()
    assert torch.equal(made, torch.cat([product(row[None]) for row in x])), "a row's bits depend on its neighbours"


def test_rows_of_a_head_are_its_embeddings() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([3, 3, 19, 0])
    rows = Int8Weight(Stored.of(weight)).rows(ids)
    assert torch.equal(rows, as_held(weight, Form.INT8)[ids].bfloat16())


# -- models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a shape that the compiled decoder could run."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    widths = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 384, "max_position_embeddings": 256}
    model = tiny_model("llama", 3, initializer_range=0.12, **heads, **widths)
    return str(save_folder(tmp_path_factory.mktemp("stock") / "m", model, tiny_backend()))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.decode.loading as loading

    monkeypatch.setattr(loading, "availability", lambda: LACKING)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_text_is_that_of_plain_decoding(folder: str, precision: str) -> None:
    llm = LLM(folder, dtype=precision, draft=["auto", "suffix"], max_context=256)
    assert isinstance(llm.engine.model, LlamaDecoder) and llm.engine.model.row_policy.proved
    assert any(LACKING.missing in note for note in llm.notes)
    prompts = ["one two one two one two one", "def add(a, b):\n    return a + b\n\ndef add(a,", "The quick brown"]
    check_texts_are_plain(llm, prompts)


@pytest.mark.usefixtures("uncompiled")
def test_whole_numbers_take_less_memory(folder: str) -> None:
    held = [load_model(folder, p, CPU, None)[1].weight_bytes for p in ("float32", "bfloat16", "int8", "int4")]
    assert held == sorted(held, reverse=True) and held[2] < 0.6 * held[1] and held[3] < held[2]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["gemma3_text", "mixtral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """What the compiled decoder never runs; a router stays in floats."""
    folder = str(save_folder(tmp_path / "m", tiny_model(family, 5), tiny_backend()))
    texts = []
    for draft in ("none", "suffix"):
        llm = LLM(folder, dtype="int4", draft=draft, max_context=128)
        done = llm.generate("one two one two one two", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        texts.append(done[0].completions[0].token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 24


def test_another_device_is_refused_before_anything_is_read() -> None:
    with pytest.raises(InvalidParameter, match="int8 is for CPUs, not meta"):
        load_model("/nowhere", "int8", torch.device("meta"), None)


# -- a build that fails ------------------------------------------------------------------------------------------


def fresh(monkeypatch: pytest.MonkeyPatch, path: Path, compiler: str) -> None:
    """A process that has not tried yet."""
    monkeypatch.setattr(build, "_tried", cache(build._tried.__wrapped__))
    monkeypatch.setattr(build, "availability", build.Availability)
    monkeypatch.setattr(build, "_path", lambda: path)
    monkeypatch.setattr(build, "_compiler", lambda: compiler)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo decoder.cpp: no such >&2; echo instruction >&2; exit 1", "decoder.cpp: no such instruction"),
        ("exit 1", "it said nothing"),
        ("exec sleep 5", "took more than"),
        ("exit 0", "cannot be kept or loaded"),
    ],
)
def test_a_compiler_that_fails_is_said_and_tried_once(
    does: str, said: str, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "calls"
    fresh(monkeypatch, tmp_path / "kept" / "x.so", script(tmp_path / "cc", f"echo call >> {log}; {does}"))
    monkeypatch.setattr(build, "_TIME_LIMIT_S", 0.3 if "sleep" in does else 60)
    lines: list[str] = []
    _, decoder = load_model(folder, "bfloat16", CPU, lines.append)
    assert isinstance(decoder, LlamaDecoder) and any("compiling the decoder" in line for line in lines)
    before, calls = len(lines), log.read_text(encoding="utf-8")
    assert said in build.build(lines.append).missing and said in build.build(None).missing
    assert log.read_text(encoding="utf-8") == calls and len(lines) == before
    with pytest.raises(build.NotBuilt, match="decoder"):
        build.library()
    assert not list((tmp_path / "kept").glob("*.o")), "what a failed build leaves"


def test_a_kept_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"no library")
    fresh(monkeypatch, path, "/bin/false")
    assert str(path) in build.build().missing


@pytest.mark.compiled
def test_one_library_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often and with whatever progress it is asked for."""
    assert build.build(print) and build.build([].append) and build.library() is build.library()
    monkeypatch.setattr(subprocess, "run", None)
    assert build.library()

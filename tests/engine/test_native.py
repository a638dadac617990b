"""The compiled decoder against obvious twins, Transformers, and itself in other passes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_texts import check_texts_are_plain
from test_branches import parents_of_trees, path_to
from tiny_models import tiny_model
from torch import Tensor

from paceline.decode.cache import KVCache
from paceline.decode.llm import LLM
from paceline.decode.model.blocks import FOUR_BITS, Blocks, quantise_int4, read_blocks
from paceline.decode.model.step import Level, Span, build_inputs
from paceline.decode.model.stored import Stored, StoredTensors
from paceline.decode.native.build import library
from paceline.decode.native.decoder import NativeDecoder, why_not_native
from paceline.decode.native.weights import GROUP, Kind, Packed, pack
from paceline.errors import InvalidParameter

pytestmark = pytest.mark.compiled

SHAPES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}
KINDS = ("llama", "qwen2", "qwen3", "phi3")
VALUES = {"llama": {"head_dim": 32}, "qwen2": {"head_dim": 32}, "phi3": {"tie_word_embeddings": True}}


def module(kind: str) -> Any:
    values = {**SHAPES, **VALUES.get(kind, {}), "vocab_size": 390, "initializer_range": 0.12}
    return tiny_model(kind, 3, **values)


def decoder_of(model: Any, kind: Kind) -> NativeDecoder:
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return NativeDecoder(model.config, tensors, kind, threads=2)


@cache
def tiny(family: str = "llama", kind: Kind = Kind.BF16) -> NativeDecoder:
    return decoder_of(module(family), kind)


def new_cache(decoder: NativeDecoder, slots: int = 2) -> KVCache:
    cache = decoder.new_cache(slots, 512)
    for _ in range(slots):
        cache.allocate(128)
    return cache


def run(decoder: NativeDecoder, cache: KVCache, spans: list[Span], keep: bool = True) -> list[Tensor]:
    """Logits of each span; their rows are committed where `keep`."""
    with cache.transaction() as transaction:
        for span in spans:
            transaction.reserve(span.slot, len(span.tokens))
        step = build_inputs(spans, cache.capacity, decoder.geometry, decoder.row_policy)
        logits = decoder.forward(step, cache).logits
        if keep:
            for span in spans:
                transaction.commit(span.slot, range(len(span.tokens)))
    return [logits[first : first + rows] for first, rows in step.logits_of]


def one_by_one(decoder: NativeDecoder, tokens: list[int]) -> Tensor:
    cache = new_cache(decoder, 1)
    return torch.cat([run(decoder, cache, [Span(0, i, [token])])[0] for i, token in enumerate(tokens)])


# -- products ----------------------------------------------------------------------------------------------------


def apply(packed: Packed, x: Tensor) -> Tensor:
    out = torch.empty(len(x), packed.struct.n)
    pointers = (ctypes.c_void_p(x.data_ptr()), len(x), ctypes.c_void_p(out.data_ptr()))
    library().paceline_product(ctypes.byref(packed.struct), *pointers)
    return out


def weights_of(packed: Packed) -> Tensor:
    """[n, k] floats, as the decoder itself reads them back."""
    out = torch.empty(packed.struct.n, packed.struct.k)
    for row in range(packed.struct.n):
        library().paceline_weight_row(ctypes.byref(packed.struct), row, ctypes.c_void_p(out[row].data_ptr()))
    return out


def as_read(x: Tensor, kind: Kind) -> Tensor:
    """Activations as a product of this kind sees them: bfloat16, or int8 by groups of 32. The slow, obvious twin."""
    if kind is Kind.BF16:
        return x.bfloat16().float()
    groups = x.view(len(x), -1, GROUP)
    step = groups.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(step > 0, 1 / step, 0.0)
    return ((groups * inverse).round() * step).view_as(x)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(Kind), st.integers(1, 20), st.integers(1, 70), st.integers(1, 5), st.booleans())
@example(Kind.INT8, 9, 48, 2, True)
def test_a_product_is_its_twin(kind: Kind, rows: int, outputs: int, groups: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    x = torch.randn(rows, groups * GROUP, generator=generator)
    weight = torch.randn(outputs, groups * GROUP, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator) if biased else None
    packed = pack(library(), Stored.of(weight), kind, bias)
    made = apply(packed, x)
    exact = as_read(x, kind).double() @ weights_of(packed).double().T + (0.0 if bias is None else bias.double())
    scale = as_read(x, kind).abs().double() @ weights_of(packed).abs().double().T
    assert ((made - exact).abs() <= 1e-5 * scale + 1e-6).all()
    alone = torch.cat([apply(packed, row[None].clone()) for row in x])
    assert torch.equal(made, alone), "a row's bits depend on the rows beside it"


def some_of(blocks: Blocks, low: int, high: int) -> Blocks:
    return Blocks(blocks.whole[low:high], blocks.scale[low:high], blocks.least[low:high])


def test_packed_weights_are_the_weights_rounded() -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(weights_of(pack(library(), Stored.of(weight), Kind.BF16)), weight.float())
    groups = weight.float().view(50, -1, GROUP)
    step = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    rounded = ((groups / step).round().clamp(-127, 127) * step).flatten(1)
    assert torch.equal(weights_of(pack(library(), Stored.of(weight), Kind.INT8)), rounded)
    blocks = quantise_int4(weight)
    stored = replace(Stored.of(weight * 0), blocks=lambda low, high: some_of(blocks, low, high))
    four = (blocks.whole.view(50, 3, 32) * blocks.scale.float()[..., None] + blocks.least.float()[..., None]).view(
        50, 96
    )
    assert torch.allclose(weights_of(pack(library(), stored, Kind.INT4)), four, atol=1e-6)
    range_ = weight.float().view(50, 3, 32).amax(-1) - weight.float().view(50, 3, 32).amin(-1)
    error = (four - weight.float()).abs().view(50, 3, 32).amax(-1)
    assert (error <= range_ / 15 * 0.52 + 2e-3).all()


@pytest.mark.parametrize("kind", sorted(FOUR_BITS))
def test_blocks_are_those_of_the_file(kind: gguf.GGMLQuantizationType) -> None:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(int(kind)).integers(0, 256, (6, 3 * size), dtype=np.uint8)
    heads = rows.reshape(-1, size)
    small = np.float16([0.01, 0.02]).view(np.uint8)
    heads[:, : 2 if kind is gguf.GGMLQuantizationType.Q4_0 else 4] = small[
        : 2 if kind is gguf.GGMLQuantizationType.Q4_0 else 4
    ]
    blocks = read_blocks(rows, kind)
    values = (
        blocks.whole.view(*blocks.scale.shape, 32) * blocks.scale.float()[..., None] + blocks.least.float()[..., None]
    )
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    assert torch.allclose(values.view_as(expected), expected, rtol=2e-3, atol=2e-3)


# -- the pass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("kind", list(Kind))
def test_logits_are_those_of_transformers(family: str, kind: Kind) -> None:
    """With the module's weights replaced by those that the decoder holds, only activations are rounded."""
    model = module(family)
    if kind is not Kind.BF16:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.dim() == 2 and "embed" not in name:
                    value.copy_(weights_of(pack(library(), Stored.of(value.detach().bfloat16()), kind)))
    decoder = decoder_of(model, kind)
    tokens = torch.randint(0, 390, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = new_cache(decoder, 1)
    made = torch.cat(
        [*run(decoder, cache, [Span(0, 0, tokens[:50])]), *run(decoder, cache, [Span(0, 50, tokens[50:])])]
    )
    with torch.no_grad():
        expected = model.float()(torch.tensor([tokens])).logits[0]
    error = ((made - expected).norm() / expected.norm()).item()
    assert error < (0.02 if kind is Kind.BF16 else 0.06), error


def test_a_draft_model_in_int4_is_that_throughout() -> None:
    """A target keeps the bits of its file, and a head of 8; a draft model's words are checked."""
    model = module("llama")

    def of_eight_bits(drafts: bool) -> NativeDecoder:
        weights = {name: Stored.of(value.detach().bfloat16()) for name, value in model.state_dict().items()}
        stored = {name: replace(weight, more_bits=len(weight.shape) == 2) for name, weight in weights.items()}
        if model.config.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        return NativeDecoder(model.config, StoredTensors(stored), Kind.INT4, threads=2, drafts=drafts)

    target, draft, plain = of_eight_bits(False), of_eight_bits(True), decoder_of(model, Kind.INT8)
    assert target.weight_bytes == plain.weight_bytes
    assert draft.weight_bytes < 0.8 * target.weight_bytes
    assert draft._head.kind is Kind.INT4 and target._head.kind is Kind.INT8
    tokens = list(range(20, 60))
    one, other = (run(d, new_cache(d, 1), [Span(0, 0, tokens)])[0] for d in (target, draft))
    assert ((one - other).norm() / one.norm()).item() < 0.6, "noise of four bits, no more"


CUTS = st.lists(st.integers(1, 39), max_size=6, unique=True).map(sorted)


@pytest.mark.parametrize("kind", list(Kind))
@settings(deadline=None, max_examples=12)
@given(CUTS, CUTS)
def test_bits_do_not_depend_on_the_pass(kind: Kind, cuts: list[int], others: list[int]) -> None:
    """Two texts of 40 tokens, each cut anyhow, computed side by side; every row as it is alone."""
    decoder = tiny("llama", kind)
    texts = [torch.randint(0, 390, (40,), generator=torch.Generator().manual_seed(s)).tolist() for s in (1, 2)]
    alone = [cached_rows(kind, seed) for seed in (1, 2)]
    bounds = [list(pairwise([0, *c, 40])) for c in (cuts, others)]
    cache = new_cache(decoder)
    made: list[list[Tensor]] = [[], []]
    while any(bounds):
        turn = [(slot, *bounds[slot].pop(0)) for slot in (1, 0) if bounds[slot]]
        for (slot, *_), logits in zip(
            turn, run(decoder, cache, [Span(s, low, texts[s][low:high]) for s, low, high in turn]), strict=True
        ):
            made[slot].append(logits)
    for slot in (0, 1):
        assert torch.equal(torch.cat(made[slot]), alone[slot])


@cache
def cached_rows(kind: Kind, seed: int) -> Tensor:
    tokens = torch.randint(0, 390, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    return one_by_one(tiny("llama", kind), tokens)


@settings(deadline=None, max_examples=15)
@given(parents_of_trees(), st.integers(1, 20))
def test_a_tree_has_the_bits_of_its_paths(parents: list[int], before: int) -> None:
    decoder = tiny()
    prompt = list(range(10, 10 + before))
    tokens = [(7 * row + 3) % 390 for row in range(len(parents))]
    cache = new_cache(decoder, 1)
    run(decoder, cache, [Span(0, 0, prompt)])
    rows = run(decoder, cache, [Span(0, before, tokens, parents=parents)], keep=False)[0]
    for row in range(len(parents)):
        path = [tokens[i] for i in path_to(parents, row)]
        chain = run(decoder, cache, [Span(0, before, path)], keep=False)[0]
        assert torch.equal(rows[row], chain[-1])


def test_a_level_of_a_tree_sees_its_ancestors() -> None:
    decoder, cache = tiny(), new_cache(tiny(), 1)
    run(decoder, cache, [Span(0, 0, [5, 6, 7])])
    with cache.transaction() as transaction:
        transaction.reserve(0, 3)
        first = Span(0, 3, [8, 9], level=Level(3, [[], []]))
        decoder.forward(build_inputs([first], cache.capacity, decoder.geometry, decoder.row_policy), cache)
        second = Span(0, 5, [10], level=Level(3, [[4]]))
        step = build_inputs([second], cache.capacity, decoder.geometry, decoder.row_policy)
        grown = decoder.forward(step, cache).logits[0]
    chain = run(decoder, cache, [Span(0, 3, [9, 10])], keep=False)[0]
    assert torch.equal(grown, chain[-1])


def test_what_is_no_number_stays_in_its_row() -> None:
    model = module("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = float("nan")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn(390, 96))
    for kind in Kind:
        decoder = decoder_of(model, kind)
        cache = new_cache(decoder)
        bad, fine = run(decoder, cache, [Span(0, 0, [3, 11]), Span(1, 0, [3, 12])])
        assert fine.isfinite().all() and bad[0].isfinite().all()
        assert bad[1].isnan().all(), kind


def test_hidden_states_and_early_exit() -> None:
    decoder, cache = tiny(), new_cache(tiny(), 1)
    step = build_inputs([Span(0, 0, [3, 4, 5])], cache.capacity, decoder.geometry, decoder.row_policy)
    whole = decoder.forward(step, cache, taps=(0, 1, -1))
    early = decoder.forward(step, cache, taps=(0,), layers=1)
    assert torch.equal(whole.hidden[0], early.hidden[0])
    head = weights_of(decoder._head)
    assert torch.allclose(whole.hidden[-1].bfloat16().float() @ head.T, whole.logits, atol=1e-3)
    assert not torch.equal(whole.logits, early.logits)


# -- what people see -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "int8", "int4"])
def smol(request: pytest.FixtureRequest) -> LLM:
    return LLM("smollm2-135m", dtype=request.param, draft=["auto", "suffix"], max_context=1024, threads=2)


def test_text_is_that_of_plain_decoding(smol: LLM) -> None:
    prompts = ["def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "One, two, three, one, two,", "The Moon is"]
    check_texts_are_plain(smol, prompts)


def test_precision_is_named_and_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match="auto, float32, bfloat16, int8 or int4"):
        LLM("smollm2-135m", dtype="int2")
    assert "activation" in why_not_native(tiny_model("gemma3_text").config)
    assert "experts" in why_not_native(tiny_model("mixtral").config)
    assert not why_not_native(module("llama").config)

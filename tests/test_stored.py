"""Weights read in parts: every part is that of the whole, however they are joined; and which weights a model has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILY_VALUES, save_folder, tiny_backend, tiny_model, write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.decode.model.blocks import BLOCK, Blocks, quantise_int4
from paceline.decode.model.checkpoint import load_checkpoint
from paceline.decode.model.families import FAMILIES
from paceline.decode.model.parameter_shapes import parameter_shapes
from paceline.decode.model.stored import PART, Stored, StoredTensors, join, parts_of, read_bytes, stack
from paceline.decode.native.weights import LANES, interleave
from paceline.errors import ModelFormatError


def in_blocks(blocks: Blocks) -> Stored:
    """A weight of a file that has it in 4-bit blocks alone."""

    def rows(low: int, high: int) -> Tensor:
        raise AssertionError("blocks are not read as floats")

    def some(low: int, high: int) -> Blocks:
        return Blocks(blocks.whole[low:high], blocks.scale[low:high], blocks.least[low:high])

    return Stored(tuple(blocks.whole.shape), rows, some)


def weights(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    return [torch.randn(n, BLOCK, generator=generator) for n in rows]


@settings(deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), st.data())
def test_joined_weights_are_one_below_the_other(sizes: list[int], data: st.DataObject) -> None:
    made = weights(*sizes)
    low = data.draw(st.integers(0, sum(sizes) - 1))
    high = data.draw(st.integers(low + 1, sum(sizes)))
    joined, whole = join([Stored.of(t) for t in made]), torch.cat(made)
    assert joined.shape == whole.shape and joined.blocks is None
    assert torch.equal(joined.rows(low, high), whole[low:high])
    assert torch.equal(joined.part(low, high).read(), whole[low:high])
    blocks = join([in_blocks(quantise_int4(t)) for t in made]).blocks
    assert blocks is not None
    assert torch.equal(blocks(low, high).whole, quantise_int4(whole).whole[low:high])
    assert torch.equal(blocks(low, high).scale, quantise_int4(whole).scale[low:high])
    mixed = join([in_blocks(quantise_int4(made[0])), Stored.of(made[0])])
    assert mixed.blocks is None, "blocks beside floats"


@pytest.mark.parametrize("pairs", [1, 2, 9])
def test_interleaved_weights_take_turns(pairs: int) -> None:
    gate, up = weights(LANES * pairs, LANES * pairs)
    slow = torch.cat([t for i in range(0, LANES * pairs, LANES) for t in (gate[i : i + LANES], up[i : i + LANES])])
    made = interleave(Stored.of(gate), Stored.of(up))
    assert torch.equal(torch.cat([made.rows(low, high) for low, high in parts_of(made.shape[0])]), slow)
    both = interleave(*(in_blocks(quantise_int4(t)) for t in (gate, up))).blocks
    assert both is not None and torch.equal(both(0, 2 * LANES * pairs).least, quantise_int4(slow).least)


def test_parts_and_stacks() -> None:
    assert list(parts_of(2 * PART + 1)) == [(0, PART), (PART, 2 * PART), (2 * PART, 2 * PART + 1)]
    made = weights(3, 3)
    assert torch.equal(stack([Stored.of(t) for t in made]).read(), torch.stack(made))


def test_a_tensor_is_given_away_once() -> None:
    given_ = {"a": torch.ones(2), "b": torch.zeros(3)}
    tensors = StoredTensors.of(given_)
    assert not given_ and tensors.shapes() == {"a": (2,), "b": (3,)} and "a" in tensors
    assert StoredTensors.of(tensors) is tensors
    taken = tensors.take("a")
    assert taken is not None and torch.equal(taken.read(), torch.ones(2))
    assert tensors.take("a") is None and list(tensors) == ["b"]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("folder", [False, True])
def test_any_part_of_a_file_is_that_of_the_whole(kind: GGMLQuantizationType, folder: bool, tmp_path: Path) -> None:
    """Query and key rows of a GGUF are in another order there; experts have a dimension more."""
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    for family, keys in (("llama", {}), ("mixtral", experts)):
        model = tiny_model(family, hidden_size=64, intermediate_size=64)
        if folder:
            made = save_folder(tmp_path / family, model, tiny_backend())
        else:
            made = write_gguf(tmp_path / f"{family}.gguf", model, kind, metadata=keys)
        tensors = load_checkpoint(str(made), dtype=torch.float32).tensors
        for name, whole in list(tensors.items()):
            stored = tensors.take(name)
            assert stored is not None and stored.shape == tuple(whole.shape)
            middle = len(whole) // 3
            assert torch.equal(torch.cat([stored.rows(0, middle), stored.rows(middle, len(whole))]), whole), name


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    assert np.array_equal(read_bytes(path, 4, 6), np.zeros(6, np.uint8))
    with pytest.raises(ModelFormatError, match="was cut short"):
        read_bytes(path, 4, 7)
    path.unlink()
    with pytest.raises(ModelFormatError, match="cannot be read: No such file"):
        read_bytes(path, 0, 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_weights_of_a_model_are_those_of_its_module(family: str) -> None:
    """Heads tied or not, biases where the config can have them, dense layers between sparse ones."""
    variants: list[dict[str, object]] = [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
    variants += [{"mlp_only_layers": [0]}] if family == "qwen3_moe" else []
    for values in variants:
        config = tiny_model(family, **{**FAMILY_VALUES.get(family, {}), **values}).config
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        expected = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        if config.tie_word_embeddings:
            expected.pop("lm_head.weight", None)
        assert parameter_shapes(config) == expected, values

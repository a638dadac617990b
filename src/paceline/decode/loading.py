"""From a model's name to a decoder of it: the compiled one where the machine and the model allow it, else PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.decode.lazy_memory import give_back_freed
from paceline.decode.model.base import TargetModel
from paceline.decode.model.checkpoint import Checkpoint, load_checkpoint
from paceline.decode.model.linear import Form
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.precision import floats_of, stock_products
from paceline.decode.native.build import availability, build
from paceline.decode.native.decoder import NativeDecoder, why_not_native
from paceline.decode.native.weights import Kind
from paceline.errors import InvalidParameter

__all__ = ["decoder_note", "load_model", "why_not_compiled"]

_KINDS = {"bfloat16": Kind.BF16, "int8": Kind.INT8, "int4": Kind.INT4}
_FORMS = {"float32": Form.PACKED, "bfloat16": Form.PACKED, "int8": Form.INT8, "int4": Form.INT4}


def load_model(
    spec: str,
    precision: str,
    device: torch.device,
    progress: Callable[[str], None] | None,
    *,
    drafts: bool = False,
) -> tuple[Checkpoint, TargetModel]:
    """The model `spec` with its weights in one of the `PRECISIONS`; `drafts`: for a draft model.

    Raises InvalidParameter where int8 or int4 is asked for on another device than a CPU.
    """
    if precision in ("int8", "int4") and device.type != "cpu":  # before anything is read
        raise InvalidParameter(
            "dtype", precision, "float32 or bfloat16", f"{precision} is for CPUs, not {device.type}."
        )
    checkpoint = load_checkpoint(spec, dtype=floats_of(precision), progress=progress)
    decoder = _decoder(checkpoint, precision, device, progress, drafts)
    give_back_freed()
    return checkpoint, decoder


def _decoder(
    checkpoint: Checkpoint, precision: str, device: torch.device, progress: Callable[[str], None] | None, drafts: bool
) -> TargetModel:
    config, tensors = checkpoint.config, checkpoint.tensors
    if precision == "float32" or why_not_compiled(config, device, progress):
        return LlamaDecoder(config, tensors, device, form=_FORMS[precision])
    return NativeDecoder(config, tensors, _KINDS[precision], threads=torch.get_num_threads(), drafts=drafts)


def why_not_compiled(config: Any, device: torch.device, progress: Callable[[str], None] | None = None) -> str:
    """Why a model of this config does not run in the compiled decoder on this device; empty where it does.

    Compiles it where that is the only way to know.
    """
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    return availability().missing or why_not_native(config) or build(progress).missing


def decoder_note(checkpoint: Checkpoint, precision: str, device: torch.device) -> str:
    """What to tell of a loaded model that could have been compiled and was not; empty where there is nothing."""
    if precision == "float32" or device.type != "cpu":
        return ""
    why = why_not_compiled(checkpoint.config, device)
    return f"{checkpoint.name} in {precision} runs on {stock_products(precision)}, not compiled: {why}" if why else ""

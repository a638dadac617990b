"""From a model's name to a decoder of it: the compiled one where the machine and the model allow it, else PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.decode.model.base import TargetModel
from paceline.decode.model.checkpoint import Checkpoint, load_checkpoint
from paceline.decode.model.llama import LlamaDecoder
from paceline.decode.model.precision import floats_of
from paceline.decode.native.build import availability
from paceline.decode.native.decoder import NativeDecoder, why_not_native
from paceline.decode.native.weights import Kind
from paceline.errors import InvalidParameter

__all__ = ["load_model", "why_not_compiled"]

_KINDS = {"bfloat16": Kind.BF16, "int8": Kind.INT8, "int4": Kind.INT4}


def load_model(
    spec: str, precision: str, device: torch.device, progress: Callable[[str], None] | None
) -> tuple[Checkpoint, TargetModel]:
    """The model `spec` with its weights in one of the `PRECISIONS`.

    Raises InvalidParameter where int8 or int4 is asked for and there is no compiled decoder for it.
    """
    whole = precision in ("int8", "int4")
    if whole and (missing := _machine_lacks(device)):  # before anything is read
        raise _refusal(precision, missing)
    checkpoint = load_checkpoint(spec, dtype=floats_of(precision), progress=progress)
    missing = why_not_compiled(checkpoint.config, device)
    if whole and missing:
        raise _refusal(precision, missing)
    if precision == "float32" or missing:
        return checkpoint, LlamaDecoder(checkpoint.config, checkpoint.tensors, device)
    kind = _KINDS[precision]
    return checkpoint, NativeDecoder(
        checkpoint.config,
        checkpoint.tensors,
        kind,
        threads=torch.get_num_threads(),
        stored=checkpoint.stored,
        progress=progress,
    )


def why_not_compiled(config: Any, device: torch.device) -> str:
    """Why a model of this config does not run in the compiled decoder on this device; empty where it does."""
    return _machine_lacks(device) or why_not_native(config)


def _machine_lacks(device: torch.device) -> str:
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    return availability().missing


def _refusal(precision: str, missing: str) -> InvalidParameter:
    why = f"{precision} needs the compiled decoder: {missing}."
    return InvalidParameter("dtype", precision, "float32 or bfloat16", why)

"""In which numbers a model is held: what `--dtype` allows, and which of them a device gets where nothing is asked."""

from __future__ import annotations

import torch

from paceline.errors import InvalidParameter

__all__ = ["BYTES_PER_WEIGHT", "PRECISIONS", "floats_of", "pick_precision", "stock_products"]

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
# int8 a scale, int4 a scale and a minimum, of 2 bytes each for 32 weights
BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "int4": 0.625}


def pick_precision(name: str, device: torch.device) -> str:
    """The precision of that name; `auto` is bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return "bfloat16" if native else "float32"
    if name not in PRECISIONS:
        raise InvalidParameter("dtype", name, f"auto, {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    return name


def floats_of(precision: str) -> torch.dtype:
    """The floats that weights of this precision are read as, and keys and values are kept in."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def stock_products(precision: str) -> str:
    """What multiplies a model of this precision where it is not compiled."""
    return "PyTorch's weight-only kernels" if precision in ("int8", "int4") else "PyTorch's products"

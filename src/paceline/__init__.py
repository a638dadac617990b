"""Paceline: speculative decoding that is exact, planned, and never slower than plain decoding.

Importing this package does not import torch; `LLM` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.decode.llm import LLM

__all__ = ["LLM", "PacelineError", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from paceline.decode.llm import LLM

        return LLM
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

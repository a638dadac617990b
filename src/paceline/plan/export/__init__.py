"""A plan in the words of an engine: launch command and files, schedules in its own form, its traps as
warnings.

`render(plan, engine, version)` is pure. An engine without the mechanism raises `Infeasible` with the reason.
A new engine is one file here and a line in `ENGINE_MODULES`.
"""

from __future__ import annotations

import importlib

from paceline.errors import InvalidParameter
from paceline.plan.document import Plan
from paceline.plan.export.base import Advice, Export, advice_of

__all__ = ["ENGINE_MODULES", "Advice", "Export", "render"]

ENGINE_MODULES = {
    "vllm": "paceline.plan.export.vllm",
    "sglang": "paceline.plan.export.sglang",
    "trtllm": "paceline.plan.export.trtllm",
    "llamacpp": "paceline.plan.export.llamacpp",
    "transformers": "paceline.plan.export.transformers",
    "openvino": "paceline.plan.export.openvino",
}


def render(plan: Plan, engine: str, version: str | None = None) -> Export:
    """Files (name → text) and warnings for one engine; `version` None means the newest one looked at."""
    if engine not in ENGINE_MODULES:
        raise InvalidParameter("engine", engine, ", ".join(ENGINE_MODULES))
    found: Export = importlib.import_module(ENGINE_MODULES[engine]).render(advice_of(plan), version)
    return found

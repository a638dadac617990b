"""What memory there is, and what fits into it.

    left for caches = limit - weights - draft weights - workspace
    sequences       = left / (cache of one sequence + draft cache of one sequence)

The workspace is what a pass needs beside weights and caches at full batch: float32 logits of every row of a
verification at full draft length, a few copies of them, and masks and activations of a prompt chunk in every lane.
Weights are counted as they lie in memory. The runtime itself (Python, PyTorch, a few hundred MB) is not counted in a
given limit; `auto` starts from what is free beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.decode.draft.base import Drafter, OwnsCache
from paceline.decode.model.base import TargetModel
from paceline.decode.model.spans import KV_BLOCK
from paceline.decode.room import PARKING
from paceline.errors import InvalidParameter, UsageError

if TYPE_CHECKING:
    from paceline.decode.engine import EngineOptions

__all__ = [
    "LOGIT_COPIES",
    "MemoryPlan",
    "available_memory_bytes",
    "cgroup_headroom_bytes",
    "fit_memory",
    "parse_bytes",
    "plan_memory",
    "show_bytes",
    "workspace_bytes",
]

LOGIT_COPIES = 3  # logits, probabilities after the sampling options, the draft's distribution
_AUTO_SHARE = 0.9  # of what is free; the rest is for the runtime's own growth
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, and what they hold.

    limit        for all of it; None where neither was given nor is known: caches then grow to every lane's context
    cache, draft_cache   the most they may take; None where there is no limit
    context      tokens of one sequence at most
    sequences    of `context` tokens that fit at once; None where there is no limit
    """

    limit: int | None
    weights: int
    draft_weights: int
    workspace: int
    cache: int | None
    draft_cache: int | None
    context: int
    sequences: int | None

    def __str__(self) -> str:
        parts = {"weights": self.weights, "draft weights": self.draft_weights, "workspace": self.workspace}
        beside = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
        if self.cache is None or self.sequences is None:
            return f"memory: not limited; beside the caches {beside}"
        total = self.cache + (self.draft_cache or 0)
        fits = f"{self.sequences} sequence{'s' if self.sequences != 1 else ''} of {self.context} tokens"
        return f"memory: {fits} in {show_bytes(total)} of cache; {beside}"


def plan_memory(
    limit: int | None,
    weights: int,
    draft_weights: int,
    workspace: int,
    cost: Callable[[int], tuple[int, int]],  # tokens of one sequence -> bytes of its cache and its drafts' cache
    context: int,
    *,
    lowest_context: int,  # the context may be lowered to this where memory is short
    slots: int,  # the caches need no more than this many sequences
) -> MemoryPlan:
    """Share `limit` out. Raises UsageError, with all numbers, where not even one sequence fits."""
    if limit is None:
        return MemoryPlan(None, weights, draft_weights, workspace, None, None, context, None)
    left = limit - weights - draft_weights - workspace
    fitting = context
    while fitting > lowest_context and sum(cost(fitting)) > left:
        fitting = max(lowest_context, (fitting - 1) // KV_BLOCK * KV_BLOCK)
    target, draft = cost(fitting)
    if target + draft > left:
        raise UsageError(
            f"one sequence of {fitting} tokens needs {show_bytes(target + draft)} of cache; of {show_bytes(limit)}, "
            f"weights take {show_bytes(weights + draft_weights)} and the workspace {show_bytes(workspace)}, which "
            f"leaves {show_bytes(max(left, 0))}. Lower --max-context or the sequences at once, take a smaller draft, "
            "or raise --max-memory."
        )
    total = min(left, slots * (target + draft))
    share = total * target // (target + draft)
    sequences = total // (target + draft)
    return MemoryPlan(
        limit, weights, draft_weights, workspace, share, total - share, fitting, sequences
    )


def fit_memory(
    target: TargetModel,
    config: Any,  # of the target: hidden_size, intermediate_size
    drafters: Iterable[Drafter],
    options: EngineOptions,
    limit: int | None,  # bytes; None is a share of what is free
    asked_context: int | None,
) -> MemoryPlan:
    """What fits beside the weights, which are loaded by now; the caches of draft models get their budgets."""
    drafts = [d for d in drafters if isinstance(d, OwnsCache)]
    draft_weights = sum(d.weight_bytes for d in drafts)
    if limit is None and target.geometry.device.type == "cpu":
        free = available_memory_bytes()
        limit = None if free is None else int(free * _AUTO_SHARE) + target.weight_bytes + draft_weights
    lanes, context = options.max_batch, options.max_context
    cache = target.new_cache(1, context)

    def draft_cost(drafter: OwnsCache, tokens: int) -> int:
        return drafter.own_cache.cost(min(tokens, drafter.own_cache.limit))

    def cost(tokens: int) -> tuple[int, int]:
        return cache.cost(tokens), sum(draft_cost(d, tokens) for d in drafts)

    plan = plan_memory(
        limit,
        target.weight_bytes,
        draft_weights,
        workspace_bytes(target, config, options),
        cost,
        context,
        lowest_context=min(context, cache.block) if asked_context is None else context,
        slots=lanes * (1 + PARKING),
    )
    for drafter in drafts:
        if plan.draft_cache is not None:
            share = draft_cost(drafter, plan.context) / cost(plan.context)[1]
            drafter.own_cache.budget = int(plan.draft_cache * share)
    return plan


def workspace_bytes(target: TargetModel, config: Any, options: EngineOptions) -> int:
    """Bytes of the largest pass: every lane verifies at full draft length, or is in its prompt."""
    lanes, context = options.max_batch, -(-options.max_context // KV_BLOCK) * KV_BLOCK
    item, group = target.geometry.dtype.itemsize, target.geometry.group
    logits = lanes * (1 + options.max_draft) * target.vocab_width * 4 * LOGIT_COPIES
    rows = lanes * options.prefill_chunk
    masks = rows * context * (1 + item * (1 + group))
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    return int(logits + masks + rows * (8 * hidden + 4 * inner) * item)


def available_memory_bytes(
    device: str = "cpu", meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Memory that can still be had on `device`, control groups counted; None where the system does not say."""
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise InvalidParameter("device", device, "cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise InvalidParameter("device", device, "a device this machine has, here cpu")
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values: Mapping[str, str] = dict(line.split(":", 1) for line in lines if ":" in line)
    known = [int(values["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in values else []
    headroom = cgroup_headroom_bytes(cgroup)
    return min([*known, *([] if headroom is None else [headroom])], default=None)


def cgroup_headroom_bytes(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the control groups of this process still allow; None where they set no limit."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            found += _headrooms(root, path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _headrooms(root / "memory", path, names)
    return min(found, default=None)


def _headrooms(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Of a group and those above it; file pages not in use can be had back."""
    group = root / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        try:
            limit = (folder / names[0]).read_text(encoding="ascii").strip()
            used = int((folder / names[1]).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except OSError:
            limit = "max"
        if limit != "max" and int(limit) < 1 << 60:
            counts: Mapping[str, str] = dict(line.split() for line in stat.splitlines())
            found.append(max(0, int(limit) - used + int(counts.get(names[2], "0"))))
        if folder == root:
            break
    return found


def parse_bytes(text: str) -> int | None:
    """`auto` is None; otherwise a number of bytes, with kB, MB, GB, KiB, MiB or GiB behind it or alone."""
    if text == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise InvalidParameter("--max-memory", text, "auto, or bytes such as 6GiB, 800MB or 500000000")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= (1 << 30) // 10 else f"{count / (1 << 20):.1f} MiB"

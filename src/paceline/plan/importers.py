"""Acceptance from what people have: our traces, engines' metrics, benchmark results, published curves, plain
numbers.

Every importer says which kind of rate it read: vLLM and llama.cpp export prefix-accepted counts (survival),
TensorRT-LLM drafted and accepted counts by position, SGLang only a length. Refused: rates measured on random
token prompts or past the natural end of the text, which are not the acceptance of any real traffic.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.estimate import Origin
from paceline.core.records import SCHEMA, StepRecord, read_trace
from paceline.errors import InvalidParameter, ModelFormatError, UsageError
from paceline.plan.acceptance import (
    Acceptance,
    Mixture,
    acceptance_from_length,
    acceptance_from_lengths,
    acceptance_from_share,
    acceptance_from_survival,
)
from paceline.plan.lookup import nearest, normalise, read_table

__all__ = [
    "acceptance_from_points",
    "acceptance_from_prometheus",
    "acceptance_from_records",
    "list_published",
    "published_acceptance",
    "read_acceptance",
]

FILE_SCHEMA = "paceline.acceptance/1"
_ASSUMED_LOGIT_SD = 0.25  # spread of the logit between domains of one drafter, where no samples tell


def acceptance_from_points(
    points: Mapping[int, float], source: str, origin: Origin = Origin.MEASURED
) -> Acceptance:
    """From AL at some draft lengths; between two of them the conditional acceptance is constant."""
    known = {0: 1.0, **{int(d): float(v) for d, v in points.items()}}
    lengths = sorted(known)
    survival: list[float] = []
    last = 1.0
    for low, high in itertools.pairwise(lengths):
        if not 1 <= known[high] <= 1 + high:
            raise InvalidParameter(
                f"AL at draft length {high}", known[high],
                f"1 to {1 + high}: a round emits its own token and at most {high} drafts",
            )  # fmt: skip
        gain = max(0.0, (known[high] - known[low]) / last) if last > 0 else 0.0
        rate = _constant_rate(gain, high - low)
        for _ in range(high - low):
            last *= rate
            survival.append(last)
    conditional = acceptance_from_survival(survival, source, origin).conditional
    return Acceptance(conditional, source, origin, logit_sd=_ASSUMED_LOGIT_SD)


def _constant_rate(gain: float, count: int) -> float:
    """r with r + r^2 + ... + r^count = gain, at most 1."""
    low, high = 0.0, 1.0
    if gain >= count:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, count + 1)) < gain:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def list_published() -> list[dict[str, Any]]:
    """The published curves that travel with the package."""
    rows: list[dict[str, Any]] = read_table("acceptance.json")["curves"]
    return rows


def published_acceptance(name: str) -> Acceptance:
    """A published curve by its id; an unknown id offers the nearest."""
    rows = {row["name"]: row for row in list_published()}
    row = rows.get(normalise(name))
    if row is None:
        close = ", ".join(nearest(name, rows)) or "see `paceline plan --list`"
        raise InvalidParameter("acceptance", f"published:{name}", f"a published id; nearest known: {close}")
    source = f"{row['target']} {row['kind']} on {row['data']}, {row['source']}"
    if "conditional" in row:
        return Acceptance(
            tuple(row["conditional"]), source, logit_sd=_ASSUMED_LOGIT_SD, temperature=row["temperature"]
        )
    points = {int(d): v for d, v in row["acceptance_length"].items()}
    if sorted(points) == list(range(1, len(points) + 1)):
        found = acceptance_from_lengths([points[d] for d in sorted(points)], source)
    else:
        found = acceptance_from_points(points, source)
    return Acceptance(found.conditional, source, logit_sd=_ASSUMED_LOGIT_SD, temperature=row["temperature"],
                      all_rounds=row["kind"] == "ngram")  # fmt: skip


def acceptance_from_records(
    records: Iterable[StepRecord], source: str, drafter: str | None = None, draws: int = 200, seed: int = 0
) -> Acceptance:
    """From a trace: conditional rates over rounds that reached a position, resampled by request.

    Rounds of one request are alike, so whole requests are drawn (cluster bootstrap). The source says where a rule was
    used that is not exact.
    """
    by_request: dict[str, list[tuple[int, int]]] = defaultdict(list)
    temperatures, lossy = set(), set()
    for r in records:
        if r.kind == "verify" and r.proposed > 0 and (drafter is None or r.drafter == drafter):
            by_request[r.request].append((r.proposed, r.accepted))
            temperatures.add(r.temperature)
            lossy |= set() if r.lossless else {r.verify}
    if not by_request:
        who = "" if drafter is None else f" of drafter {drafter!r}"
        raise UsageError(f"{source} holds no verification rounds{who}: record a run with speculation on")
    longest = max(p for rounds in by_request.values() for p, _ in rounds)
    counts = np.array([_reach(rounds, longest) for rounds in by_request.values()])  # [requests, 2, positions]
    source = f"{source} ({len(by_request)} requests)" + (f", not exact: {', '.join(sorted(lossy))}" if lossy else "")
    rng = np.random.default_rng(seed)
    picked = [counts[rng.integers(len(counts), size=len(counts))].sum(axis=0) for _ in range(draws)]
    return Acceptance(
        _rates(counts.sum(axis=0)), source, Origin.MEASURED,
        draws=tuple(_rates(p) for p in picked),
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
    )  # fmt: skip


def _reach(rounds: list[tuple[int, int]], longest: int) -> list[list[int]]:
    proposed, accepted = np.array(rounds).T
    positions = np.arange(1, longest + 1)
    reached = ((proposed[:, None] >= positions) & (accepted[:, None] >= positions - 1)).sum(axis=0)
    kept = (accepted[:, None] >= positions).sum(axis=0)
    return [reached.tolist(), kept.tolist()]


def _rates(counts: Any) -> tuple[float, ...]:
    """Conditional rates; positions nobody reached hold the last one (a half of a half at the very first)."""
    found: list[float] = []
    for reached, kept in zip(counts[0], counts[1], strict=True):
        found.append(float(kept / reached) if reached else (found[-1] if found else 0.5))
    return tuple(found)


def acceptance_from_prometheus(text: str, source: str) -> Acceptance:
    """From a scrape of vLLM, llama.cpp, TensorRT-LLM or SGLang metrics.

    vLLM and llama.cpp: accepted_per_pos / drafts is the prefix-accepted rate (survival). With a draft length
    that varies, deep positions look worse than they are: those two export no drafted count by position.
    """
    samples = _samples(text)
    for engine, drafts, per_position in (
        ("vLLM", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"),
        ("llama.cpp", "llamacpp:spec_decode_num_drafts", "llamacpp:spec_decode_num_accepted_tokens_per_pos"),
    ):
        total = sum(samples.get(drafts, {}).values())
        positions = samples.get(per_position, {})
        if total and positions:
            survival = [min(1.0, positions[p] / total) for p in sorted(positions)]
            return acceptance_from_survival(survival, f"{engine} metrics in {source}")
    drafted = samples.get("trtllm_spec_decode_drafted_tokens", {})
    accepted = samples.get("trtllm_spec_decode_accepted_tokens", {})
    if drafted and accepted:
        order = sorted(drafted)
        before = [drafted[order[0]], *(accepted.get(p, 0.0) for p in order[:-1])]
        reach = [min(b, drafted[p]) for b, p in zip(before, order, strict=True)]
        rates = tuple(
            min(1.0, accepted.get(p, 0.0) / r) if r else 0.0 for p, r in zip(order, reach, strict=True)
        )
        return Acceptance(rates, f"TensorRT-LLM metrics in {source}")
    length = samples.get("sglang:spec_accept_length", {})
    tokens = samples.get("sglang:spec_num_draft_tokens", {})
    if length and tokens:
        al, d = next(iter(length.values())), round(next(iter(tokens.values()))) - 1
        return acceptance_from_length(al, d, f"SGLang gauges in {source} (last interval only)")
    raise UsageError(
        f"{source} has no speculative decoding metrics that carry acceptance; scrape vllm:spec_decode_*, "
        "llamacpp:spec_decode_*, trtllm_spec_decode_* or sglang:spec_* while speculation runs"
    )


def _samples(text: str) -> dict[str, dict[int, float]]:
    """Metric name without `_total` -> position (0 where there is none) -> sum over label sets."""
    found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        match = re.match(r"^([A-Za-z_:][\w:]*)(\{[^}]*\})?\s+([-+.\deE]+)", line)
        if match:
            place = re.search(r'(?:token_)?position="(\d+)"', match[2] or "")
            name = match[1].removesuffix("_total")
            found[name][int(place[1]) if place else 0] += float(match[3])
    return found


def read_acceptance(text: str, survival: bool = False) -> Acceptance:
    """What `--acceptance` (or, `survival`, `--survival`) was given: see the grammar in docs/planning.md."""
    if re.fullmatch(r"[-+\d.eE,\s]+", text):
        numbers = _numbers(text)
        if survival:
            return acceptance_from_survival(numbers, "given on the command line", Origin.ASSUMED)
        return Acceptance(tuple(numbers), "given on the command line", Origin.ASSUMED)
    if survival:
        raise InvalidParameter("survival", text, "numbers from 0 to 1 by position, parted by commas")
    if text.startswith("probe:"):
        from paceline.plan.probe_import import acceptance_of

        return acceptance_of(text)
    if text.startswith("published:"):
        return published_acceptance(text.removeprefix("published:"))
    match = re.fullmatch(r"(AL|share):([\d.]+)@(\d+)", text)
    if match:
        make = acceptance_from_length if match[1] == "AL" else acceptance_from_share
        return make(float(match[2]), int(match[3]), f"{match[1]} {match[2]} at draft length {match[3]}")
    name, _, length = text.partition("@")
    return _read_file(Path(name), int(length) if length.isdigit() else None)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(
            "acceptance", text, "numbers from 0 to 1 by position, parted by commas"
        ) from None


def _read_file(path: Path, draft_length: int | None) -> Acceptance:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"acceptance {str(path)!r} is no readable file ({error}); give a file, published:ID, AL:2.9@5, "
            "share:0.42@8 or numbers by position such as 0.82,0.74"
        ) from error
    if SCHEMA in text[:200]:
        _, records = read_trace(path)
        return acceptance_from_records(records, path.name)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return acceptance_from_prometheus(text, path.name)
    if isinstance(value, Mapping):
        return _from_json(value, path.name, draft_length)
    raise ModelFormatError(f"{path} holds a {type(value).__name__}; a JSON object is needed")


def _from_json(value: Mapping[str, Any], name: str, draft_length: int | None) -> Acceptance:
    if value.get("schema") == FILE_SCHEMA:
        return _own_file(value, name)
    _refuse_unreal(value, name)
    rates = value.get("spec_decode_per_position_acceptance_rates")
    if rates:
        scale = 100.0 if max(rates) > 1 else 1.0
        return acceptance_from_survival([r / scale for r in rates], f"vLLM bench result {name}")
    length = value.get("spec_decode_acceptance_length", value.get("accept_length"))
    if length is None and value.get("mean_itl_ms") and value.get("mean_tpot_ms"):
        # A streaming client sees one chunk a round, so chunk gap / time per token = tokens per round.
        length = value["mean_itl_ms"] / value["mean_tpot_ms"]
    if length is None:
        raise UsageError(f"{name} carries no acceptance: none of the fields Paceline knows is in it")
    depth = draft_length or value.get("num_speculative_tokens") or value.get("speculative_num_steps")
    if not depth:
        raise UsageError(
            f"{name} gives an acceptance length of {length:.3g} without its draft length; write {name}@D"
        )
    return acceptance_from_length(float(length), int(depth), name)


def _refuse_unreal(value: Mapping[str, Any], name: str) -> None:
    dataset = str(value.get("dataset_name") or value.get("dataset") or "")
    if dataset.startswith("random") or value.get("ignore_eos") is True:
        what = f"dataset {dataset!r}" if dataset.startswith("random") else "ignore_eos"
        raise UsageError(
            f"{name} was measured with {what}: random tokens and text forced past its end do not have the "
            "acceptance of real traffic; measure on real prompts, or give an assumed figure such as AL:2.0@3"
        )


def _own_file(value: Mapping[str, Any], name: str) -> Acceptance:
    """Our own format: groups with token shares, sampling temperature and context bands."""
    parts = []
    for group in value.get("groups", []):
        unknown = group.keys() - {"name", "share", "temperature", "acceptance", "by_context"}
        if unknown or "acceptance" not in group:
            raise ModelFormatError(
                f"{name}: a group needs `acceptance` and has unknown fields {sorted(unknown)}"
            )
        bands = tuple(
            (float("inf") if b[0] is None else float(b[0]), tuple(b[1])) for b in group.get("by_context", [])
        )
        parts.append((
            float(group.get("share", 1.0)),
            Acceptance(tuple(group["acceptance"]), group.get("name", name), by_context=bands,
                       logit_sd=_ASSUMED_LOGIT_SD, temperature=group.get("temperature")),
        ))  # fmt: skip
    if not parts:
        raise ModelFormatError(f"{name} has no groups; one with `acceptance` is needed")
    return parts[0][1] if len(parts) == 1 else Mixture(tuple(parts)).merged()

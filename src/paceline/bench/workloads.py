"""Prompts of public data sets, chosen the same way every time.

A workload is a kind of text (chat, code, code_edit, maths, json, multilingual) or a mixture (spec_bench).
`count` prompts are spread evenly over the file, so that a small choice is not its first subject alone. No two
have the same text, nor are they, while the file has enough tasks, one task in two languages.

The folder holds one folder per data set, as `SOURCES` names them. Raises UsageError where a folder or a file
is missing, a line cannot be read, or the file has fewer distinct prompts than asked for.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, UsageError

__all__ = ["KINDS", "SOURCES", "Workload", "WorkloadPrompt", "load_workload"]

Row = dict[str, Any]
Pool = list["WorkloadPrompt"]


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """id is unique in its workload and stays with the text, however many prompts are chosen."""

    id: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation of one turn."""
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Workload:
    """`count` prompts of one kind of text. `name` says which data set."""

    name: str
    kind: str
    prompts: tuple[WorkloadPrompt, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a kind's prompts come from. `read` gives them in groups of one language each."""

    name: str
    file: str
    read: Callable[[Path], list[Pool]]


def load_workload(kind: str, folder: Path, count: int) -> Workload:
    """`count` distinct prompts of `kind` (see `KINDS`) from the data sets under `folder`."""
    if kind not in SOURCES:
        raise InvalidParameter("workload", kind, f"one of {', '.join(KINDS)}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter("prompts", count, "a whole number from 1")
    source = SOURCES[kind]
    place = folder / source.name
    if not place.is_dir():
        raise UsageError(f"the workload {kind} needs the folder {place}, which is not there.")
    chosen = _choose(source.read(place / source.file), count)
    if len(chosen) < count:
        raise UsageError(f"{count} prompts of {kind} asked for; {place} has {len(chosen)} distinct ones.")
    return Workload(source.name, kind, tuple(chosen))


def _choose(groups: Sequence[Pool], count: int) -> list[WorkloadPrompt]:
    """Prompt i from group i mod groups, at place i/count of it; where texts repeat, whatever is left."""
    chosen: dict[str, WorkloadPrompt] = {}
    used: set[tuple[int, int]] = set()
    for i in range(count):
        group = i % len(groups)
        place = i * len(groups[group]) // count
        used.add((group, place))
        if place < len(groups[group]):
            chosen.setdefault(groups[group][place].text, groups[group][place])
    for group, pool in enumerate(groups):
        for place, prompt in enumerate(pool):
            if len(chosen) < count and (group, place) not in used:
                chosen.setdefault(prompt.text, prompt)
    return list(chosen.values())


# -- files -------------------------------------------------------------------------------------------------


def _jsonl(path: Path) -> list[tuple[int, Row]]:
    """(line number, object) of every line; `.gz` files too."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"the workload file {path} cannot be read: {error}.") from error
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} line {number} is not JSON: {error.msg}.") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number} is not a JSON object.")
        rows.append((number, row))
    return rows


def _prompts(
    path: Path, identity: Callable[[int, Row], str], text: Callable[[Row], str], keep: Row | None = None
) -> Pool:
    """A prompt per line; only lines that have the values of `keep`."""
    prompts: Pool = []
    for number, row in _jsonl(path):
        try:
            if any(row[key] != value for key, value in (keep or {}).items()):
                continue
            prompt = WorkloadPrompt(identity(number, row), text(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} line {number} lacks a field: {error}.") from error
        if not isinstance(prompt.text, str) or not prompt.text:
            raise UsageError(f"{path} line {number} has the prompt {prompt.text!r}; allowed: some text.")
        prompts.append(prompt)
    return prompts


def _first_turns(path: Path) -> list[Pool]:
    return [_prompts(path, lambda _, row: str(row["question_id"]), lambda row: row["turns"][0])]


def _completions(path: Path) -> list[Pool]:
    def text(row: Row) -> str:
        code = row["prompt"].strip("\n")
        return (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{code}\n```"
        )

    return [_prompts(path, lambda _, row: row["task_id"], text)]


def _edits(path: Path) -> list[Pool]:
    """One group a language, Python first."""
    languages = dict.fromkeys(["python", *(str(row.get("lang")) for _, row in _jsonl(path))])
    return [
        _prompts(path, lambda _, row: row["id"], lambda row: row["prompt"], {"lang": language})
        for language in languages
    ]


def _questions(path: Path) -> list[Pool]:
    return [_prompts(path, lambda number, _: str(number), lambda row: row["question"])]


def _extractions(path: Path) -> list[Pool]:
    return [_prompts(path, lambda _, row: row["id"], lambda row: row["prompt"])]


def _languages(pattern: Path) -> list[Pool]:
    """One group a language, English left out; the files have the same questions line by line."""
    files = [p for p in sorted(pattern.parent.glob(pattern.name)) if not p.stem.endswith("_en")]
    if not files:
        raise UsageError(f"there is no file {pattern} of another language than English.")
    return [[WorkloadPrompt(f"{p.stem}/{number}", text) for number, text in _column(p)] for p in files]


def _column(path: Path) -> Iterable[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the workload file {path} cannot be read: {error}.") from error
    return [(number, row[0]) for number, row in enumerate(rows, start=1) if row]


SOURCES: dict[str, _Source] = {
    "chat": _Source("mt_bench", "question.jsonl", _first_turns),
    "code": _Source("humaneval", "HumanEval.jsonl.gz", _completions),
    "code_edit": _Source("code_edit_humanevalfix", "edit_prompts.jsonl", _edits),
    "maths": _Source("gsm8k", "test.jsonl", _questions),
    "json": _Source("json_extraction_snips", "snips_slots.jsonl", _extractions),
    "multilingual": _Source("mgsm_multilingual", "mgsm_*.tsv", _languages),
    "spec_bench": _Source("spec_bench", "question.clean_subset.jsonl", _first_turns),
}
KINDS = tuple(SOURCES)

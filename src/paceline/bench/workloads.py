"""Prompts of public data sets, chosen the same way every time.

A workload is a kind of text (chat, code, code_edit, maths, json, multilingual), a mixture (spec_bench), a set of
our own (adversarial, sample: `own_prompts.py`) or a file of prompts. `count` prompts are spread evenly over a
file, so that a small choice is not its first subject alone. No two have the same text, nor are they, while the
file has enough tasks, one task in two languages.

The folder holds one folder per data set, as `SOURCES` names them. Raises UsageError where a folder or a file
is missing, a line cannot be read, or the file has fewer distinct prompts than asked for.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.own_prompts import OWN_KINDS, own_prompts
from paceline.errors import InvalidParameter, UsageError

__all__ = ["KINDS", "SOURCES", "Workload", "WorkloadPrompt", "load_workload", "open_workloads", "workloads_folder"]

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


def open_workloads(names: Sequence[str], count: int, folder: Path | None = None) -> list[Workload]:
    """Each of `names`, a kind or a file of prompts, with at most `count` prompts; of a file all where it has fewer.

    Raises UsageError where a file cannot be read, InvalidParameter where one is named twice.
    """
    if len(set(names)) < len(names):
        raise InvalidParameter("workload", ", ".join(names), "every name once")
    found = []
    for name in names:
        path = Path(name)
        if name not in KINDS and (path.suffix or path.exists()):
            found += _from_file(path, count)
        elif name == "sample":
            found += _by_maker(load_workload(name, Path(), count))
        else:
            found.append(load_workload(name, folder or workloads_folder(), count))
    return found


def _by_maker(whole: Workload) -> list[Workload]:
    """A mix of our own as one workload a kind of prompt."""
    kinds = dict.fromkeys(p.id.partition("/")[0] for p in whole.prompts)
    return [Workload(whole.name, k, tuple(p for p in whole.prompts if p.id.startswith(f"{k}/"))) for k in kinds]


def workloads_folder() -> Path:
    """The data sets: `workloads` in the folder that PACELINE_SHARED names, or in `shared` here or one above."""
    if named := os.environ.get("PACELINE_SHARED"):
        return Path(named) / "workloads"
    here = [Path("shared"), Path("..", "shared"), Path(__file__).resolve().parents[4] / "shared"]
    return next((p for p in here if (p / "workloads").is_dir()), here[0]) / "workloads"


def load_workload(kind: str, folder: Path, count: int) -> Workload:
    """`count` distinct prompts of `kind` (see `KINDS`) from the data sets under `folder`."""
    if kind not in KINDS:
        raise InvalidParameter("workload", kind, f"one of {', '.join(KINDS)}, or a file")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidParameter("prompts", count, "a whole number from 1")
    if kind in OWN_KINDS:
        return Workload(kind, kind, tuple(WorkloadPrompt(*pair) for pair in own_prompts(kind, count)))
    source = SOURCES[kind]
    place = folder / source.name
    if not place.is_dir():
        raise UsageError(f"the workload {kind} needs the folder {place}, which is not there.")
    chosen = _choose(source.read(place / source.file), count)
    if len(chosen) < count:
        raise UsageError(f"{count} prompts of {kind} asked for; {place} has {len(chosen)} distinct ones.")
    return Workload(source.name, kind, tuple(chosen))


def _from_file(path: Path, count: int) -> list[Workload]:
    """JSON lines with `prompt` (or `question`, `turns`) and perhaps `id` and `task`, one workload a task; else one
    prompt a line."""
    if path.suffix in (".jsonl", ".gz"):
        rows = [(str(row.get("task", path.stem)), str(row.get("id", n)), _text_of(row)) for n, row in _jsonl(path)]
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the prompts {path} cannot be read: {error}.") from error
        rows = [(path.stem, str(number), line) for number, line in enumerate(lines, start=1) if line.strip()]
    if any(not text for _, _, text in rows) or not rows:
        raise UsageError(f"{path} has lines without a prompt; each needs `prompt`, `question` or `turns` of text.")
    made = []
    for task in dict.fromkeys(task for task, _, _ in rows):
        pool = [WorkloadPrompt(name, text) for own, name, text in rows if own == task]
        if len({p.id for p in pool}) < len(pool):
            raise UsageError(f"{path} has two prompts of one id in {task}; give each its own.")
        made.append(Workload(path.name, task, tuple(_choose([pool], min(count, len({p.text for p in pool}))))))
    return made


def _text_of(row: Row) -> str:
    turns = row.get("turns")
    text = row.get("prompt") or row.get("question") or (turns[0] if isinstance(turns, list) and turns else "")
    return text if isinstance(text, str) else ""


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
KINDS = (*SOURCES, *OWN_KINDS)

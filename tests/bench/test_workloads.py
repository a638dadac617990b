"""Workloads: the same distinct prompts every time, and a sentence for every fault of the files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.workloads import KINDS, WorkloadPrompt, _choose, load_workload
from paceline.errors import InvalidParameter, UsageError


def write(folder: Path, name: str, rows: list[object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return folder.parent


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_a_choice_is_distinct_and_as_large_as_the_file_allows(groups: list[list[int]], count: int) -> None:
    pools = [
        [WorkloadPrompt(f"{g}/{i}", str(v)) for i, v in enumerate(values)] for g, values in enumerate(groups)
    ]
    chosen = _choose(pools, count)
    texts = [p.text for p in chosen]
    distinct = {p.text for pool in pools for p in pool}
    assert len(set(texts)) == len(texts) == min(count, len(distinct))
    assert chosen == _choose(pools, count)


def test_a_choice_is_spread_and_takes_the_groups_in_turn() -> None:
    pools = [[WorkloadPrompt(f"{g}/{i}", f"{g}/{i}") for i in range(100)] for g in "ab"]
    assert [p.id for p in _choose(pools, 4)] == ["a/0", "b/25", "a/50", "b/75"]


def test_code_prompts_are_read_from_gzip(tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    row = {"task_id": "T/0", "prompt": "\ndef f():\n"}
    (tmp_path / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (prompt,) = load_workload("code", tmp_path, 1).prompts
    assert prompt.id == "T/0" and "```python\ndef f():\n```" in prompt.text
    assert prompt.messages == [{"role": "user", "content": prompt.text}]


def test_edits_begin_with_python(tmp_path: Path) -> None:
    names = [(lang, i) for lang in ("go", "python") for i in (0, 1)]
    rows = [{"id": f"{lang}/{i}", "lang": lang, "prompt": f"{lang} {i}"} for lang, i in names]
    root = write(tmp_path / "code_edit_humanevalfix", "edit_prompts.jsonl", rows)
    assert [p.id for p in load_workload("code_edit", root, 2).prompts] == ["python/0", "go/1"]


def test_english_is_not_multilingual(tmp_path: Path) -> None:
    folder = tmp_path / "mgsm_multilingual"
    folder.mkdir()
    for language in ("de", "en", "fr"):
        text = "".join(f'"{language}" {i}\t{i}\n' for i in range(4))
        (folder / f"mgsm_{language}.tsv").write_text(text, encoding="utf-8")
    prompts = load_workload("multilingual", tmp_path, 4).prompts
    assert [p.text for p in prompts] == ['"de" 0', '"fr" 1', '"de" 2', '"fr" 3']


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="chat, code"):
        load_workload("poems", tmp_path, 1)
    with pytest.raises(InvalidParameter, match="whole number from 1"):
        load_workload("chat", tmp_path, 0)
    with pytest.raises(UsageError, match="not there"):
        load_workload("chat", tmp_path, 1)
    root = write(tmp_path / "gsm8k", "test.jsonl", [{"question": "a"}, {"question": "a"}])
    with pytest.raises(UsageError, match="has 1 distinct"):
        load_workload("maths", root, 2)
    write(tmp_path / "gsm8k", "test.jsonl", [{"question": "a"}, {"answer": "b"}])
    with pytest.raises(UsageError, match=r"line 2 lacks a field: 'question'"):
        load_workload("maths", root, 1)
    write(tmp_path / "gsm8k", "test.jsonl", [{"question": 5}])
    with pytest.raises(UsageError, match="has the prompt 5"):
        load_workload("maths", root, 1)
    write(tmp_path / "gsm8k", "test.jsonl", [[1]])
    with pytest.raises(UsageError, match="line 1 is not a JSON object"):
        load_workload("maths", root, 1)
    (tmp_path / "gsm8k/test.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        load_workload("maths", root, 1)
    (tmp_path / "mgsm_multilingual").mkdir()
    with pytest.raises(UsageError, match="another language"):
        load_workload("multilingual", tmp_path, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_files_give_distinct_prompts(shared: Path, kind: str) -> None:
    workload = load_workload(kind, shared / "workloads", 24)
    assert len({p.text for p in workload.prompts}) == len({p.id for p in workload.prompts}) == 24
    if kind == "multilingual":
        assert len({p.id.split("/")[0] for p in workload.prompts}) == 10
        assert len({p.id.split("/")[1] for p in workload.prompts}) == 24
    if kind == "code_edit":
        assert len({p.id.split("/")[0] for p in workload.prompts}) == 6

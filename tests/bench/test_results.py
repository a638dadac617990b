"""Results files: nothing written is lost, nothing of another run is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.results import ResultFile
from paceline.errors import UsageError

RUN = {"model": "m", "sizes": (1, 2)}


def filled(path: Path) -> Path:
    with ResultFile(path, RUN) as results:
        results.append({"a": 1})
        results.append({"a": 2})
    return path


def test_a_file_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = filled(tmp_path / "deeper" / "r.jsonl")
    with ResultFile(path, RUN) as again:
        assert again.rows == [{"a": 1}, {"a": 2}]
        again.append({"a": 3})
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.parametrize("kept", range(1, 20))
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path / "r.jsonl")
    path.write_bytes(path.read_bytes()[:-kept])
    with ResultFile(path, RUN) as again:
        assert again.rows == [{"a": 1}][: 1 if kept <= 8 else 0]
        again.append({"a": 9})
    with ResultFile(path, RUN) as last:
        assert last.rows[-1] == {"a": 9}


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "r.jsonl")
    with pytest.raises(UsageError, match="model 'm' there and 'n' now"):
        ResultFile(path, {"model": "n", "sizes": (1, 2)})
    path.write_text("[]\n")
    with pytest.raises(UsageError, match="line 1 is not a JSON object"):
        ResultFile(path, {})
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="schema None"):
        ResultFile(path, {})
    path.write_text("no\n")
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        ResultFile(path, {})
    with pytest.raises(UsageError, match="cannot be written"):
        ResultFile(tmp_path, {})

"""Step records add up with the counters and with what was emitted; traces survive the round trip."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from toy import Lab, ToyModel, hashed, request

from paceline.core.records import SCHEMA, StepRecord, TraceWriter, read_trace
from paceline.decode.engine import Engine
from paceline.errors import ModelFormatError, UsageError

WIDTH, EOS = 24, 3
TARGET = hashed(WIDTH, seed=1, order=1)


def ran(lab: Lab) -> dict[str, Any]:
    """Requests with and without drafts, long prompts, several choices, an end inside a block."""
    engine = lab.engine(
        ToyModel(TARGET, WIDTH), lambda v, b: _loop(v.tokens, b), eos=[EOS], max_batch=3, prefill_chunk=4
    )
    asks = [
        request([5] * 11, id="long", length=4, max_tokens=20),
        request([6], id="many", length=3, max_tokens=9, n=2, temperature=0.5, seed=1),
        request([7, 8], id="plain", draft="none", max_tokens=7, ignore_eos=True),
        request([9], id="short", length=5, max_tokens=1),
    ]
    return lab.run(engine, asks, [0, 0, 2, 3])


def _loop(tokens: list[int], budget: int) -> list[int]:
    made: list[int] = []
    while len(made) < budget:
        made.append(int(TARGET(((tokens + made)[-1],)).argmax()))
    return made


def test_records_add_up(lab: Lab) -> None:
    results = ran(lab)
    by_choice: dict[tuple[str, int], list[StepRecord]] = defaultdict(list)
    by_round: dict[int, list[StepRecord]] = defaultdict(list)
    for record in lab.records:
        by_choice[record.request, record.choice].append(record)
        by_round[record.round].append(record)
    assert len(by_choice) == 5
    for (name, choice), records in by_choice.items():
        one = results[name][choice]
        stats, prompt = one.sequence.stats, one.sequence.view.prompt_len
        assert sum(r.emitted for r in records) == len(one.tokens)
        rounds = [r for r in records if r.kind != "prefill"]
        assert records[: len(records) - len(rounds)] == [r for r in records if r.kind == "prefill"]
        assert len(records) - len(rounds) == -(-prompt // 4), "one record for each chunk"
        assert stats.rounds == len(rounds) and stats.emitted == sum(r.emitted for r in rounds)
        assert stats.drafted == sum(r.proposed for r in rounds) and stats.accepted == sum(r.accepted for r in rounds)
        assert stats.draft_rounds == sum(r.kind == "verify" for r in rounds)
        assert stats.emitted_in_draft_rounds == sum(r.emitted for r in rounds if r.kind == "verify")
        context = prompt
        for r in records:
            assert r.context == context and r.accepted <= r.emitted <= r.accepted + 1 and r.accepted <= r.proposed
            assert (r.kind == "verify") == (r.proposed > 0) == (r.drafter == "scripted")
            assert r.temperature == one.sequence.request.params.temperature
            context += r.emitted
    for records in by_round.values():
        assert {r.batch for r in records} == {len(records)}
        rows = sum(1 + r.proposed if r.kind != "prefill" else 0 for r in records)
        assert len({r.rows for r in records}) == 1 and records[0].rows >= rows
        assert len({(r.time_s, r.draft_s, r.verify_s, r.other_s) for r in records}) == 1
    assert list(by_round) == sorted(by_round) == list(range(len(by_round)))


def test_seconds_are_those_of_the_clock(lab: Lab) -> None:
    """A clock that ticks once a look: every second is given to one part of a round, and none is negative."""
    ticks = count()
    records: list[StepRecord] = []
    engine = Engine(
        ToyModel(TARGET, WIDTH),
        vocab_size=WIDTH,
        drafters=None,
        on_record=records.append,
        clock=lambda: float(next(ticks)),
    )
    (choice,) = engine.add(request([1], draft="none", max_tokens=5))
    while engine.has_work:
        engine.step()
    assert all(min(r.draft_s, r.verify_s, r.other_s) > 0 for r in records)
    wholes = [r.draft_s + r.verify_s + r.other_s for r in records]
    assert choice.stats.prefill_s == wholes[0] and choice.stats.decode_s == sum(wholes[1:])
    assert [r.time_s for r in records] == sorted(r.time_s for r in records)


def test_round_trip(lab: Lab, tmp_path: Path) -> None:
    ran(lab)
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, {"model": "tøy", "draft_length": None})
    odd = StepRecord(**{**asdict(lab.records[-1]), "confidence": (0.5, 0.25), "drafter": "über"})
    for record in [*lab.records, odd]:
        writer.write(record)
    writer.close()
    run, records = read_trace(path)
    assert run == {"model": "tøy", "draft_length": None}
    assert list(records) == [*lab.records, odd]
    stream = StringIO()
    writer = TraceWriter(stream, run)
    for record in [*lab.records, odd]:
        writer.write(record)
    writer.close()
    assert stream.getvalue() == path.read_text(encoding="utf-8") and not stream.closed


GOOD = asdict(StepRecord("0", 0, 0, 0.0, 1, 1, 1, "plain", "none", 0, 0, 1, 0.0, 0.1, 0.0))
HEADER = json.dumps({"schema": SCHEMA, "run": {}})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1 is not JSON"),
        ("[]\n", "line 1 is not a JSON object"),
        ('{"schema":"paceline.trace/9"}\n', "paceline.trace/9.*paceline.trace/1"),
        ("{}\n", "schema None"),
        (HEADER + "\n{oops\n", "line 2 is not JSON"),
        (HEADER + "\n" + json.dumps(GOOD) + "\n7\n", "line 3 is not a JSON object"),
        (HEADER + "\n" + json.dumps({**GOOD, "colour": 1}) + "\n", "line 2 has unknown fields.*colour"),
        (HEADER + "\n" + json.dumps({"request": "0"}) + "\n", "line 2 lacks a field.*choice"),
    ],
)
def test_the_reader_names_what_it_cannot_read(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelFormatError, match=words):
        list(read_trace(path)[1])


def test_a_file_that_is_not_there_and_one_that_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot be written"):
        TraceWriter(tmp_path / "no folder" / "t.jsonl", {})
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFormatError, match=r"binary\.jsonl is not UTF-8"):
        read_trace(binary)

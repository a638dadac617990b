"""`paceline bench` end to end on a tiny model and on a scripted server; its summary against planted numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from probe_toys import made_up_probe
from test_probe import check_page
from tiny_models import save_folder, tiny_backend, tiny_model

from paceline.bench.bench_run import ArmSpec, BlockResult, best_fixed, engine_without_controller
from paceline.bench.loads import BlockTimes, EngineLoad, Rounds
from paceline.bench.paired import Run, RunKey, Sample, plan_blocks
from paceline.bench.server_load import parse_server
from paceline.bench.summary import summarise_bench
from paceline.bench.workloads import open_workloads
from paceline.cli import main
from paceline.core.records import StepRecord
from paceline.decode.llm import LLM
from paceline.decode.sequence import DraftSettings
from paceline.errors import InvalidParameter
from paceline.plan.probe_file import Drafts, ReplayedText, short_name
from paceline.report.bench_text import bench_text, broken, unexcused

ARMS = [ArmSpec("plain", None, 0), ArmSpec("auto", "auto", None), ArmSpec("a D=2", "a", 2), ArmSpec("a D=4", "a", 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = tiny_model(seed=3, max_position_embeddings=768)
    return str(save_folder(tmp_path_factory.mktemp("model") / "m", tiny, tiny_backend()))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"task": t, "id": str(i), "prompt": f"fox {i} {i} {i}"} for i in range(3) for t in ("copy", "talk")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_arms_loads_pages_and_going_on(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, page = tmp_path / "r.jsonl", tmp_path / "bench.html"
    arguments = ["bench", model, "--draft", "auto", "--draft", model, "--workload", prompts, "--dtype", "float32"]
    arguments += ["--prompts", "2", "--max-tokens", "8", "--threads", "1", "--output", str(output)]
    arguments += ["--concurrency", "1,2", "--temperature", "0,0.8", "--draft-length", "auto,0,3"]
    assert main([*arguments, "--rounds", "1", "--html", str(page), "--json"]) == 0
    s = json.loads(capsys.readouterr().out)
    names = ["plain", "auto", "ngram D=3", "suffix D=3", f"model:{Path(model).stem} D=3"]
    assert [a["name"] for a in s["arms"]] == names
    cells = {(c["temperature"], c["concurrency"], c["pool"], c["kind"], c["arm"]) for c in s["cells"]}
    assert len(cells) == len(s["cells"]) == 2 * 2 * 3 * 5
    assert s["partings"] == [] and all(c["same"] == c["compared"] for c in s["cells"])
    assert all(c["tokens_per_s"] > 0 for c in s["cells"])
    agreed = next(p for p in s["positions"] if p["arm"] == names[-1])
    assert agreed["acceptance"][0][0] == 1.0, "a model agrees with itself"
    assert s["predicted"]["points"] and {o["kind"] for o in s["oracle"]} == {"copy", "talk", "mix"}
    check_page(page)
    first = output.read_text()
    assert main([*arguments, "--rounds", "1"]) == 0
    assert output.read_text() == first, "nothing is measured twice"
    assert "all 64 texts compared are plain's" in capsys.readouterr().out
    assert main([*arguments, "--rounds", "1", "--max-tokens", "9"]) == 2
    assert "holds another run" in capsys.readouterr().err


def test_the_controller_learns_from_its_own_rounds_alone(model: str, prompts: str) -> None:
    """Fixed and plain arms run on an engine without it; on its own engine (the fault) it would hear of theirs."""
    records: list[StepRecord] = []
    llm = LLM(model, dtype="float32", threads=1, on_record=records.append)
    (workload, _) = open_workloads([prompts], 2)
    (block_of_fixed,) = plan_blocks([workload], ["ngram D=3"], 1, concurrencies=(2,))
    assert llm.draft_set.auto is not None
    table, cost = llm.draft_set.auto.controller.tables[0], llm.draft_set.auto.controller.cost
    for engine, heard in ((engine_without_controller(llm, records), False), (llm.engine, True)):
        samples, times = EngineLoad(llm, engine, DraftSettings("ngram", 3), records, 24)(block_of_fixed)
        assert sum(s.drafted for s in samples) > 0 and times.tokens == sum(s.tokens for s in samples)
        assert (table.outcomes(0) > 0) is heard and (cost.rounds > 0) is heard


def test_a_screened_run_keeps_the_best_fixed_arms(
    model: str, prompts: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["bench", model, "--workload", prompts, "--prompts", "1", "--max-tokens", "6", "--rounds", "1"]
    arguments += ["--dtype", "float32", "--threads", "1", "--draft-length", "auto,0,1,2,4", "--json"]
    probe = tmp_path / "probe.json"
    probing = ["probe", model, "--prompts", prompts, "--budget", "0.1", "--max-tokens", "12", "--threads", "1"]
    assert main([*probing, "--dtype", "float32", "--output", str(probe)]) == 0
    capsys.readouterr()
    assert main([*arguments, "--screen", "1", "--probe", str(probe)]) == 0
    s = json.loads(capsys.readouterr().out)
    assert len(s["arms"]) == 3 and [a["name"] for a in s["arms"]][:2] == ["plain", "auto"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workload", "chess"], "chess"),
        (["--concurrency", "0"], "--concurrency"),
        (["--draft-length", "auto,x"], "--draft-length"),
        (["--draft", "none", "--draft-length", "0,4"], "--draft-length"),
        (["--rounds", "0"], "--rounds"),
        (["--probe", "x.json"], "--probe"),
        (["--transformers", "--concurrency", "4"], "--transformers"),
        (["--url", "ftp://x"], "--url"),
        (["--url", "http://localhost:1", "--draft", "ngram"], "--draft"),
        (["--url", "http://localhost:1"], "localhost"),
    ],
)
def test_mistakes_are_one_sentence(
    model: str, options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", model, *options]) in (1, 2)
    err = capsys.readouterr().err
    assert word in err.strip().splitlines()[-1] and "Traceback" not in err


def test_pl_03_there_is_no_way_to_measure_random_tokens_or_past_the_end() -> None:
    """PL-03: prompts are text, answers end where the model ends them; neither can be asked for otherwise."""
    for options in (["--ignore-eos"], ["--random-input-len", "8"], ["--min-tokens", "512"]):
        for verb in ("bench", "probe"):
            with pytest.raises(SystemExit) as stop:
                main([verb, "m", *options])
            assert stop.value.code == 2


# -- the summary -------------------------------------------------------------------------------------------


def run(prompt: str, arm: str, seconds: float, tokens: tuple[int, ...] = tuple(range(21)), round: int = 0) -> Run:
    drafted = {"plain": 0, "auto": 3, "a D=2": 2, "a D=4": 4}[arm]
    sample = Sample(
        prompt_tokens=4, token_ids=tokens, finish_reason="stop", first_s=0.1, decode_s=seconds,
        rounds=10, draft_rounds=10 if drafted else 0, emitted=20, emitted_in_draft_rounds=20 if drafted else 0,
        target_s=seconds, draft_s=0.0, other_s=0.0, lengths=(drafted,) * 10, kept=(min(1, drafted),) * 10,
    )  # fmt: skip
    return Run(RunKey("chat", prompt, arm, round), sample)


def block(one: Run, batch: int = 1) -> BlockResult:
    drafted = one.sample.lengths[0]
    rounds = (Rounds(batch, batch * (1 + drafted), drafted, 10, 256.0, one.sample.decode_s, 0.0, 0.0),)
    return BlockResult(one.key, 0, (one,), BlockTimes(one.sample.decode_s + 0.1, one.sample.tokens, rounds))


def planted() -> list[BlockResult]:
    """`a D=4` is best on prompts 0 and 2, `a D=2` on 1 and 3; the controller is as good as the better one."""
    seconds = {"plain": (2, 2, 2, 2), "a D=2": (2, 1, 2, 1), "a D=4": (1, 2, 1, 2), "auto": (1, 1, 1, 1)}
    return [block(run(str(i), arm, float(s))) for arm, row in seconds.items() for i, s in enumerate(row)]


def test_the_best_fixed_arm_is_picked_on_one_half_and_held_against_on_the_other() -> None:
    s = summarise_bench(planted(), ARMS, {"model": "m", "processor": "p", "max_tokens": 20})
    (row,) = s["best_fixed"]
    assert row["picked"] == ["a D=4", "a D=2"], "prompts 0 and 2 are one half"
    assert row["mean"] == pytest.approx(2.0), "scored on the half it was picked on, it would be 1"
    auto = next(c for c in s["cells"] if c["arm"] == "auto")
    assert auto["ratio"]["mean"] == pytest.approx(2.0) and auto["acceptance_length"] == 2.0
    assert auto["tokens_per_s"] == pytest.approx(4 * 21 / 4.4)
    assert next(p for p in s["positions"] if p["arm"] == "a D=4")["acceptance"] == [[1.0, 40], [0.0, 40]]
    assert "best fixed" in bench_text(s) and auto["saved"] is None


def test_time_saved_live_stands_beside_the_paired() -> None:
    told = block(run("0", "auto", 1.5))
    told = replace(told, times=replace(told.times, saved_s=0.4))
    results = [block(run("0", "plain", 2.0)), told]
    s = summarise_bench(results, ARMS, {"model": "m", "processor": "p", "max_tokens": 20})
    auto = next(c for c in s["cells"] if c["arm"] == "auto")
    assert auto["saved"] == {"paired_s": 0.5, "live_s": 0.4} and "as reckoned live" in bench_text(s)


def test_rounds_are_held_against_passes_of_the_same_minutes() -> None:
    """The made-up machine takes 1 s a pass and 0.05 s a further row: what takes twice as long is 100 % off."""
    along = {"a": Drafts((4,) * 20, (1,) * 20), "b": Drafts((0,) * 20, (0,) * 20)}
    text = ReplayedText("chat", "0", 0.0, 4, 21, True, False, along)
    probe = made_up_probe([text])
    exact = [block(run("0", "plain", 10.0)), block(run("0", "a D=2", 10 * (1.1 + 0.001)))]
    s = summarise_bench(exact, ARMS, {"model": "m", "processor": "p", "max_tokens": 20}, probe)
    assert s["predicted"]["median_error"] == pytest.approx(0.0, abs=1e-9)
    slow = [exact[0], block(run("0", "a D=2", 20 * (1.1 + 0.001)))]
    s = summarise_bench(slow, ARMS, {"model": "m", "processor": "p", "max_tokens": 20}, probe)
    assert s["predicted"]["median_error"] == pytest.approx(0.5)
    bound = next(o for o in s["oracle"] if o["kind"] == "mix")
    assert bound["gain"] == pytest.approx(20 / (10 * (1.05 + 0.001)), rel=1e-6)


@pytest.mark.parametrize("gap", [0.001, 1.0, None])
def test_pl_12_arms_with_other_outputs_are_flagged(gap: float | None) -> None:
    """PL-12: other texts are named with their place and gap; only near ties are excused."""
    other = run("0", "auto", 1.0, (*range(20), 99))
    results = [block(run("0", "plain", 2.0)), block(other)]
    s = summarise_bench(results, ARMS, {"model": "m", "processor": "p", "max_tokens": 20}, gap=lambda r, i: gap)
    (parting,) = s["partings"]
    assert (parting["arm"], parting["token"], parting["gap"]) == ("auto", 20, gap)
    assert len(unexcused(s)) == len(broken(s)) == (0 if gap == 0.001 else 1)
    wide = {**s, "partings": [{**parting, "concurrency": 4}]}
    assert broken(wide) == [], "passes of up to 64 rows"
    assert "1 of 1 texts part from plain's" in bench_text(s)
    few = summarise_bench(results, ARMS, {"model": "m", "processor": "p", "max_tokens": 20})["notes"]
    assert any("1 rounds" in note for note in few)


def test_nothing_that_pays_is_said() -> None:
    results = [block(run("0", "plain", 1.0)), block(run("0", "auto", 2.0))]
    s = summarise_bench(results, ARMS, {"model": "m", "processor": "p", "max_tokens": 20})
    assert any("run that" in note for note in s["notes"])


def test_results_survive_their_file() -> None:
    before = block(run("0", "auto", 0.5))
    assert BlockResult.of_row(json.loads(json.dumps(before.row()))) == before


def test_the_best_arms_of_a_probe() -> None:
    along = {"a": Drafts((4,) * 20, (4,) * 16 + (0,) * 4), "b": Drafts((0,) * 20, (0,) * 20)}
    probe = made_up_probe([ReplayedText("chat", "0", 0.0, 4, 21, True, False, along)])
    arms = [*ARMS, ArmSpec("b D=4", "b", 4)]
    assert [a.name for a in best_fixed(probe, arms, [1], 1)] == ["plain", "auto", "a D=4"]
    assert len(best_fixed(probe, arms, [1, 4], 2)) == 4
    assert short_name("model:/x/y.gguf") == "model:y" and short_name("ngram") == "ngram"


# -- servers -----------------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """Streams three words, then usage where the path says so; `/broken` stops in the middle."""

    asked: ClassVar[list[dict[str, Any]]] = []
    alive, most = 0, 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Scripted.asked.append(body)
            Scripted.alive += 1
            Scripted.most = max(Scripted.most, Scripted.alive)
        self.send_response(200 if "refuse" not in self.path else 503)
        self.end_headers()
        words = ["one ", "two ", body["messages"][0]["content"]]
        words = [w.upper() if "shout" in self.path else w for w in words]
        events: list[Any] = [{"choices": [{"delta": {"content": w}}]} for w in words]
        if "broken" not in self.path:
            events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if "usage" in self.path:
            events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}})
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        with self.lock:
            Scripted.alive -= 1

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_servers_are_measured_like_arms(server: str, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    Scripted.asked.clear()
    arguments = ["bench", "some-model", "--workload", prompts, "--prompts", "3", "--rounds", "1", "--json"]
    arguments += ["--url", f"fast={server}/usage/v1", "--url", f"slow={server}", "--concurrency", "2"]
    assert main(arguments) == 0
    s = json.loads(capsys.readouterr().out)
    assert s["base"] == "fast" and [a["name"] for a in s["arms"]] == ["fast", "slow"]
    assert s["partings"] == [] and Scripted.most <= 2
    asked = Scripted.asked[-1]
    assert asked["stream_options"] == {"include_usage": True} and asked["temperature"] == 0.0
    assert {a["messages"][0]["content"] for a in Scripted.asked} == {f"fox {i} {i} {i}" for i in range(3)}
    slow = next(c for c in s["cells"] if (c["arm"], c["kind"]) == ("slow", "copy"))
    assert slow["ratio"]["mean"] is not None and slow["compared"] == 3
    assert any("as text" in note for note in s["notes"]) and not any("asked" in note for note in s["notes"])


def test_servers_that_say_something_else_are_told_by_the_character(
    server: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "some-model", "--workload", prompts, "--prompts", "2", "--rounds", "2"]
    assert main([*arguments, "--url", f"a={server}", "--url", f"b={server}/shout"]) == 0
    said = capsys.readouterr().out
    assert "8 of 8 texts part from a's\n" in said and "round 1: at character 0\n" in said
    assert "note: prompts were asked 2 times" in said


@pytest.mark.parametrize("path", ["/refuse", "/broken"])
def test_a_server_that_fails_is_named(server: str, path: str, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "m", "--workload", prompts, "--prompts", "1", "--rounds", "1", "--url", server + path])
    assert code in (1, 2) and server in capsys.readouterr().err


def test_addresses() -> None:
    assert parse_server("http://h:8000/v1") == ("h:8000", "http://h:8000/v1")
    assert parse_server("a=https://h/x?y=z") == ("a", "https://h/x?y=z")
    assert parse_server("http://h/?k=v") == ("h", "http://h/?k=v")
    for wrong in ("h:8000", "a=b", "http://"):
        with pytest.raises(InvalidParameter, match="--url"):
            parse_server(wrong)


def test_counted_tokens_make_the_speed() -> None:
    one = replace(run("0", "plain", 2.0).sample, token_ids=(), text="a b c", counted=9)
    assert one.tokens == 9 and list(one.words) == [ord(c) for c in "a b c"]

"""The probe on a tiny random model: everything asked for is measured, written, read, and told."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny_models import save_folder, tiny_backend, tiny_model
from toy import ToyModel, hashed

from paceline.bench.own_prompts import OWN_KINDS, own_prompts
from paceline.bench.pass_timer import PassTimer
from paceline.bench.workloads import open_workloads
from paceline.cli import main
from paceline.errors import InvalidParameter, UsageError
from paceline.plan.probe_file import read_probe


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


class Assets(HTMLParser):
    """Tags left open, and anything a page would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)
        self.outside += [f"{tag} {k}" for k, v in attrs if k in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def check_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    assets = Assets()
    assets.feed(text)
    assert assets.open == [] and assets.outside == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|__[A-Z]+__", text)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    json.loads(data[1])
    return text


def test_a_probe_measures_and_tells(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, page = tmp_path / "probe.json", tmp_path / "probe.html"
    arguments = ["probe", model, "--draft", "auto", "--draft", model, "--prompts", prompts, "--budget", "1"]
    arguments += ["--temperature", "0,0.8", "--max-tokens", "12", "--threads", "1", "--dtype", "float32"]
    assert main([*arguments, "--output", str(output), "--html", str(page), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    probe = read_probe(output)
    assert probe.model == model and summary["free_rows"] >= 1
    assert {(t.task, t.temperature) for t in probe.texts} == {(k, t) for k in ("copy", "talk") for t in (0.0, 0.8)}
    assert {d.name for d in probe.drafters} == {"ngram", "suffix", f"model:{model}"}
    steps = probe.drafter(f"model:{model}").steps
    assert [p.batch for p in steps] == [1, 2, 4, 8, 16] and all(p.width == 1 for p in steps)
    own = [t.drafts[f"model:{model}"] for t in probe.texts if t.tokens > 6]
    assert own and all(d.matched[0] >= 4 for d in own), "it agrees with itself"
    batches = [a["batch"] for a in summary["advice"] if (a["group"], a["temperature"]) == ("all", 0.0)]
    assert batches == [1, 2, 4, 8, 16]
    assert all(a["low"] <= a["gain"] <= a["high"] and 0 <= a["regret"] < 1 for a in summary["advice"])
    assert all(a["gain"] <= a["oracle"] + 1e-9 for a in summary["advice"]), "nothing beats hindsight"
    check_page(page)
    told = ["run", model, "--prompt", "the fox", "--max-tokens", "12", "--dtype", "float32", "--threads", "1", "--json"]
    drafts = ["--draft", "auto", "--draft", model]
    assert main([*told, *drafts, "--probe", str(output)]) == 0
    started = json.loads(capsys.readouterr().out)
    assert main([*told, "--draft", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == started["token_ids"]
    assert main([*told[:-2], "2", "--probe", str(output)]) == 2
    assert "threads 1 there and 2 here" in capsys.readouterr().err
    assert main([*arguments, "--against", str(output)]) == 0
    out = capsys.readouterr().out
    assert "what to run" in out and "against the earlier probe" in out


def test_prompts_from_files_and_of_our_own(tmp_path: Path) -> None:
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    (found,) = open_workloads([str(lines)], 8)
    assert (found.kind, [p.text for p in found.prompts]) == ("p", ["one", "two"])
    assert [w.kind for w in open_workloads(["sample"], 8)] == ["chat", "code", "edit", "json"]
    for kind in OWN_KINDS:
        many = own_prompts(kind, 40)
        assert len({text for _, text in many}) == len({name for name, _ in many}) == 40
        assert own_prompts(kind, 9) == many[:9]
    with pytest.raises(InvalidParameter, match="every name once"):
        open_workloads(["sample", "sample"], 2)
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        open_workloads([str(tmp_path / "none.jsonl")], 2)
    empty = tmp_path / "e.jsonl"
    empty.write_text('{"text": "no prompt"}\n')
    with pytest.raises(UsageError, match="without a prompt"):
        open_workloads([str(empty)], 2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--temperature", "hot"], "--temperature"),
        (["--temperature", "0,0"], "--temperature"),
        (["--budget", "0"], "--budget"),
        (["--prompts", "nosuch"], "nosuch"),
        (["--against", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_one_sentence(
    model: str, options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", model, *options]) == 2
    assert word in capsys.readouterr().err.strip().splitlines()[-1]


def test_repeats_go_to_the_widest_spread() -> None:
    times = iter([0.0, 1.0] * 3 + [0.0, 5.0, 0.0, 9.0, 0.0, 1.0])
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(times, 0.5)
        return now

    timer = PassTimer(ToyModel(hashed(8), 8), [(1, 1, 0), (2, 3, 0)], clock=clock)
    for _ in range(4):
        timer.sweep()
    assert all(len(p.seconds) == 3 for p in timer.times()), "four, without the first"
    (widest,) = timer.widest(0.5)
    spreads = {(p.batch, p.width, p.context): p.spread for p in timer.times()}
    assert spreads[widest] == max(spreads.values()) > min(spreads.values())

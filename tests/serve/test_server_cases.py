"""Cases that need a server: SD-27 (one tokenisation for every path) and SD-24 over HTTP (clients leave mid-round)."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Running, serving
from tiny_models import save_folder, tiny_backend, tiny_model

MESSAGES = [{"role": "user", "content": "Grüße <|im_end|> 12"}]
BOS, END = 1, 2


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tokenizer that puts a beginning-of-text token in front, and a template that writes it too."""
    folder = tmp_path_factory.mktemp("bos") / "m"
    save_folder(folder, tiny_model(max_position_embeddings=1024), tiny_backend(adds_bos=True))
    with serving(str(folder)) as running:
        yield running


def ids_of_every_path(server: Running) -> list[tuple[int, ...]]:
    """The ids that target and drafter get: chat and the templated text, with speculation and without."""
    seen: list[tuple[int, ...]] = []
    add, drafter = server.engine.add, server.engine.drafters.drafters["suffix"]
    begin = drafter.begin

    def watch_add(request: Any) -> Any:
        seen.append(tuple(request.prompt))
        return add(request)

    def watch_begin(view: Any) -> None:
        seen.append(tuple(view.tokens))
        begin(view)

    server.engine.add, drafter.begin = watch_add, watch_begin  # type: ignore[method-assign]
    try:
        tokenizer = server.server.service.llm.tokenizer
        text = tokenizer.render_chat(MESSAGES)
        for draft in ({"draft": "none"}, {"draft": "suffix", "draft_length": 3}):
            body = {"max_tokens": 8, "temperature": 0, "speculation": draft}
            chat = server.post("/v1/chat/completions", body | {"messages": MESSAGES})
            plain = server.post("/v1/completions", body | {"prompt": text})
            assert chat.json()["choices"][0]["message"]["content"] == plain.json()["choices"][0]["text"]
    finally:
        server.engine.add, drafter.begin = add, begin  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])
def test_sd27_every_path_has_the_same_ids(with_bos: Running, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the text's path puts a second beginning-of-text token in front."""
    llm = with_bos.server.service.llm
    assert llm.tokenizer.prefix_ids == (BOS,)
    if fault:
        whole = llm.encode
        monkeypatch.setattr(llm, "encode", lambda text: [BOS, *whole(text)])

    def check() -> None:
        seen = ids_of_every_path(with_bos)
        assert len(seen) == 6 and len(set(seen)) == 1, "four prompts, two of them seen by the drafter"
        assert seen[0][0] == BOS != seen[0][1], "exactly one"
        assert seen[0].count(END) == 2, "markers are single ids, also in what the user wrote"

    if fault:
        with pytest.raises(AssertionError):
            check()
    else:
        check()


def test_sd24_survivors_are_as_if_alone(server: Running) -> None:
    """Eight streams at a time, three of them left at random moments; the books are checked when all is idle."""
    draw = random.Random(0)
    texts = ["the quick", "brown fox", "def add(a", "print(", "naïve", "they're", "dog, 1", "return"]
    body = {"max_tokens": 40, "temperature": 0.7, "ignore_eos": True, "stream": True}
    body["speculation"] = {"draft": "suffix", "draft_length": 4}

    def ask(i: int, stop_after: int | None, into: dict[int, str]) -> None:
        with server.http.stream("POST", "/v1/completions", json=body | {"prompt": texts[i], "seed": i}) as answer:
            text, count = "", 0
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text, count = text + json.loads(line[6:])["choices"][0]["text"], count + 1
                if stop_after is not None and count > stop_after:
                    return
        into[i] = text

    alone: dict[int, str] = {}
    for i in range(8):
        ask(i, None, alone)
    for _ in range(6):
        leave = {i: draw.randrange(12) for i in draw.sample(range(8), 3)}
        said: dict[int, str] = {}
        threads = [threading.Thread(target=ask, args=(i, leave.get(i), said)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert set(said) >= set(range(8)) - set(leave)
        assert all(text == alone[i] for i, text in said.items())
        server.wait_idle()
        server.engine.check()

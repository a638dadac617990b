"""Structured outputs over HTTP: random weights say nothing of use, so only the grammar can make them fit."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from servers import NAME, Running

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def test_eight_at_a_time_fit_their_schema_and_drafts_change_nothing(server: Running) -> None:
    def ask(seed: int) -> tuple[str, str]:
        create = server.client().chat.completions.create
        texts = []
        for draft in ("suffix", "none"):
            reply = create(
                model=NAME, messages=MESSAGES, response_format=FORMAT, temperature=0.8, seed=seed, max_tokens=400,
                extra_body={"speculation": {"draft": draft}},
            ).choices[0]
            assert reply.finish_reason == "stop" and reply.message.content
            texts.append(reply.message.content)
        return texts[0], texts[1]

    with ThreadPoolExecutor(8) as pool:
        for drafted, plain in pool.map(ask, range(16)):
            assert drafted == plain
            jsonschema.validate(json.loads(drafted), SCHEMA)


def test_streamed_as_whole(server: Running) -> None:
    create = server.client().chat.completions.create
    asked: Any = {"model": NAME, "messages": MESSAGES, "response_format": FORMAT, "seed": 3, "max_tokens": 400}
    pieces = [chunk.choices[0].delta.content or "" for chunk in create(stream=True, **asked)]
    assert "".join(pieces) == create(**asked).choices[0].message.content


GBNF = r"""root ::= word "-" [0-9]{2} # a word and a number
  | "none"
word ::= [a-z] [a-z] [^\x00-\x60\x7B-\U0010FFFF]"""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"grammar": 'start: word "-" /[0-9][0-9]/\nword: /[a-z]{3}/'}, "[a-z]{3}-[0-9]{2}"),
        ({"grammar": GBNF}, "[a-z]{3}-[0-9]{2}|none"),
        ({"choice": ["red", "green", "re"]}, "red|green|re"),
        ({"json": {"enum": [1, 22]}}, "1|22"),
        ({"json": '{"const": "a"}'}, '"a"'),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_structured_outputs_are_kept(server: Running, path: str, asked: dict[str, Any], matches: str) -> None:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
    answers = []
    for draft in ("suffix", "none"):
        body = {"structured_outputs": asked, "max_tokens": 400, "n": 3, "seed": 5, "speculation": {"draft": draft}}
        reply = server.post(path, {**prompt, **body}).json()
        answers.append([c["text"] if "text" in c else c["message"]["content"] for c in reply["choices"]])
        for text, choice in zip(answers[-1], reply["choices"], strict=True):
            assert re.fullmatch(matches, text) and choice["finish_reason"] == "stop"
    assert answers[0] == answers[1]


def test_what_a_schema_asks_and_nobody_can_keep_is_named(server: Running) -> None:
    schema = {"type": "array", "uniqueItems": True}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    refused = server.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": wrong})
    told = refused.json()["error"]
    assert refused.status_code == 400 and told["param"] == "response_format" and "uniqueItems" in told["message"]

"""What cannot be honoured is refused by name, with the protocol's error object, and never as the server's failure."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from servers import NAME, Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}


def error(response: Any) -> dict[str, Any]:
    value = response.json()
    assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}, value
    assert isinstance(value["error"]["message"], str) and value["error"]["message"]
    return value["error"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function", "function": {"name": "x", "strict": 1}}]}, "tools.0.function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice.1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None),
        ({"store": True}, "store"),
        ({"user": "me"}, "user"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"top_logprobs": 2}, None),
        ({"max_completion_tokens": 4}, None),
        ({"speculation": {"draft": "eagle3"}}, "speculation.draft"),
        ({"speculation": {"verify": "typo"}}, "speculation.verify"),
        ({"speculation": {"verify": "greedy"}}, "verify"),
        ({"speculation": {"draft": "none", "draft_length": 3}}, "speculation.draft_length"),
        ({"speculation": {"draft_length": -1}}, "speculation.draft_length"),
        ({"speculation": {"draft": "ngram", "draft_length": 2, "tree_size": 4}}, "tree_size"),
        ({"speculation": {"draft": "suffix", "draft_length": 4, "tree_size": 2}}, "tree_size"),
        ({"speculation": {"depth": 1}}, "speculation.depth"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, None),
    ],
)
def test_a_field_is_honoured_or_named(server: Running, change: dict[str, Any], param: str | None) -> None:
    response = server.post("/v1/chat/completions", CHAT | change)
    assert response.status_code == 400
    told = error(response)
    assert told["type"] == "invalid_request_error"
    if param is not None:
        assert told["param"] == param and param.split(".")[-1].split("_")[0] in told["message"]


def test_rules_between_fields_are_told_in_our_words(server: Running) -> None:
    told = error(server.post("/v1/chat/completions", CHAT | {"top_logprobs": 3}))
    assert told["message"] == "the body: top_logprobs is allowed only with logprobs: true"


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"guided_choice": ["a"]}, "structured_outputs.choice"),
        ({"grammar": "root ::= [a]"}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "json, json_object, choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "json, json_object, choice"),
        ({"response_format": {"type": "structural_tag"}}, "json_schema"),
    ],
)
def test_other_servers_words_for_a_form_are_told_ours(server: Running, change: dict[str, Any], allowed: str) -> None:
    response = server.post("/v1/chat/completions", CHAT | change)
    assert response.status_code == 400 and allowed in error(response)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": {}}',
    ],
    ids=range(13),
)
def test_broken_bodies(server: Running, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body)
    assert response.status_code == 400, response.text
    error(response)


def test_bodies_that_are_too_long(server: Running) -> None:
    huge = json.dumps({"prompt": "x" * (9 * 2**20)}).encode()
    response = server.http.post("/v1/completions", content=huge)
    assert response.status_code == 413 and error(response)["code"] == "body_too_large"


def test_prompts_that_do_not_fit(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": [5] * 1024})
    assert response.status_code == 400 and error(response)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="1024"):
        content = "the cat " * 2000
        server.client().chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}])
    for prompt in ("", [], [[]], [[5], []], [999_999]):
        assert server.post("/v1/completions", {"prompt": prompt}).status_code == 400


def test_one_bad_prompt_of_several_leaves_nothing_running(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": [[5], [999_999]], "max_tokens": 500, "ignore_eos": True})
    assert response.status_code == 400
    server.wait_idle()


def test_unknown_models_and_paths(server: Running) -> None:
    assert error(server.post("/v1/completions", TEXT | {"model": "gpt-4"}))["code"] == "model_not_found"
    assert server.post("/v1/completions", TEXT | {"model": "gpt-4"}).status_code == 404
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        error(response)

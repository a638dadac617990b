"""Whatever is sent, the answer is an answer or an error of the client's, in the protocol's shape; then all is free."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Running

from paceline.serve.protocol import ChatRequest, CompletionRequest

QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 400) | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "text", "auto", "none", "suffix", "coupled", "greedy", "\u0000", "🙂"])
)  # fmt: skip
KEYS = st.sampled_from(["role", "content", "type", "text", "draft", "draft_length", "verify", "0", "5", "x"])
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)


def bodies(kind: type[ChatRequest] | type[CompletionRequest], least: dict[str, Any]) -> st.SearchStrategy[Any]:
    """A body that would run, some of its fields replaced by anything; few tokens, so that it is quick."""
    fields = st.dictionaries(st.sampled_from([*kind.model_fields, "unknown"]), VALUES, max_size=4)
    return fields.map(lambda changes: {"max_tokens": 2} | least | changes) | VALUES


def send(server: Running, path: str, body: Any) -> None:
    text = json.dumps(body).encode(errors="surrogatepass")
    response = server.http.post(path, content=text)
    assert response.status_code < 500, (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


@QUICK
@given(body=bodies(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}))
def test_any_chat_body(server: Running, body: Any) -> None:
    send(server, "/v1/chat/completions", body)


@QUICK
@given(body=bodies(CompletionRequest, {"prompt": "x"}))
def test_any_completion_body(server: Running, body: Any) -> None:
    send(server, "/v1/completions", body)


@QUICK
@given(raw=st.binary(max_size=60), path=st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]))
def test_any_bytes(server: Running, raw: bytes, path: str) -> None:
    assert server.http.post(path, content=raw).status_code in (200, 400)


@QUICK
@given(tokens=st.lists(st.integers(-2, 2**33), max_size=5), text=st.text(max_size=20))
def test_any_tokens_and_text(server: Running, tokens: list[int], text: str) -> None:
    send(server, "/detokenize", {"tokens": tokens})
    send(server, "/tokenize", {"prompt": text})

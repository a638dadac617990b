"""Tool calls by the model's own template: read the same however the text is cut (case SD-29), whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from servers import NAME, Running, serving
from tiny_models import CHAT_TEMPLATE, save_folder, tiny_backend, tiny_model

from paceline.decode.verify.grammar import GrammarCompiler
from paceline.serve.protocol import ChatRequest
from paceline.serve.structured import tool_grammar
from paceline.serve.tools import Found, ToolScanner

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é🙂"]}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
TEXTS = {
    "call": ADD,
    "two calls": f"{ADD}\n{TIME}",
    "text around": f"Let me see. \n\n{ADD} \n{TIME}\nDone.",
    "almost": "a < b, <tool, <tool_call>{no json}</tool_call> and </tool_call>  ",
    "cut off": 'So \n<tool_call>{"name": "ad',
    "end missing": f"x {TIME.removesuffix('</tool_call>')}",
    "plain": "No tools, just text.\n  ",
    "bare": ' {"name": "add", "parameters": {"a": 1}}\n',
    "bare but unknown": '{"name": "Ada", "arguments": "of old"} ',
    "bare but text": "{x: 1} and <tool_call> so on",
    "listed": ' [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
    "listed but text": "[1] and [2]",
    "fenced": '```json\n{"name": "add",\n "arguments": {"a": 1}}\n```\n',
    "fenced plainly": ' ``` [{"name": "add", "arguments": {"a": "```"}}]```',
    "fenced but code": "```js\n{x: 1}\n``` and <tool_call>",
    "fenced but unknown": '```json\n{"name": "Ada", "arguments": {}}\n```',
    "fenced and cut off": "```js",
    "fence within": f"So:\n```\n{TIME}\n```",
}


def read(pieces: Sequence[str], scanner: ToolScanner | None = None) -> tuple[str, list[tuple[int, str, str]]]:
    scanner = scanner or ToolScanner(["add"])
    found = [*(scanner.push(piece) for piece in pieces), scanner.flush()]
    return "".join(f.text for f in found), [(c.index, c.name, c.arguments) for f in found for c in f.calls]


class Forgetful(ToolScanner):
    """The fault of SD-29: each piece is read for itself."""

    def push(self, text: str) -> Found:
        self._held, self._inside = "", False
        return super().push(text)


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "fault"])
def test_no_cut_changes_what_is_read(fault: bool) -> None:
    wrong = []
    for name, text in TEXTS.items():
        whole = read([text])
        cuts = [[text[:i], text[i:]] for i in range(1, len(text))] + [list(text)]
        wrong += [name for cut in cuts if read(cut, Forgetful(["add"]) if fault else None) != whole]
    assert bool(wrong) is fault, wrong


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 200), max_size=12))
def test_nor_do_many(name: str, places: list[int]) -> None:
    text = TEXTS[name]
    ends = sorted({0, len(text), *(p for p in places if p < len(text))})
    assert read([text[a:b] for a, b in pairwise(ends)]) == read([text])


def test_what_is_read() -> None:
    arguments = {"a": 1, "b": [2, "é🙂"]}
    text, calls = read([TEXTS["text around"]])
    assert text == "Let me see.Done." and [(i, n) for i, n, _ in calls] == [(0, "add"), (1, "time")]
    assert json.loads(calls[0][2]) == arguments and calls[1][2] == "{}"
    assert read([TEXTS["bare"]]) == ("", [(0, "add", '{"a": 1}')])
    assert read([TEXTS["fenced"]]) == ("", [(0, "add", '{"a": 1}')])
    assert read([TEXTS["fenced plainly"]]) == ("", [(0, "add", '{"a": "```"}')])
    assert read([TEXTS["fence within"]]) == ("So:\n``````", [(0, "time", "{}")])
    for name in ("almost", "cut off", "plain", "bare but unknown", "bare but text"):
        assert read([TEXTS[name]]) == (TEXTS[name], [])
    for name in ("fenced but code", "fenced but unknown", "fenced and cut off"):
        assert read([TEXTS[name]]) == (TEXTS[name], [])
    assert read([TEXTS["end missing"]]) == ("x", [(0, "time", "{}")])


# -- over HTTP -----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>...</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments.b | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SAID = f"Look: {ADD} {ADD}"


class Scripted:
    """A model that says `SAID` after any prompt of a known length, then ends."""

    def __init__(self, inner: Any, script: list[int]) -> None:
        self._inner, self.script, self.prompt = inner, script, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, step: Any, cache: Any, taps: Any = ()) -> Any:
        result = self._inner.forward(step, cache, taps)
        positions = step.positions if step.wanted is None else step.positions[step.wanted]
        with torch.inference_mode():
            for row, position in enumerate(positions.tolist()):
                said = position + 1 - self.prompt
                if 0 <= said < len(self.script):
                    result.logits[row] = -9.0
                    result.logits[row, self.script[said]] = 9.0
        return result


@pytest.fixture(scope="module")
def toolful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tools") / "m"
    save_folder(folder, tiny_model(max_position_embeddings=2048), tiny_backend())
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja"):
            text = path.read_text(encoding="utf-8")
            told = json.dumps(TEMPLATE)[1:-1] if path.suffix == ".json" else TEMPLATE
            plain = json.dumps(CHAT_TEMPLATE)[1:-1] if path.suffix == ".json" else CHAT_TEMPLATE
            path.write_text(text.replace(plain, told), encoding="utf-8")
    with serving(str(folder)) as running:
        tokenizer = running.server.service.llm.tokenizer
        assert tokenizer.chat_templates == {"default": TEMPLATE}
        script = [*tokenizer.backend.encode(SAID, add_special_tokens=False).ids, tokenizer.eos_token_id]
        running.engine.model = Scripted(running.engine.model, script)  # type: ignore[assignment]
        yield running


def ask(server: Running, stream: bool, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    ids = server.server.service.chat_ids(messages, TOOLS)
    server.engine.model.prompt = len(ids)  # type: ignore[union-attr]
    create = server.client().chat.completions.create
    return create(model=NAME, messages=messages, tools=TOOLS, temperature=0, stream=stream, **body)  # type: ignore[call-overload]


@pytest.mark.parametrize("length", [0, 1, 5, 12])
def test_calls_come_out_the_same_streamed_and_whole(toolful: Running, length: int) -> None:
    """The second call repeats the first, so most of it comes as drafts, several tokens a delta."""
    spec = {"speculation": {"draft": "suffix", "draft_length": length} if length else {"draft": "none"}}
    whole = ask(toolful, False, extra_body=spec)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls" and message.content == "Look:"
    assert [c.function.name for c in message.tool_calls] == ["add", "add"]
    assert len({c.id for c in message.tool_calls}) == 2
    text, calls, reason = "", {}, None
    for chunk in ask(toolful, True, extra_body=spec):
        choice = chunk.choices[0]
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert (text, reason) == ("Look:", "tool_calls")
    assert list(calls.values()) == [(c.function.name, c.function.arguments) for c in message.tool_calls]
    if length > 1:
        assert whole.usage.speculation["acceptance_length"] > 2


def test_without_tools_the_text_is_left_alone(toolful: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    toolful.engine.model.prompt = len(toolful.server.service.chat_ids(messages))  # type: ignore[union-attr]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = {"messages": messages, "temperature": 0, **more}
        choice = toolful.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["message"]["content"] == SAID and choice["finish_reason"] == "stop"


def test_what_calls_gave_back_reaches_the_template(toolful: Running) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": [3]}'}}
    turns = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    ids = toolful.post("/tokenize", {"messages": turns}).json()["tokens"]
    tokenizer = toolful.server.service.llm.tokenizer
    text = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert "<tool_call>[3]</tool_call>" in text and "tool\n4" in text
    broken = [turns[0], turns[1] | {"tool_calls": [made | {"function": {"name": "add", "arguments": "{"}}]}]
    assert toolful.post("/v1/chat/completions", {"messages": broken}).status_code == 400


def test_a_model_without_tools_says_so(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 2}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    for field, value, named in (("tool_choice", "required", "tools"), ("parallel_tool_calls", False, None)):
        refused = server.post("/v1/chat/completions", body | {field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == (named or field)


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"enum": ["x", "y\n"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TWO: Any = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("choice", ["required", "add", "now"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_must_be_made_is_made(toolful: Running, choice: str, parallel: bool) -> None:
    """Random weights, temperature 1: only the grammar keeps the marks, the name and the arguments."""
    toolful.engine.model.prompt = 10**6  # type: ignore[union-attr]
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    asked: Any = {"tools": TWO, "tool_choice": named, "parallel_tool_calls": parallel, "max_tokens": 400}
    create = toolful.client().chat.completions.create
    messages: Any = [{"role": "user", "content": "hi"}]
    for seed in range(4):
        reply = create(model=NAME, messages=messages, seed=seed, **asked).choices[0]
        if reply.finish_reason == "length":
            continue
        calls = reply.message.tool_calls
        assert reply.finish_reason == "tool_calls" and not reply.message.content
        assert len(calls) == 1 or (parallel and choice == "required")
        for call in calls:
            assert call.function.name in (("add", "now") if choice == "required" else (choice,))
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS if call.function.name == "add" else {})
        said: dict[int, str] = {}
        for chunk in create(model=NAME, messages=messages, seed=seed, stream=True, **asked):
            for piece in chunk.choices[0].delta.tool_calls or ():
                said[piece.index] = said.get(piece.index, "") + piece.function.arguments
        assert list(said.values()) == [call.function.arguments for call in calls]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TWO}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "regex": "a"}, "regex"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            },
            "tools",
        ),
    ],
)
def test_promises_about_calls_that_cannot_be_kept_are_refused(toolful: Running, change: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **change}
    refused = toolful.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


LLAMA = '{% if tools %}Answer with {"name": ..., "parameters": ...}{% endif %}'
MISTRAL = '{% if tools %}[AVAILABLE_TOOLS]{% endif %}{% for c in calls %}[TOOL_CALLS] [{"name": 1}]{% endfor %}'


@pytest.mark.parametrize("template", [TEMPLATE, LLAMA, MISTRAL])
def test_what_the_grammar_of_calls_makes_is_read_back(template: str) -> None:
    """Words for each style by hand, held against the grammar and the reader alike."""
    tools = [{"type": "function", "function": {"name": n}} for n in ("add", "now")]
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    )
    asked = tool_grammar(body, [template])
    assert asked is not None
    word = "parameters" if template is LLAMA else "arguments"
    one = ['{"name": "%s", "%s": {}}' % (name, word) for name in ("add", "now")]  # noqa: UP031
    text = {
        TEMPLATE: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in one),
        LLAMA: one[0],
        MISTRAL: f"[{one[0]}, {one[1]}]",
    }[template]
    letters = {i + 1: chr(i + 32).encode() for i in range(95)} | {99: b"\n"}
    state = GrammarCompiler(lambda: letters, frozenset({0}), 100, frozenset({0})).start(asked[1])
    ids = [99 if letter == "\n" else ord(letter) - 31 for letter in text]
    assert state.legal_length([*ids, 0]) == len(ids) + 1
    assert state.legal_length([*ids[:-2], 0]) == len(ids) - 2
    left, calls = read([text], ToolScanner(["add", "now"]))
    assert left == "" and [name for _, name, _ in calls] == (["add"] if template is LLAMA else ["add", "now"])

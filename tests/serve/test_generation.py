"""What clients ask for, through the official client: whole and streamed answers are the same, and exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servers import NAME, Running

from paceline.core.sampling import SamplingParams

USER = [{"role": "user", "content": "The quick brown fox"}]
LONG: dict[str, Any] = {"model": NAME, "messages": USER, "max_completion_tokens": 60}
ON = {"speculation": {"draft": "suffix", "draft_length": 5}, "ignore_eos": True}
OFF = {"speculation": {"draft": "none"}, "ignore_eos": True}


def streamed(server: Running, **body: Any) -> tuple[list[str], list[Any]]:
    """The text of every choice, and all chunks."""
    chunks = list(server.client().chat.completions.create(stream=True, **body))
    texts = [""] * body.get("n", 1)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts, chunks


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "n": 3}], ids=["T0", "T0.9"])
def test_streamed_whole_and_plain_are_one_text(server: Running, sampling: dict[str, Any]) -> None:
    whole = server.client().chat.completions.create(**LONG, **sampling, extra_body=ON)
    plain = server.client().chat.completions.create(**LONG, **sampling, extra_body=OFF)
    texts, chunks = streamed(server, **LONG, **sampling, extra_body=ON, stream_options={"include_usage": True})
    assert texts == [c.message.content for c in whole.choices] == [c.message.content for c in plain.choices]
    usage = chunks[-1].usage
    assert not chunks[-1].choices and all(c.usage is None for c in chunks[:-1])
    n = sampling.get("n", 1)
    assert usage.completion_tokens == whole.usage.completion_tokens == 60 * n
    assert usage.speculation["accepted"] > 0 and plain.usage.speculation["drafted"] == 0
    assert len(chunks) < 60 * n, "several tokens a chunk"


def test_the_texts_are_the_engines(server: Running) -> None:
    llm = server.server.service.llm
    ids = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert ids == llm.tokenizer.encode_chat(USER)
    answer = server.post("/v1/completions", {"prompt": ids, "max_tokens": 40, "temperature": 0, "ignore_eos": True})
    server.wait_idle()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine_text = _alone(server, ids, params)
    assert answer.json()["choices"][0]["text"] == engine_text


def _alone(server: Running, ids: list[int], params: SamplingParams) -> str:
    """A second engine over the same decoder, without a server."""
    from paceline.decode.engine import Engine, EngineOptions
    from paceline.decode.sequence import Request

    llm = server.server.service.llm
    engine = Engine(
        llm.engine.model,
        vocab_size=llm.engine.vocab_size,
        eos_token_ids=llm.engine.eos_token_ids,
        options=EngineOptions(max_batch=1, max_context=1024),
        new_pieces=llm.tokenizer.stream,
    )
    (sequence,) = engine.add(Request("r", tuple(ids), params))
    while engine.has_work:
        engine.step()
    return sequence.text


def test_a_seed_gives_its_text_in_any_batch_and_with_any_drafts(server: Running) -> None:
    body = {"prompt": "they're", "max_tokens": 30, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    for draft in ({"draft": "none"}, {"draft": "ngram", "draft_length": 3}, {"draft": "suffix"}):
        many = body | {"prompt": ["def add", "they're", "naïve"], "speculation": draft}
        texts = [c["text"] for c in server.post("/v1/completions", many).json()["choices"]]
        assert texts[1] == alone
    other = server.post("/v1/completions", body | {"seed": 12}).json()["choices"][0]["text"]
    assert other != alone


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk(server: Running, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "max_tokens": 20, "n": 2, "seed": 1, "stream": True, "stream_options": options}
    lines = server.post(path, body | {"speculation": {"tokens": True}}).text.split("\n\n")
    said = 0
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for chunk in chunks[:-1]:
        said += sum(len(choice.get("tokens", ())) for choice in chunk["choices"])
        usage = chunk["usage"]
        assert usage["completion_tokens"] == said
        assert usage["total_tokens"] == usage["prompt_tokens"] + said
    assert said == chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []


def test_stop_strings_across_chunks(server: Running) -> None:
    body = {"prompt": "the cat", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    for start in (3, 11, 20):
        stop = text[start : start + 4]
        cut = text[: text.index(stop)]
        for draft in (ON, OFF):
            whole = server.post("/v1/completions", body | draft | {"stop": stop}).json()["choices"][0]
            assert (whole["text"], whole["finish_reason"]) == (cut, "stop")
            stream = server.client().completions.create(
                model=NAME, prompt="the cat", max_tokens=60, temperature=0, stop=[stop], stream=True, extra_body=draft
            )
            assert "".join(c.choices[0].text for c in stream) == cut


def test_characters_cut_across_tokens_are_held_back(server: Running) -> None:
    """The tiny model emits many lone bytes: joined pieces are the whole decoded at once."""
    body = {"prompt": "Grüße 🙂", "max_tokens": 50, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    spec = {"draft": "suffix", "draft_length": 5, "tokens": True}
    choice = server.post("/v1/completions", body | {"speculation": spec}).json()["choices"][0]
    ids = [t["id"] for t in choice["tokens"]]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == choice["text"]
    lines = server.post("/v1/completions", body | {"speculation": spec, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]


def test_tokens_say_who_brought_them(server: Running) -> None:
    body = LONG | {"temperature": 0, "ignore_eos": True}
    spec = {"speculation": {"draft": "suffix", "draft_length": 5, "tokens": True}}
    answer = server.post("/v1/chat/completions", body | spec).json()
    tokens = answer["choices"][0]["tokens"]
    assert sum(t["draft"] for t in tokens) == answer["usage"]["speculation"]["accepted"] > 0
    assert len(tokens) == 60
    assert "tokens" not in server.post("/v1/chat/completions", body).json()["choices"][0]


def test_logprobs_in_both_shapes(server: Running) -> None:
    chat = server.client().chat.completions.create
    on = chat(**LONG, temperature=0, logprobs=True, top_logprobs=2, extra_body=ON)
    off = chat(**LONG, temperature=0, logprobs=True, top_logprobs=2, extra_body=OFF)
    entries = on.choices[0].logprobs.content
    assert len(entries) == 60 and entries == off.choices[0].logprobs.content
    assert all(e.logprob == e.top_logprobs[0].logprob < 0 and len(e.top_logprobs) == 2 for e in entries)
    assert all(bytes(e.bytes).decode("utf-8", "replace") == e.token for e in entries)
    body = {"prompt": "the cat", "max_tokens": 20, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    lists = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert {len(v) for v in lists.values()} == {20}
    assert lists["token_logprobs"] == [max(top.values()) for top in lists["top_logprobs"]]
    streamed_lists: list[float] = []
    plain = {k: v for k, v in body.items() if k != "ignore_eos"}
    create = server.client().completions.create
    for chunk in create(model=NAME, stream=True, extra_body={"ignore_eos": True}, **plain):
        streamed_lists += chunk.choices[0].logprobs.token_logprobs
    assert streamed_lists == lists["token_logprobs"]


def test_echo_scores_the_prompt(server: Running) -> None:
    """As `lm-eval` asks for log-likelihoods: the prompt's log-probabilities are those its tokens had when decoded."""
    ids = server.post("/tokenize", {"prompt": "they're"}).json()["tokens"]
    said = {"prompt": ids, "max_tokens": 20, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    spec = {"speculation": {"draft": "none", "tokens": True}}
    first = server.post("/v1/completions", said | spec).json()["choices"][0]
    whole = ids + [t["id"] for t in first["tokens"]]
    for limit in (0, 1):
        body = {"prompt": [whole, ids], "max_tokens": limit, "logprobs": 1, "echo": True, "temperature": 0}
        answer = server.post("/v1/completions", body).json()
        choice = answer["choices"][0]
        lists = choice["logprobs"]
        assert {len(v) for v in lists.values()} == {len(whole) + limit}
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        again = lists["token_logprobs"][len(ids) : len(whole)]
        assert again == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-4)
        assert again == [max(top.values()) for top in lists["top_logprobs"][len(ids) : len(whole)]]
        text = server.post("/detokenize", {"tokens": whole}).json()["prompt"]
        assert choice["text"].startswith(text) and (limit or choice["text"] == text)
        assert answer["usage"]["completion_tokens"] == 2 * limit
        assert lists["text_offset"][0] == 0 and lists["text_offset"] == sorted(lists["text_offset"])
    echo = {"prompt": ["they're", "now"], "max_tokens": 3, "echo": True, "temperature": 0, "n": 2, "stream": True}
    texts = [""] * 4
    for chunk in server.client().completions.create(model=NAME, **echo):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == texts[1] and texts[0].startswith("they're") and texts[3].startswith("now")


def test_speculation_is_each_requests_own_in_one_batch(server: Running) -> None:
    """Asked side by side, each with another drafter: the texts of one seed agree and the counters tell them apart."""
    from concurrent.futures import ThreadPoolExecutor

    trees = {"draft": "suffix", "draft_length": 2, "tree_size": 6}
    specs = [{"draft": "none"}, trees, {"draft": "ngram", "draft_length": 6}]
    body = LONG | {"temperature": 0.7, "seed": 5, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda s: server.post("/v1/chat/completions", body | {"speculation": s}).json(), specs))
    assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1
    assert [a["usage"]["speculation"]["drafter"] for a in answers] == ["none", "suffix", "ngram"]
    assert answers[0]["usage"]["speculation"]["drafted"] == 0


def test_what_is_not_exact_says_so(server: Running) -> None:
    body = LONG | {"temperature": 0.7, "seed": 5, "ignore_eos": True}
    for rule in ("rejection", "relaxed"):
        asked = body | {"speculation": {"draft": "ngram", "verify": rule}}
        told = server.post("/v1/chat/completions", asked).json()["usage"]["speculation"]
        assert (told["verify"], told["lossless"]) == (rule, rule == "rejection")
    lines = server.http.get("/metrics").text.splitlines()
    assert any(line.startswith("paceline_lossy_tokens_total ") and float(line.split()[1]) >= 59 for line in lines)


def test_models_and_tokens(server: Running) -> None:
    assert [m.id for m in server.client().models.list()] == [NAME]
    assert server.client().models.retrieve(NAME).id == NAME
    text = "naïve café 🙂"
    told = server.post("/tokenize", {"prompt": text}).json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 1024
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}

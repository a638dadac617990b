"""Tokenizers: the file's own rules, exactly one beginning-of-text token, and streams that add up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, CORPUS, MARKERS, save_folder, tiny_backend, tiny_model, write_gguf
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from paceline.decode.model.chat_template import render_template
from paceline.decode.model.checkpoint import inspect_checkpoint
from paceline.decode.model.fetch import KNOWN_MODELS, cache_folder, cached_model
from paceline.decode.model.gguf_file import GGUFFile
from paceline.decode.model.gguf_tokenizer import gguf_tokenizer
from paceline.decode.model.safetensors_files import folder_tokenizer
from paceline.decode.model.tokenizer import TextTokenizer, byte_alphabet
from paceline.errors import UsageError

TEXTS = st.one_of(st.text(), st.text(alphabet="aé東🙂 \n1<|im_start>"), st.sampled_from([*CORPUS, *MARKERS]))
CONVERSATION = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"}]


@cache
def byte_level() -> TextTokenizer:
    return TextTokenizer(tiny_backend())


@cache
def sentence_piece(folder: Path) -> TextTokenizer:
    """A SentencePiece vocabulary as llama.cpp stores it: bytes, letters, a few merges by score."""
    words = [
        "\u2581",
        *"abcdehilorst",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581he",
        "\u2581hello",
        "st",
        "\u2581a",
    ]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + words
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = gguf_tokenizer(GGUFFile(write_gguf(folder / "spm.gguf", tiny_model(), metadata=metadata)))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return sentence_piece(tmp_path_factory.mktemp("spm"))


def streamed(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(i) for i in ids]) + stream.flush()


# Round trips and streams


@given(TEXTS)
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    plain = text
    for marker in MARKERS:
        plain = plain.replace(marker, "")
    assert tokenizer.decode(ids) == plain
    assert streamed(tokenizer, ids) == plain


@given(st.lists(st.integers(0, 373), max_size=40))
def test_any_ids_streamed_equal_whole_byte_level(ids: list[int]) -> None:
    """Any ids at all: broken UTF-8, markers in the middle."""
    assert streamed(byte_level(), ids) == byte_level().decode(ids)


def test_any_ids_streamed_equal_whole_sentence_piece(spm: TextTokenizer) -> None:
    @given(st.lists(st.integers(0, spm.size - 1), max_size=40))
    def check(ids: list[int]) -> None:
        assert streamed(spm, ids) == spm.decode(ids)

    check()


def test_incomplete_characters_are_held_back() -> None:
    values = {byte: character for character, byte in byte_alphabet().items()}
    vocab = byte_level().vocab()
    ids = [vocab[values[byte]] for byte in "a🙂b".encode()]
    stream = byte_level().stream()
    assert [stream.push(i) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.flush() == ""
    stream = byte_level().stream()
    assert [stream.push(i) for i in ids[:3]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_stream_that_gives_out_every_token_at_once_is_caught() -> None:
    """The fault the hold-back is there for: each id decoded alone breaks characters of several tokens."""
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    assert "".join(tokenizer.decode([i]) for i in ids) != tokenizer.decode(ids)


def test_a_long_stream_decodes_a_bounded_window() -> None:
    tokenizer = byte_level()
    stream = tokenizer.stream()
    for i in tokenizer.encode(CORPUS[0] * 50):
        stream.push(i)
        assert len(stream._ids) <= 8


# Tokenizers out of GGUF files


@given(TEXTS)
def test_gguf_tokenizer_equals_the_one_it_was_written_from(text: str) -> None:
    assert _written().encode(text) == byte_level().encode(text)


@cache
def _written() -> TextTokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "m.gguf", tiny_model(), backend=tiny_backend())
        tokenizer = gguf_tokenizer(GGUFFile(path))
    assert tokenizer is not None
    return tokenizer


def test_padding_is_no_token() -> None:
    assert not any(token.startswith("[PAD") for token in _written().vocab())
    assert len(_written().encode("[PAD380]")) > 1
    assert _written().size == 374
    assert _written().decode([380]) == ""


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "It's 2025  ok", ["It", "'s", " ", "2", "0", "2", "5", " ", " ok"]),
        ("llama-bpe", "It'S 12345", ["It", "'S", " ", "123", "45"]),
        ("gpt-2", "It's 2025!", ["It", "'s", " 2025", "!"]),
        ("smollm", "a 25", ["a", " ", "2", "5"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
    ],
)
def test_cuts_by_name(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    """Before any merge, text is cut as the file's `tokenizer.ggml.pre` says."""
    metadata = {"tokenizer.ggml.pre": pre}
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend(), metadata=metadata)
    tokenizer = gguf_tokenizer(GGUFFile(path))
    assert tokenizer is not None
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


@given(TEXTS)
def test_qwen2_cut_equals_transformers(text: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    from paceline.decode.model import gguf_tokenizer as module

    (pattern,) = module._CUTS["qwen2"].patterns
    ours, theirs = (pre_tokenizers.Split(Regex(p), "isolated") for p in (pattern, PRETOKENIZE_REGEX))
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(spm: TextTokenizer) -> None:
    vocab = spm.vocab()
    assert spm.encode("hello") == [1, vocab["\u2581hello"]]
    assert spm.encode("é") == [1, vocab["\u2581"], vocab["<0xC3>"], vocab["<0xA9>"]]
    assert spm.decode(spm.encode("hello é 🙂 a")) == "hello é 🙂 a"
    assert spm.token_bytes()[vocab["<0xC3>"]] == b"\xc3"
    assert spm.token_bytes()[vocab["\u2581hello"]] == b" hello"


def slow_sentence_piece(tokenizer: TextTokenizer, text: str) -> list[int]:
    """SentencePiece's own rule: merge the pair of the best score, the leftmost of equals."""
    vocab = tokenizer.vocab()
    score = {token: -index for token, index in vocab.items() if index >= 259}
    parts = [*f"\u2581{text}".replace(" ", "\u2581")]
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = [[vocab[p]] if p in vocab else [vocab[f"<0x{byte:02X}>"] for byte in p.encode()] for p in parts]
    return [1, *chain.from_iterable(ids)]


def test_sentence_piece_against_a_slow_twin(spm: TextTokenizer) -> None:
    @given(st.text(alphabet="hello ast\n\u00e9", min_size=1))
    def check(text: str) -> None:
        assert spm.encode(text) == slow_sentence_piece(spm, text)

    check()


# Beginning of text


@pytest.fixture(params=["gguf", "folder"])
def with_bos(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    """A tokenizer that puts <|im_start|> (id 1) in front; the folder's also appends an end token."""
    if request.param == "gguf":
        metadata = {"tokenizer.ggml.add_bos_token": True}
        path = write_gguf(tmp_path / "m.gguf", tiny_model(), backend=tiny_backend(), metadata=metadata)
        found = gguf_tokenizer(GGUFFile(path))
    else:
        found = folder_tokenizer(save_folder(tmp_path / "m", tiny_model(), tiny_backend(adds_bos=True)))
    assert found is not None
    return found


def check_one_beginning(with_bos: TextTokenizer) -> None:
    plain = byte_level().encode("hello")
    assert with_bos.encode("hello") == [1, *plain]
    assert with_bos.encode("<|im_start|>hello") == [1, *plain]
    assert with_bos.encode("") == [1]
    rendered = with_bos.render_chat(CONVERSATION)
    assert rendered.startswith("<|im_start|>user\n")
    chat = with_bos.encode_chat(CONVERSATION)
    assert chat == with_bos.encode(rendered)
    assert chat[:2] != [1, 1]
    assert [i for i in chat if i in (0, 1, 2)] == [1, 2, 1, 2, 1]


def test_sd_27_exactly_one_beginning_of_text(with_bos: TextTokenizer) -> None:
    check_one_beginning(with_bos)


@pytest.mark.parametrize("fault", ["doubled", "missing"])
def test_sd_27_seen_red(with_bos: TextTokenizer, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The two faults of the case: the token is added without looking, or the path forgets it."""

    def careless(self: TextTokenizer, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return [*self.prefix_ids, *ids] if fault == "doubled" else ids

    monkeypatch.setattr(TextTokenizer, "encode", careless)
    with pytest.raises(AssertionError):
        check_one_beginning(with_bos)


def test_folder_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", tiny_model(), tiny_backend())
    ours, theirs = folder_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for text in CORPUS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    rendered = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(CONVERSATION) == rendered
    assert (ours.bos_token_id, ours.eos_token_id, ours.eos_token) == (1, 2, "<|im_end|>")
    assert folder_tokenizer(tmp_path) is None


# Chat templates

RENDERED = {
    "{{ messages | tojson }}": '[{"role": "user", "content": "é<"}]',
    "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}": "x\n",
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
    "a{% generation %}b{{ eos_token }}{% endgeneration %}c": "ab</s>c",
    "{{ strftime_now('%Y') }}{{ tools is none }}{{ add_generation_prompt }}": "2025TrueTrue",
}


@pytest.mark.parametrize(("source", "text"), RENDERED.items())
def test_template_environment(source: str, text: str) -> None:
    assert (
        render_template(
            source,
            [{"role": "user", "content": "é<"}],
            add_generation_prompt=True,
            tools=None,
            variables={"eos_token": "</s>"},
            now=lambda: datetime(2025, 1, 2),
        )
        == text
    )


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_template_refusals(source: str, word: str) -> None:
    tokenizer = TextTokenizer(tiny_backend(), chat_templates={"default": source})
    with pytest.raises(UsageError, match=word):
        tokenizer.render_chat(CONVERSATION)


def test_tool_template_and_none() -> None:
    both = {"default": "plain", "tool_use": "tools {{ tools | length }}"}
    tokenizer = TextTokenizer(tiny_backend(), chat_templates=both)
    assert tokenizer.render_chat(CONVERSATION) == "plain"
    assert tokenizer.render_chat(CONVERSATION, tools=[{"type": "function"}]) == "tools 1"
    with pytest.raises(UsageError, match="no chat template"):
        byte_level().render_chat(CONVERSATION)


def test_template_is_the_one_of_the_files() -> None:
    assert _written().chat_templates == {"default": CHAT_TEMPLATE}


# Real files


@pytest.fixture(scope="module")
def smollm2() -> TextTokenizer:
    if cached_model(KNOWN_MODELS["smollm2-135m"], cache_folder()) is None:
        pytest.skip("smollm2-135m is not in the cache; `paceline pull smollm2-135m` brings it")
    found = inspect_checkpoint("smollm2-135m").tokenizer
    assert found is not None
    return found


@pytest.mark.models
def test_smollm2_known_encodings(smollm2: TextTokenizer) -> None:
    """Ids of the model's published tokenizer."""
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert smollm2.size == 49152
    assert smollm2.prefix_ids == ()


@pytest.mark.models
def test_smollm2_round_trips(smollm2: TextTokenizer) -> None:
    for text in CORPUS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text
        assert streamed(smollm2, ids) == text


@pytest.mark.models
def test_smollm2_chat_has_its_system_prompt(smollm2: TextTokenizer) -> None:
    text = smollm2.render_chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

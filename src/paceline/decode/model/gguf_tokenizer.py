"""The tokenizer a GGUF file carries in its metadata, as a `tokenizers.Tokenizer`.

Vocabulary, merges, markers, beginning-of-text rule and chat template are the file's own. How text is cut
before the merges (`tokenizer.ggml.pre`) is a name in the file whose meaning stands in the tables below; a
name they do not have is refused, since a wrong cut gives other ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paceline.decode.model.gguf_file import GGUFFile
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.errors import ModelFormatError, UnsupportedModel

__all__ = ["gguf_end_ids", "gguf_tokenizer", "gguf_vocab_size"]

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# Markers that end a text or a turn whatever the file's end id is; a file names one id, models use several.
_END_MARKERS = frozenset(
    {
        *("</s>", "<eos>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"),
    }
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_WITH_LEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut into words: patterns one after the other, then the bytes of each word are merged."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken before any merge
    adds_bos: bool = False  # where the file does not say
    composes: bool = False  # Unicode NFC first


_LLAMA3 = _Cut((_WORDS_WITH_LEAD + r"|\p{N}{1,3}" + _TAIL,), whole_words=True, adds_bos=True)
_SMAUG = _Cut(_LLAMA3.patterns)
_QWEN2 = _Cut((_WORDS_WITH_LEAD + r"|\p{N}" + _TAIL,), composes=True)
_DIGITS = _Cut((r"\p{N}", _GPT2))
_CUTS: Mapping[str, _Cut] = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_GPT2,)),
    "olmo": _Cut((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _SMAUG,
    "dbrx": _SMAUG,
    "qwen2": _QWEN2,
    "megrez": _QWEN2,
    "deepseek-r1-qwen": _Cut(_QWEN2.patterns),
    "tekken": _Cut((_CASED + r"|\p{N}" + _TAIL.replace("[\\r\\n]*", "[\\r\\n/]*"),), True, True),
}


def gguf_tokenizer(file: GGUFFile) -> TextTokenizer | None:
    """The tokenizer of `file`; None where it carries no vocabulary."""
    kind = file.get("tokenizer.ggml.model", str)
    tokens = file.get("tokenizer.ggml.tokens", list)
    if kind is None or tokens is None:
        return None
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of the kind {kind!r}; allowed: {', '.join(sorted(builders))}."
        )
    tokens = tokens[: gguf_vocab_size(file)]
    backend, adds_bos = builders[kind](file, tokens)
    _add_markers(file, backend, tokens)
    bos = file.get("tokenizer.ggml.bos_token_id", int)
    stated = file.get("tokenizer.ggml.add_bos_token", bool)
    adds_bos = adds_bos if stated is None else stated
    if adds_bos and bos is None:
        raise ModelFormatError(
            f"{file.path} puts a beginning-of-text token first and names none; convert it again."
        )
    return TextTokenizer(
        backend,
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        special_tokens=_special_tokens(file, tokens),
        chat_templates=_chat_templates(file),
    )


def gguf_vocab_size(file: GGUFFile) -> int:
    """Tokens that mean something: the list without the unused ones that pad its end."""
    tokens = file.get("tokenizer.ggml.tokens", list) or []
    types = _types(file, len(tokens))
    size = len(tokens)
    while size and types[size - 1] == _UNUSED:
        size -= 1
    return size


def gguf_end_ids(file: GGUFFile) -> frozenset[int]:
    """Ids that end a text: the file's own end ids and its control tokens of a well-known name."""
    tokens = file.get("tokenizer.ggml.tokens", list) or []
    types = _types(file, len(tokens))
    named = {file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")}
    known = {i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_MARKERS}
    return frozenset(i for i in named if i is not None and i < len(tokens)) | known


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = file.require("tokenizer.ggml.pre", str)
    if name not in _CUTS:
        raise UnsupportedModel(
            f"{file.path} cuts its text the way {name!r} (tokenizer.ggml.pre), which is not known; allowed: "
            f"{', '.join(sorted(_CUTS))}."
        )
    cut = _CUTS[name]
    merges = [tuple(pair.split(" ", 1)) for pair in file.require("tokenizer.ggml.merges", list)]
    backend = Tokenizer(BPE(_vocabulary(tokens), merges, ignore_merges=cut.whole_words))
    if cut.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, cut.adds_bos


def _sentence_piece(file: GGUFFile, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: merges follow the scores of what they make; unknown characters become bytes."""
    scores = file.require("tokenizer.ggml.scores", list)
    vocabulary = _vocabulary(tokens)
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    model = BPE(
        vocabulary,
        _merges_by_score(vocabulary, scores, _types(file, len(tokens))),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    spaces_first = file.get("tokenizer.ggml.add_space_prefix", bool)
    leads = spaces_first is None or spaces_first
    replace = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if leads else replace
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if leads:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    plain = {token: i for token, i in vocabulary.items() if types[i] not in (_CONTROL, _UNKNOWN)}
    for token, index in plain.items():
        for cut in range(1, len(token)):
            left, right = plain.get(token[:cut]), plain.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(found)]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token in vocabulary:
            raise ModelFormatError(
                f"the vocabulary has {token!r} twice, as {vocabulary[token]} and as {index}."
            )
        vocabulary[token] = index
    return vocabulary


def _add_markers(file: GGUFFile, backend: Tokenizer, tokens: Sequence[str]) -> None:
    types = _types(file, len(tokens))
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _types(file: GGUFFile, count: int) -> list[int]:
    types = file.get("tokenizer.ggml.token_type", list)
    if types is None:
        return [1] * count
    if len(types) < count:
        raise ModelFormatError(
            f"{file.path} has {count} tokens and {len(types)} token types; convert it again."
        )
    return types[:count]


def _special_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if index is not None and index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    return special


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    named = {"default": file.get("tokenizer.chat_template", str)}
    for name in file.get("tokenizer.chat_templates", list) or []:
        named[name] = file.get(f"tokenizer.chat_template.{name}", str)
    return {name: source for name, source in named.items() if source is not None}

"""Drafts with another tokenizer: the shared tokens, the text written again, the cache behind it, the same texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_toys import table_target
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from test_model_drafter import VOCAB, ModelLoop
from test_tokenizer import sentence_piece
from tiny_decoders import tiny_decoder
from tiny_models import CORPUS, MARKERS, save_folder, tiny_backend, tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from toy import Lab, ToyModel, hashed, request

from paceline import LLM, SamplingParams
from paceline.core.proposal import Dense
from paceline.decode.draft.base import Drafter, SequenceView
from paceline.decode.draft.retokenize import JointIds, Retokenizer
from paceline.decode.draft.translate import TranslatingDrafter
from paceline.decode.model.overlap import Translation, find_translation
from paceline.decode.model.tokenizer import TextTokenizer
from paceline.decode.sequence import DraftSettings
from paceline.decode.verify.prefix import PrefixState
from paceline.errors import IncompatibleDraft


def other_backend() -> Tokenizer:
    """Byte-level as `tiny_backend`, but with other merges, digits in groups, and other ids; no `<|im_start|>`."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [AddedToken(m, special=True, normalized=False) for m in ("<|endoftext|>", "<|im_end|>", "<|other|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS[1], CORPUS[3], "the quick fox, the lazy add 2025 2024"], trainer)
    return backend


def has(name: str, tokenizer: TextTokenizer, ends: frozenset[int] = frozenset()) -> Any:
    return SimpleNamespace(name=name, tokenizer=tokenizer, vocab_size=tokenizer.size, eos_token_ids=ends)


@cache
def tokenizers() -> dict[str, TextTokenizer]:
    return {"ours": TextTokenizer(tiny_backend()), "other": TextTokenizer(other_backend(), prefix_ids=(2,))}


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return sentence_piece(tmp_path_factory.mktemp("spm"))


@cache
def translation() -> Translation:
    return find_translation(has("t", tokenizers()["ours"]), has("d", tokenizers()["other"]))


# -- which tokens are shared -----------------------------------------------------------------------------------


def test_shared_tokens_stand_for_the_same_bytes(spm: TextTokenizer) -> None:
    every = [*tokenizers().values(), spm]
    for ours in every:
        for theirs in every:
            found = find_translation(has("t", ours), has("d", theirs))
            assert len(found.pairs) > 200
            for target, draft in found.pairs:
                assert ours.token_bytes()[target] == theirs.token_bytes()[draft]
                assert target not in ours.special_ids and draft not in theirs.special_ids
            assert len({d for _, d in found.pairs}) == len({t for t, _ in found.pairs}) == len(found.pairs)


def test_a_piece_comes_before_a_raw_byte(spm: TextTokenizer) -> None:
    ours = tokenizers()["ours"]
    to_spm = dict(find_translation(has("t", ours), has("d", spm)).pairs)
    by_bytes = {text: token for token, text in ours.token_bytes().items() if token in to_spm}
    assert to_spm[by_bytes[b"a"]] == spm.vocab()["a"]
    assert to_spm[by_bytes[b" "]] == spm.vocab()["\u2581"]
    assert to_spm[by_bytes[b"\xc3"]] == spm.vocab()["<0xC3>"]


def plain_words(*tokens: str) -> TextTokenizer:
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend)


def test_special_tokens_are_never_matched() -> None:
    """An ordinary token spelled like a marker, a marker of the same text, and a token that ends a text."""
    spelled = plain_words("a", "b", "<|im_end|>", "e")
    marked = plain_words("e", "a", "b")
    marked.backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    for ours, theirs in ((spelled, marked), (marked, spelled), (marked, marked)):
        found = find_translation(has("t", ours), has("d", theirs))
        assert {ours.token_bytes()[t] for t, _ in found.pairs} == {b"a", b"b", b"e"}
    ends = find_translation(has("t", spelled, frozenset({1})), has("d", marked))
    assert {spelled.token_bytes()[t] for t, _ in ends.pairs} == {b"a", b"e"}


def test_too_little_overlap_is_refused_with_the_overlap() -> None:
    few = plain_words("e", "x", "q")
    with pytest.raises(IncompatibleDraft, match=r"draft d.*another tokenizer than t.*\d+ tokens.*%.*sample.*50%"):
        find_translation(has("t", tokenizers()["ours"]), has("d", few))
    with pytest.raises(IncompatibleDraft, match="0 tokens mean the same"):
        find_translation(has("t", plain_words("a")), has("d", plain_words("b")))


# -- the text written again ------------------------------------------------------------------------------------


def written_whole(joint: JointIds, tokens: list[int]) -> list[int]:
    """The slow twin: all bytes, all text, all tokens, in one go."""
    found = joint.translation
    skip = len(found.target.prefix_ids)
    tokens = tokens[skip:] if tuple(tokens[:skip]) == found.target.prefix_ids else tokens
    special, markers = found.target.special_ids, {found.draft.token_bytes()[i] for i in found.draft.special_ids}
    texts = [found.target.token_bytes().get(t, b"") for t in tokens]
    text = b"".join(b for t, b in zip(tokens, texts, strict=True) if t not in special or b in markers)
    for cut in range(4):  # what may be the beginning of a character at the end is not read yet
        try:
            text[len(text) - cut :].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                text = text[: len(text) - cut]
                break
    return [joint.of_draft(i) for i in found.draft.encode(text.decode(errors="replace"))]


def check_writing(joint: JointIds, tokens: list[int], chunk: int) -> None:
    writing = Retokenizer(joint)
    for end in [*range(0, len(tokens), chunk), len(tokens)]:
        writing.read(tokens[:end])
        writing.read(tokens[:end])
    if tokens:
        assert writing.ids == written_whole(joint, tokens)


sentences = st.lists(
    st.sampled_from(
        ["the quick", " fox", "hello", " ", "  ", "\n", "12", "3", "é", "東京", "🙂", "aaaa", "<|im_end|>", "'ll"]
    ),
    min_size=0,
    max_size=80,
).map("".join)


@pytest.mark.parametrize("pair", ["other-ours", "ours-other", "ours-spm", "spm-ours"])
@settings(max_examples=60, deadline=None)
@given(text=sentences, chunk=st.integers(1, 9), noise=st.lists(st.integers(0, 250), max_size=12))
def test_written_piecewise_as_written_whole(
    pair: str, spm: TextTokenizer, text: str, chunk: int, noise: list[int]
) -> None:
    """Texts, and behind them any tokens (broken characters, markers); however they arrive."""
    by_name = {**tokenizers(), "spm": spm}
    target, draft = (by_name[name] for name in pair.split("-"))
    joint = JointIds(find_translation(has("t", target), has("d", draft)))
    check_writing(joint, [*target.encode(text), *noise, *target.backend.encode(text).ids], chunk)


def test_seen_red_when_new_text_is_only_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Retokenizer) -> None:
        ids, starts = self._encode(len(self._text) - 1)
        self.ids += ids
        self._starts += starts

    joint = JointIds(translation())
    tokens = tokenizers()["ours"].encode("the quick brown fox adds 2025 and 2024")
    check_writing(joint, tokens, 1)
    monkeypatch.setattr(Retokenizer, "_write", append)
    with pytest.raises(AssertionError):
        check_writing(joint, tokens, 1)


def test_a_long_text_is_not_written_whole_again() -> None:
    joint = JointIds(translation())
    tokens = tokenizers()["ours"].encode(" ".join(CORPUS * 4))
    writing, lengths = Retokenizer(joint), list[int]()
    encode = writing._encode
    writing._encode = lambda begin: (lengths.append(len(writing._text) - begin), encode(begin))[1]  # type: ignore[func-returns-value, method-assign]
    for end in range(300, len(tokens), 2):
        writing.read(tokens[:end])
    assert len(lengths) > 40 and max(lengths[1:]) < 150 < lengths[0]


# -- the drafter -----------------------------------------------------------------------------------------------

OURS, DRAFT_WIDTH = 374, 352  # the target's ids; the draft's 340 and padding


def drafter(*, max_positions: int = 128, model: Any = None, **more: Any) -> TranslatingDrafter:
    model = model or tiny_decoder("qwen2", 2, vocabulary=DRAFT_WIDTH)
    return TranslatingDrafter(model, translation(), name="model", max_positions=max_positions, slots=4, **more)


class WritingLoop(ModelLoop):
    def check_cache(self, key: int) -> None:
        made = self.drafter._drafter  # type: ignore[attr-defined]
        state = made._states[key]
        assert made.cache.committed(state.slot) == len(state.written)


def own_words(prefix: list[int]) -> int | None:
    """What a drafter without history says; None where it is silent."""
    fresh = drafter()
    view = WritingLoop(fresh, lambda text: 0).begin(0, prefix)
    tokens = fresh.propose([view], [1])[0].tokens
    return tokens[0] if tokens else None


def test_is_a_drafter() -> None:
    made = drafter()
    assert isinstance(made, Drafter) and made.needs.own_kv and made.needs.tokenizer
    view = WritingLoop(made, lambda text: 0).begin(7, [1, 2])
    with pytest.raises(AssertionError, match="7"):
        made.check_idle()
    made.end(view)
    made.check_idle()


events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=14)


@settings(max_examples=15, deadline=None)
@given(
    table=st.lists(st.integers(0, 373), min_size=5, max_size=9),
    texts=st.lists(st.lists(st.integers(0, 373), min_size=1, max_size=12), min_size=4, max_size=4),
    what=events,
)
def test_any_interleaving_of_sequences(
    table: list[int], texts: list[list[int]], what: list[tuple[int, int, int]]
) -> None:
    """The contract; each first draft is what a drafter without history says, whatever was rolled back before."""
    made = drafter(prefill_chunk=5)
    loop = WritingLoop(made, table_target(table))
    shared = {target for target, _ in translation().pairs}
    for kind, key, budget in what:
        if kind == 0 and key in loop.views:
            loop.end(key)
        elif kind == 0:
            loop.begin(key, texts[key])
        elif loop.views:
            keys = sorted(loop.views)[key % len(loop.views) :]
            before = [list(loop.views[k].tokens) for k in keys]
            for text, proposal in zip(before, loop.round(keys, budget, asked=kind == 1), strict=True):
                assert set(proposal.tokens) <= shared
                if kind == 1 and budget:
                    assert (proposal.tokens[0] if proposal.tokens else None) == own_words(text)
    for key in sorted(loop.views):
        loop.end(key)
    made.check_idle()


def test_the_distribution_is_the_drafts_own_restricted_and_renormalised() -> None:
    logits = hashed(DRAFT_WIDTH, seed=4)
    made = drafter(model=ToyModel(logits, DRAFT_WIDTH))
    params = request([1], temperature=0.7).params
    tokens = tokenizers()["ours"].encode("hello 12")
    view = SequenceView(1, tokens, len(tokens), params, noise_key=99, verify="rejection")
    view.prefix = PrefixState(tokens, params, OURS, frozenset())
    made.begin(view)
    (proposal,) = made.propose([view], [3])
    assert isinstance(proposal.distribution, Dense)
    to_draft, read = dict(translation().pairs), tokenizers()["other"].encode("hello 12")
    for row, token in zip(proposal.distribution.probs, proposal.tokens, strict=True):
        own = torch.from_numpy(logits(tuple(read))).double()
        expected = torch.zeros(len(row), dtype=torch.float64)
        for target, draft in to_draft.items():
            expected[target] = (own[draft] / 0.7).exp()
        torch.testing.assert_close(row.double(), expected / expected.sum(), rtol=1e-4, atol=1e-7)
        assert row[token] > 0
        read.append(to_draft[token])
    made.end(view)


def test_drafts_are_drawn_from_what_is_reported() -> None:
    """Chi-square of 600 first drafts under new noise each; a true drafter fails with probability 1e-6."""
    made = drafter(model=ToyModel(hashed(DRAFT_WIDTH, seed=4), DRAFT_WIDTH))
    params = request([1], temperature=0.7, top_k=9).params
    view = SequenceView(1, [70, 71], 2, params, verify="rejection")
    view.prefix = PrefixState(view.tokens, params, OURS, frozenset())
    made.begin(view)
    counts = torch.zeros(OURS, dtype=torch.float64)
    for view.noise_key in range(600):
        (proposal,) = made.propose([view], [1])
        counts[proposal.tokens[0]] += 1
    assert isinstance(proposal.distribution, Dense)
    expected = proposal.distribution.probs[0].double() * 600
    kept = expected > 0
    assert int(kept.sum()) == 9 and counts[~kept].sum() == 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < chi2.isf(1e-6, 8)
    made.end(view)


def says(text: str, tokenizer: TextTokenizer, width: int) -> Callable[[tuple[int, ...]], Any]:
    """Continues with `text`, by the longest token there is; off the text something random."""
    noise, pieces = hashed(width, seed=9, scale=0.5), tokenizer.token_bytes()
    ordinary = {b: t for t, b in pieces.items() if t not in tokenizer.special_ids and b}
    whole = text.encode()

    def logits(prefix: tuple[int, ...]) -> Any:
        row = noise(prefix).copy()
        said = b"".join(pieces.get(t, b"?") for t in prefix if t not in tokenizer.special_ids)
        if whole.startswith(said) and len(said) < len(whole):
            rest = whole[len(said) :]
            row[ordinary[max((b for b in ordinary if rest.startswith(b)), key=len)]] = 9.0
        return row

    return logits


TEXT = "the quick brown fox: 東京 they're naïve 🙂 don't add 12345 def add(a, b): return the lazy dog, hello " * 2


@pytest.mark.parametrize("tree", [None, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_knows_the_text_is_accepted(lab: Lab, temperature: float, tree: int | None) -> None:
    """Over words cut differently, digits, characters of several tokens; the text is that of plain decoding."""
    ours, other = tokenizers()["ours"], tokenizers()["other"]
    target = ToyModel(says(TEXT, ours, VOCAB), VOCAB)
    made = drafter(model=ToyModel(says(TEXT, other, DRAFT_WIDTH), DRAFT_WIDTH), max_positions=400)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=90)
    asked = request(ours.encode("the"), draft="model", length=4, tree=tree, params=params)
    ran = lab.one(lab.engine(target, {"model": made}, vocab_size=OURS, pieces={}), asked)
    plain = lab.one(lab.engine(target, vocab_size=OURS), request(asked.prompt, draft="none", params=params))
    assert ran.tokens == plain.tokens
    stats = ran.sequence.stats
    assert stats.accepted > 40 and stats.rounds < 60, (stats.accepted, stats.rounds)


OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"repetition_penalty": 1.4}, {"min_tokens": 6}, {"n": 2}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mixed_batch_of_real_decoders(lab: Lab, temperature: float) -> None:
    """Different options, lengths and arrivals, and a draft context that runs out."""
    target, made = tiny_decoder("llama", 1), drafter(max_positions=40)
    asks = [
        request(
            [(11 * i + 7 * j) % 370 for j in range(2 + 3 * i)],
            id=str(i),
            draft="model",
            length=3 + i % 3,
            temperature=temperature,
            seed=i,
            max_tokens=20,
            **more,
        )
        for i, more in enumerate(OPTIONS)
    ]
    engine = lab.engine(target, {"model": made}, vocab_size=OURS, eos=[2], max_batch=4, pieces={})
    results = lab.run(engine, asks, [0, 2, 0, 3, 1])
    for r in asks:
        alone = lab.engine(target, vocab_size=OURS, eos=[2])
        plain = lab.run(alone, [request(r.prompt, draft="none", params=r.params)])
        assert [ran.tokens for ran in results[r.request_id]] == [ran.tokens for ran in plain["r"]]
    made.check_idle()
    assert sum(r.proposed for r in lab.records) > 50


# -- from the command line down --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no padding tried")
def test_from_files(tmp_path: Path) -> None:
    """A draft of another tokenizer and the target's own layers, as `--draft` names them; and one that is refused."""
    target = str(save_folder(tmp_path / "t", tiny_model(initializer_range=0.1), tiny_backend()))
    draft = str(save_folder(tmp_path / "d", tiny_model("qwen2", 2, vocab_size=DRAFT_WIDTH), other_backend()))
    specs = [f"model:{draft}", "layer-skip:1"]
    llm = LLM(target, draft=specs, dtype="float32", max_context=128)
    prompts, params = ["the quick brown", "東京 12345"], SamplingParams(max_tokens=16, temperature=0.9, seed=1)
    plain = llm.generate(prompts, params, draft=DraftSettings("none"))
    for name in [*specs, "auto"]:
        for length in (None, 3):
            outputs = llm.generate(prompts, params, draft=DraftSettings(name, length))
            assert [o.completions[0].token_ids for o in outputs] == [p.completions[0].token_ids for p in plain]
    lonely = Tokenizer(BPE({**{c: i for i, c in enumerate("xyz")}, **{m: 3 + i for i, m in enumerate(MARKERS)}}, []))
    alien = str(save_folder(tmp_path / "a", tiny_model(vocab_size=8), lonely))
    with pytest.raises(IncompatibleDraft, match=r"too few of its tokens.*ngram"):
        LLM(target, draft=f"model:{alien}", dtype="float32")

"""Memory of the engine: prefixes re-used, sequences preempted and resumed, nothing held in the end.

Every text is compared with plain decoding by the oracle. Prefixes are exact by the target's row policy: any length
where a token's bits do not depend on how its prompt was cut (`ANY`), whole chunks elsewhere.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
from oracle import plain_decode
from toy import FAULTS, Lab, Scripted, ToyModel, check_all_free, check_books, collect, following, hashed, request

from paceline.decode.cache import KVCache
from paceline.decode.draft.model import ModelDrafter
from paceline.decode.draft.registry import make_auto, make_model_free
from paceline.decode.room import Room
from paceline.decode.sequence import Request
from paceline.errors import RequestTooLarge

WIDTH = 24
TARGET = hashed(WIDTH, seed=1)
BLOCK = 512 * 8  # bytes: a token of the toy is two float32
ANY = tuple(range(16, 513, 16))


def text(seed: object, length: int) -> list[int]:
    return [zlib.crc32(f"{seed} {i}".encode()) % WIDTH for i in range(length)]


def truth(ask: Any, choice: int = 0, context: int = 4096) -> list[int]:
    return plain_decode(TARGET, ask.prompt, ask.params, vocab_size=WIDTH, choice=choice, context=context).tokens


def target(policy: tuple[int, ...] = ANY) -> ToyModel:
    return ToyModel(TARGET, WIDTH, chunk_rows=policy)


# The oracle is slow on long prompts, so targets look at the last few tokens alone here.
TARGET = hashed(WIDTH, seed=1, order=6)


@FAULTS
@pytest.mark.parametrize("policy", [ANY, ()], ids=["any length", "whole chunks"])
def test_sd_23_prefixes_are_reused_by_target_and_drafter(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, policy: tuple[int, ...], fault: bool
) -> None:
    """The fault drops what was found, as often as it is looked for."""
    if fault:
        match = Room._match
        monkeypatch.setattr(Room, "_match", lambda *args: (None, 0) if match(*args)[1] < 640 else match(*args))
    base = text("base", 600)
    asks = {
        "cold": base,
        "again": base,
        "longer": base + text("more", 200),
        "sixteen": [*base[:16], (base[16] + 1) % WIDTH, *text("other", 60)],
        "fifteen": [*base[:15], (base[15] + 1) % WIDTH, *text("third", 60)],
    }
    wanted = {"cold": 0, "again": 599, "longer": 600, "sixteen": 16, "fifteen": 0}
    if not policy:
        wanted |= {"again": 576, "longer": 576, "sixteen": 0}

    def check() -> None:
        draft = ModelDrafter(target(policy), name="draft", max_positions=4096, slots=8)
        engine = lab.engine(target(policy), {"draft": draft}, prefill_chunk=64)
        drafted = {}
        for name, prompt in asks.items():
            before = len(draft.model.seen)  # type: ignore[attr-defined]
            (ran,) = lab.run(engine, [request(prompt, id=name, draft="draft", length=4, max_tokens=30)])[name]
            assert ran.tokens == truth(ran.sequence.request)
            drafted[name] = ran.sequence.stats
            assert ran.sequence.stats.cached_tokens == wanted[name], name
            assert len(draft.model.seen) > before  # type: ignore[attr-defined]
        assert drafted["again"].accepted == drafted["cold"].accepted > 0
        assert {s.acceptance_length for s in drafted.values()} == {drafted["cold"].acceptance_length}

    lab.judge(fault, check)


@FAULTS
def test_prefixes_are_shared_inside_a_tenant_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """Within a tenant, running sequences are a source as well. The fault forgets whose they are."""
    prompt = text("secret", 100)
    if fault:
        whole = Room._prefix_of

        def nobodys(self: Room, sequence: Any, slot: int) -> Any:
            prefix = whole(self, sequence, slot)
            prefix.tenant = "b"
            return prefix

        monkeypatch.setattr(Room, "_prefix_of", nobodys)

    def ask(name: str, tenant: str) -> Any:
        return replace(request(prompt, id=name, draft="none", max_tokens=20), tenant=tenant)

    def check() -> None:
        engine = lab.engine(target())
        ran = lab.run(engine, [ask("1", "a"), ask("2", "b"), ask("3", "a")], [0, 3, 6])
        assert [ran[name][0].sequence.stats.cached_tokens for name in "123"] == [0, 0, 99]
        assert [lab.one(engine, ask(f"late {t}", t)).sequence.stats.cached_tokens for t in "abc"] == [99, 99, 0]

    lab.judge(fault, check)


def test_choices_share_one_prefill(lab: Lab) -> None:
    ask = request(text("n", 200), n=5, temperature=1.0, seed=3, max_tokens=12, draft="none")
    model = target()
    ran = lab.run(lab.engine(model, max_batch=3), [ask])["r"]
    assert [r.tokens for r in ran] == [truth(ask, choice) for choice in range(5)]
    assert [r.sequence.stats.cached_tokens for r in ran] == [0, 199, 199, 199, 199]
    prompts = sum(r.rows for r in lab.records if r.kind == "prefill" and r.batch == 1)
    assert prompts <= 210, "the prompt was computed once"


def test_the_prefix_used_longest_ago_yields(lab: Lab) -> None:
    """Four blocks: three prefixes of one block each leave one, which the fourth needs, and then the oldest's."""
    engine = lab.engine(target(), max_batch=2, cache_bytes=4 * BLOCK)
    prompts = {name: text(name, 300) for name in "abcde"}

    def cached(name: str) -> int:
        stats = lab.one(engine, request(prompts[name], id=name, draft="none", max_tokens=2)).sequence.stats
        return stats.cached_tokens

    assert [cached(name) for name in "abcd"] == [0] * 4
    assert cached("a") == 299  # used again: the oldest is b now
    assert cached("e") == 0
    assert [len(p.tokens) for p in engine._room.prefixes] == [301] * 4
    assert [cached(name) for name in "adc"] == [299] * 3 and cached("b") == 0


def test_a_fork_keeps_what_it_forks_from(lab: Lab) -> None:
    """Two conversations with one beginning: the first goes on where it was, since the second took a copy."""
    engine = lab.engine(target(), max_batch=2)
    system = text("system", 200)

    def cached(name: str, prompt: list[int]) -> int:
        ran = lab.one(engine, request(prompt, id=name, draft="none", max_tokens=5))
        assert ran.tokens == truth(ran.sequence.request)
        return ran.sequence.stats.cached_tokens

    first = system + text("first", 200)
    assert cached("1", first) == 0
    assert cached("2", system + text("second", 200)) == 200
    assert cached("3", first + text("on", 30)) == 400


def test_requests_that_can_never_fit_are_refused_with_numbers(lab: Lab) -> None:
    engine = lab.engine(target(), cache_bytes=2 * BLOCK, max_context=4096)
    with pytest.raises(RequestTooLarge, match=r"1500 tokens \(1000 of them prompt\).* holds 1024"):
        engine.add(request(text(0, 1000), draft="none", max_tokens=500))
    with pytest.raises(RequestTooLarge, match="1025"):
        engine.add(request(text(0, 1024), draft="none", max_tokens=None))
    assert not engine.has_work
    open_end = lab.one(engine, request(text(1, 1000), draft="none", max_tokens=None))
    assert len(open_end.tokens) == 24 and open_end.reason == "length"


@FAULTS
@pytest.mark.parametrize("policy", [ANY, ()], ids=["any length", "whole chunks"])
def test_the_youngest_yields_and_is_resumed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, policy: tuple[int, ...], fault: bool
) -> None:
    """Three answers outgrow four blocks. The fault resumes a sequence from its prompt with its output in the text."""
    asks = [
        request(text(i, 400), id=str(i), draft="ab"[i % 2], length=3, temperature=0.9, seed=i, max_tokens=300)
        for i in range(3)
    ]
    known = {ask.prompt: truth(ask) for ask in asks}
    if fault:
        whole = Room.leave

        def forgets(self: Room, sequence: Any, *, useful: bool) -> None:
            whole(self, sequence, useful=useful)
            if not sequence.stop.finish_reason:
                sequence.view.tokens.pop()

        monkeypatch.setattr(Room, "leave", forgets)

    def check() -> None:
        scripted = Scripted(following(lambda view: known[tuple(view.tokens[: view.prompt_len])], [2, 1, 3], WIDTH))
        draft = ModelDrafter(target(policy), name="b", max_positions=4096, slots=3, cache_bytes=4 * BLOCK)
        engine = lab.engine(
            target(policy), {"a": scripted, "b": draft}, max_batch=3, prefill_chunk=128, cache_bytes=4 * BLOCK
        )
        results = lab.run(engine, asks, [0, 1, 2])
        for ask in asks:
            assert results[ask.request_id][0].tokens == known[ask.prompt]
        counts = [results[ask.request_id][0].sequence.stats.preemptions for ask in asks]
        assert counts[0] == 0 and counts[2] > 0
        check_all_free(engine)

    lab.judge(fault, check)


def test_an_output_that_was_preempted_is_learnt_once(lab: Lab) -> None:
    suffix = make_model_free("suffix")
    engine = lab.engine(target(), {"suffix": suffix}, max_batch=2, cache_bytes=2 * BLOCK)
    asks = [request(text(i, 400), id=str(i), draft="suffix", length=4, max_tokens=150) for i in range(2)]
    results = lab.run(engine, asks)
    assert results["1"][0].sequence.stats.preemptions == 1
    assert suffix.pool.num_tokens == 300  # type: ignore[attr-defined]


DRAFTERS = ("none", "chain", "ngram", "auto", "draft")


def random_requests(seed: int, count: int) -> list[Request]:
    """Prompts that begin alike, of random lengths; random drafters, draft lengths, options, choices and tenants."""
    rng = random.Random(seed)
    bases = [text((seed, i), 120) for i in range(6)]
    asks = []
    for i in range(count):
        prompt = rng.choice(bases)[: rng.choice([3, 20, rng.randint(1, 120)])] + text(
            (seed, "own", i), rng.randint(1, 20)
        )
        made = request(
            prompt,
            id=str(i),
            draft=rng.choice(DRAFTERS),
            length=rng.choice([None, 0, 1, 3, 7]),
            temperature=rng.choice([0.0, 0.9]),
            seed=i,
            max_tokens=rng.choice([1, 5, 30, 60]),
            n=rng.choice([1, 1, 1, 2]),
        )
        asks.append(replace(made, tenant=rng.choice("xy")))
    return asks


@pytest.mark.parametrize(("policy", "count"), [(ANY, 150), ((), 75)], ids=["any length", "whole chunks"])
def test_random_requests_through_a_small_cache(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, policy: tuple[int, ...], count: int
) -> None:
    """Cancelled, preempted, re-using: every text equals plain decoding, nothing stays behind.

    Beside it: `bench/soak.py`, 500 requests and an hour's worth of rounds.
    """
    monkeypatch.setattr(KVCache, "block", 32)
    rng = random.Random(5)
    asks = random_requests(1, count)
    truths = {(ask.request_id, c): truth(ask, c) for ask in asks for c in range(ask.params.n)}
    known: dict[tuple[int, ...], list[list[int]]] = {}
    for ask in asks:
        known.setdefault(ask.prompt, []).extend(truths[ask.request_id, c] for c in range(ask.params.n))
    small = 13 * 32 * 8
    draft_model = ToyModel(hashed(WIDTH, seed=2, order=6), WIDTH)
    draft = ModelDrafter(draft_model, name="draft", max_positions=190, slots=5, cache_bytes=small)
    chain = Scripted(following(lambda view: _answer(known, view), [3, 1, (4, 4), 0], WIDTH), "chain")
    drafters: dict[str, Any] = {"chain": chain, "ngram": make_model_free("ngram"), "auto": make_auto(), "draft": draft}
    engine = lab.engine(target(policy), drafters, max_batch=5, prefill_chunk=48, cache_bytes=small, max_context=224)
    choices: list[Any] = []
    deltas: list[Any] = []
    waiting = list(asks)
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.3:
            choices += engine.add(waiting.pop(0))
        if rng.random() < 0.02 and choices:
            engine.cancel(rng.choice(choices[-8:]).request.request_id)
        if rng.random() < 0.005:
            engine.clear_prefix_cache()
        deltas += engine.step()
        check_books(engine)
    cancelled = 0
    for choice in choices:
        ran = collect(choice, deltas)
        expected = truths[choice.request.request_id, choice.choice]
        cancelled += ran.reason == "cancelled"
        assert ran.tokens == (expected[: len(ran.tokens)] if ran.reason == "cancelled" else expected)
    check_all_free(engine)
    assert draft.cache.nbytes == 0 and draft.cache.free_slots == 5 and not chain.held
    assert cancelled > count // 30
    assert sum(c.stats.preemptions for c in choices) > count // 25
    assert sum(c.stats.cached_tokens > 0 for c in choices) > count // (10 if policy else 40)


def _answer(known: dict[tuple[int, ...], list[list[int]]], view: Any) -> list[int]:
    said = view.tokens[view.prompt_len :]
    answers = known[tuple(view.tokens[: view.prompt_len])]
    return next((a for a in answers if a[: len(said)] == said), answers[0])

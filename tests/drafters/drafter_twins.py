"""Slow obvious twins of the matchers: every position is searched, nothing is indexed."""

from __future__ import annotations

from paceline.decode.draft.match import copy_confidence
from paceline.decode.draft.suffix import SuffixOptions


def common_suffix(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[len(left) - 1 - n] == right[len(right) - 1 - n]:
        n += 1
    return n


def ngram_continuation(
    tokens: list[int], budget: int, min_ngram: int, max_ngram: int, min_path_prob: float
) -> list[int]:
    best: tuple[int, int] | None = None  # length of match as far as n-grams go, start
    for start in range(1, len(tokens)):
        match = common_suffix(tokens[:start], tokens)
        if match >= min_ngram and (best is None or min(match, max_ngram) >= best[0]):
            best = (min(match, max_ngram), start)
    if best is None:
        return []
    start = best[1]
    match = min(common_suffix(tokens[:start], tokens), max(budget, 16))
    text, drafts, chance = list(tokens), [], 1.0
    while len(drafts) < budget and start + len(drafts) < len(text):
        chance *= copy_confidence(match + len(drafts))
        if chance < min_path_prob:
            break
        drafts.append(text[start + len(drafts)])
        if match >= len(tokens) - start:
            text.append(drafts[-1])
    return drafts


def suffix_places(
    tokens: list[int], pool: list[list[int]], min_match: int, max_match: int
) -> set[tuple[int, int, int]]:
    """(document, start, match) of every place; document -1 is the request's own text."""
    places = set()
    for number, text in [(-1, tokens), *enumerate(pool)]:
        for start in range(1, len(text)):
            match = min(common_suffix(text[:start], tokens), max_match)
            if match >= min_match:
                places.add((number, start, match))
    return places


def suffix_chain(tokens: list[int], pool: list[list[int]], budget: int, options: SuffixOptions) -> list[int]:
    """The path with the most expected accepted tokens; ties go to the longest match, own text, newest."""
    places = sorted(
        suffix_places(tokens, pool, options.min_match, max(options.max_match, budget)),
        key=lambda place: (-place[2], place[0] >= 0, -place[0], -place[1]),
    )
    best, best_chain, threshold = 0.0, [], float("inf")
    for m in sorted({match for _, _, match in places}, reverse=True):
        if m > threshold:
            continue
        threshold = m / 2
        texts = []
        for number, start, match in places:
            if match >= m:
                text = (tokens if number < 0 else pool[number])[start:]
                texts.append(text * (budget + 1) if number < 0 and match >= len(text) else text)
        length = min(budget, int(options.max_spec_factor * m + options.max_spec_offset))
        chain, expected = _path(texts, m, length, options.min_token_prob)
        if expected > best:
            best, best_chain = expected, chain
    return best_chain


def _path(texts: list[list[int]], match: int, length: int, min_prob: float) -> tuple[list[int], float]:
    chain: list[int] = []
    prob, expected = 1.0, 0.0
    while len(chain) < length:
        nexts = [t[len(chain)] for t in texts if len(t) > len(chain) and t[: len(chain)] == chain]
        if not nexts:
            break
        winner = max(nexts, key=nexts.count)
        prob *= copy_confidence(match + len(chain), nexts.count(winner), len(nexts))
        if prob < min_prob:
            break
        expected += prob
        chain.append(winner)
    return chain, expected


def suffix_tree(
    tokens: list[int], pool: list[list[int]], depth: int, options: SuffixOptions
) -> dict[tuple[int, ...], float]:
    """Every path that may be proposed, with the chance that all of it is accepted."""
    texts = []
    for number, start, match in suffix_places(tokens, pool, options.min_match, max(options.max_match, depth)):
        text = (tokens if number < 0 else pool[number])[start:]
        texts.append((match, text * (depth + 1) if number < 0 and match >= len(text) else text))
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while waiting:
        path, path_prob = waiting.pop()
        for token, chance in _blended(texts, path, options).items():
            if len(path) < depth and path_prob * chance >= options.min_node_prob:
                found[*path, token] = path_prob * chance
                waiting.append(((*path, token), path_prob * chance))
    return found


def _blended(
    texts: list[tuple[int, list[int]]], path: tuple[int, ...], options: SuffixOptions
) -> dict[int, float]:
    at = len(path)
    votes = [
        (match, text[at])
        for match, text in texts
        if len(text) > at
        and tuple(text[:at]) == path
        and at < int(options.max_spec_factor * match + options.max_spec_offset)
    ]
    chances: dict[int, float] = {}
    doubt, threshold = 1.0, float("inf")
    for m in sorted({match for match, _ in votes}, reverse=True):
        if m <= threshold:
            threshold = m / 2
            said = [token for match, token in votes if match >= m]
            for token in set(said):
                own = copy_confidence(m + at, said.count(token), len(said))
                chances[token] = chances.get(token, 0.0) + doubt * own
            doubt *= 1 - len(said) / (len(said) + 2.0 / (m + at))
    return chances

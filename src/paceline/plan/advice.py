"""What to run, from a probe: for each batch the drafter and fixed draft length with the most tokens per second.

A setting's gain on one text is plain seconds over its seconds, by the rounds of `hindsight.py` at the prices the
probe measured; over texts it is the geometric mean. Gains are resampled together: texts with replacement, and
each pass as a median of repeats drawn anew. From those draws come the interval of a gain and the regret of the
advice: what it loses to the setting that is best in the draw, at most, in 95 of 100 draws.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.estimate import Estimate, Origin
from paceline.errors import InvalidParameter
from paceline.plan.hindsight import fixed_rounds, oracle_rounds, seconds_of
from paceline.plan.pass_table import PassTable, resampled
from paceline.plan.probe_file import ProbeFile, ReplayedText

__all__ = ["Advice", "Setting", "advise", "draft_costs", "loss_under"]

Array = npt.NDArray[np.float64]
Setting = tuple[str | None, int]  # (drafter, D); (None, 0) is plain decoding
_TABLES, _DRAWS = 20, 25  # machines, and draws of texts on each


@dataclass(frozen=True, slots=True)
class Advice:
    """One batch.

    gain      of the setting over plain decoding, with its 95 % interval
    regret    see the module's docstring; a share of the best speed
    oracle    gain if every accepted length were known beforehand; None where there are no texts
    gains     of every setting, best first
    """

    batch: int
    setting: Setting
    gain: Estimate
    regret: float
    oracle: float
    gains: tuple[tuple[Setting, float], ...]


def draft_costs(
    probe: ProbeFile, table: PassTable, batch: int, context: float | None = None
) -> dict[str, Callable[[int], float]]:
    """By drafter: seconds of a round in which each of `batch` sequences has so many drafts verified on `context`
    cached tokens (None: those the passes were timed at). A draft model's step is taken at the context of its own.
    """
    costs: dict[str, Callable[[int], float]] = {}
    for drafter in probe.drafters:
        step = PassTable(drafter.steps).seconds(batch, 1) if drafter.steps else 0.0
        costs[drafter.name] = _cost(table, batch, context, step, batch * drafter.round_s)
    return costs


def _cost(
    table: PassTable, batch: int, context: float | None, step_s: float, round_s: float
) -> Callable[[int], float]:
    return lambda drafted: table.seconds(batch, 1 + drafted, context) + drafted * step_s + round_s


def advise(probe: ProbeFile, texts: Sequence[ReplayedText], batches: Sequence[int], *, seed: int = 0) -> list[Advice]:
    """The advice for each batch, over `texts` of the probe. Raises InvalidParameter where there are none."""
    texts = [t for t in texts if t.tokens > 1]
    if not texts:
        raise InvalidParameter("texts", 0, "one or more replayed answers of two tokens or more")
    settings: list[Setting] = [(None, 0)]
    settings += [(d.name, k) for d in probe.drafters for k in range(1, probe.longest + 1) if _all_have(texts, d.name)]
    counts = _counts(texts, settings, probe.longest)
    table = PassTable(probe.passes)
    generator = random.Random(seed)
    tables = [resampled(probe.passes, generator) for _ in range(_TABLES)]
    picks = np.random.default_rng(seed).multinomial(len(texts), [1 / len(texts)] * len(texts), size=_DRAWS)
    found = []
    for batch in batches:
        own = _mean_logs(probe, table, batch, settings, counts)
        order = np.argsort(-own.mean(axis=0), kind="stable")
        draws = np.concatenate(
            [picks / len(texts) @ _mean_logs(probe, t, batch, settings, counts) for t in tables]
        )
        found.append(_advice(probe, texts, table, batch, settings, own.mean(axis=0), order, draws))
    return found


def _all_have(texts: Sequence[ReplayedText], name: str) -> bool:
    return all(name in t.drafts for t in texts)


def _advice(
    probe: ProbeFile,
    texts: Sequence[ReplayedText],
    table: PassTable,
    batch: int,
    settings: Sequence[Setting],
    means: Array,  # [settings] log gains
    order: npt.NDArray[np.int64],
    draws: Array,  # [draws, settings]
) -> Advice:
    best = int(order[0])
    low, high = np.quantile(draws[:, best], [0.025, 0.975])
    value = float(means[best])
    gain = Estimate(
        math.exp(value), math.exp(min(value, float(low))), math.exp(max(value, float(high))),
        "times plain", Origin.MEASURED, f"{len(texts)} replayed texts, 95 % interval",
    )  # fmt: skip
    regret = 1.0 - math.exp(-float(np.quantile(draws.max(axis=1) - draws[:, best], 0.95)))
    costs = draft_costs(probe, table, batch)
    plain = table.seconds(batch, 1)
    logs = [
        math.log((t.tokens - 1) * plain / seconds_of(oracle_rounds(t, plain, own), plain, own))
        for t in texts
        for own in [{name: cost for name, cost in costs.items() if name in t.drafts}]
    ]
    ranked = tuple((settings[int(i)], math.exp(float(means[i]))) for i in order)
    return Advice(batch, settings[best], gain, regret, math.exp(sum(logs) / len(logs)), ranked)


def _counts(texts: Sequence[ReplayedText], settings: Sequence[Setting], longest: int) -> Array:
    """[texts, settings, drafted] rounds with so many drafts."""
    counts = np.zeros((len(texts), len(settings), longest + 1))
    for i, text in enumerate(texts):
        for s, (name, length) in enumerate(settings):
            if name is None:
                counts[i, s, 0] = text.tokens - 1
                continue
            for drafted, rounds in Counter(r.drafted for r in fixed_rounds(text, name, length)).items():
                counts[i, s, drafted] = rounds
    return counts


def _mean_logs(
    probe: ProbeFile, table: PassTable, batch: int, settings: Sequence[Setting], counts: Array
) -> Array:
    """[texts, settings] log gain over plain."""
    costs = draft_costs(probe, table, batch)
    plain = table.seconds(batch, 1)
    priced = {name: [cost(k) for k in range(counts.shape[2])] for name, cost in costs.items()}
    prices = np.array([[plain] * counts.shape[2] if name is None else priced[name] for name, _ in settings])
    seconds = np.einsum("tsk,sk->ts", counts, prices)
    return np.asarray(np.log(seconds[:, :1]) - np.log(seconds))


def loss_under(first: Sequence[Advice], other: Sequence[Advice]) -> Mapping[int, float]:
    """By batch of both: what the setting advised by `other` loses to the best, by the gains of `first`."""
    lost = {}
    for one in first:
        second = next((a for a in other if a.batch == one.batch), None)
        known = dict(one.gains)
        if second is not None and second.setting in known:
            lost[one.batch] = 1.0 - known[second.setting] / one.gains[0][1]
    return lost

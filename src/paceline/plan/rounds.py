"""One engine round over a whole grid of batches, draft lengths and contexts, and the speeds that follow.

    T_round(B, D, L) = T_target(B, 1+D, L) + T_draft(B, D, L) + T_fixed        D > 0
    T_plain(B, L)    = T_target(B, 1, L)                                       the engine without speculation
    T_idle(B, L)     = T_target(B, 1, L) + drafter kept up + T_fixed           D = 0 inside a speculative
    server
    f                = share of prefill that delays decoding * T_prefill / output tokens
    tokens/s/user    = n / (T + B n f),  n tokens a round;  tokens/s/device = B times that / devices

(SmartSpec's goodput, arXiv 2406.14066, with prefill; T_idle and T_plain differ in every engine measured.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.plan.acceptance import Acceptance
from paceline.plan.cost import StepCost, Work, count_work, price
from paceline.plan.mechanisms import Mechanism, draft_seconds, draft_shape
from paceline.plan.scenario import Scenario

__all__ = [
    "Grid",
    "evaluate",
    "first_token_seconds",
    "prefill_seconds",
    "prefill_works",
    "prompts_together",
    "target_cost",
]

Array = npt.NDArray[np.float64]
CHUNK_ROWS = 8192.0  # rows of prompts that an engine reads in one step (max_num_batched_tokens and its like)


@dataclass(frozen=True, slots=True)
class Grid:
    """Arrays over [batch, draft length, context]; a batch is that of one replica.

    round_s        D = 0 is the plain engine; `idle_s` [batch, 1, context] is D = 0 inside a speculative
                   server
    tokens         [1, length, context] tokens a request gains in a round, rounds without a proposal included
    prefill_s      [batch, length, 1] f above: seconds of delay per emitted token
    """

    batches: Array
    lengths: Array
    contexts: Array
    round_s: Array
    target_s: Array
    draft_s: Array
    idle_s: Array
    tokens: Array
    prefill_s: Array
    devices: int

    @property
    def plain_s(self) -> Array:
        return self.round_s[:, :1, :]

    @property
    def user_tokens_per_s(self) -> Array:
        b = self.batches[:, None, None]
        return np.asarray(self.tokens / (self.round_s + b * self.tokens * self.prefill_s))

    @property
    def device_tokens_per_s(self) -> Array:
        return self.user_tokens_per_s * self.batches[:, None, None] / self.devices

    @property
    def cost_ratio(self) -> Array:
        """kappa = T_round / T_plain; speculation pays where the tokens of a round exceed it."""
        return self.round_s / self.plain_s

    @property
    def speedup(self) -> Array:
        """Against the plain engine at the same batch and context, prefill included on both sides."""
        return self.user_tokens_per_s / self.user_tokens_per_s[:, :1, :]


def target_cost(
    scenario: Scenario, batch: npt.ArrayLike, width: npt.ArrayLike, context: npt.ArrayLike
) -> StepCost:
    """The target's pass in this scenario, by operator."""
    c = scenario.priced_by
    work = count_work(
        scenario.shape, scenario.hardware, batch, width, context, scenario.precision, scenario.layout, c
    )  # fmt: skip
    return price(work, c)


def prompts_together(prompt_tokens: float, batch: npt.ArrayLike) -> Array:
    """Prompts that one chunk of 8192 rows reads at once, never more than are in flight."""
    most = max(1.0, CHUNK_ROWS / max(prompt_tokens, 1.0))
    return np.minimum(np.asarray(batch, dtype=np.float64), most)


def prefill_works(scenario: Scenario, mechanism: Mechanism | None, batch: npt.ArrayLike) -> list[list[Work]]:
    """Work of reading `prompts_together` prompts: the target's, and the drafter's where it keeps a cache."""
    prompt, lay = scenario.load.prompt_tokens, scenario.layout
    if prompt < 1:
        return []
    shapes = [scenario.shape]
    if mechanism is not None and mechanism.kind in ("model", "eagle3", "mtp", "dflash", "dspark"):
        draft = draft_shape(mechanism, scenario.shape)
        assert draft is not None, mechanism.kind
        shapes.append(draft)
    count = prompts_together(prompt, batch) * lay.attention_groups
    # Causal attention sees half the prompt on average; only the last row of each needs logits.
    return [
        count_work(
            shape,
            scenario.hardware,
            count,
            prompt,
            prompt / 2,
            scenario.precision,
            lay,
            scenario.priced_by,
            count,
        )
        for shape in shapes
    ]


def prefill_seconds(
    scenario: Scenario, mechanism: Mechanism | None = None, batch: npt.ArrayLike = 1.0
) -> Array:
    """Seconds that one prompt's reading takes, in chunks shared with the other requests of the batch."""
    together = prompts_together(scenario.load.prompt_tokens, batch)
    total = np.zeros(np.shape(batch))
    for work in prefill_works(scenario, mechanism, batch):
        total = total + price(work, scenario.priced_by).total_s / together
    return np.asarray(total)


def first_token_seconds(scenario: Scenario, mechanism: Mechanism, grid: Grid) -> Array:
    """Mean time to first token [batch, length, context]: other prompts, own prefill, the running round,
    drafting.

    Prompts queue for one device group: with utilisation u the mean wait is u / (2 (1 - u)) of a prefill
    (M/D/1). With D > 0 the drafter reads the prompt too, and its first round stands before the first token,
    as in the engines that run it before they send.
    """
    plain, drafted = float(prefill_seconds(scenario)), float(prefill_seconds(scenario, mechanism))
    prefill = np.where(grid.lengths > 0, drafted, plain)[None, :, None]
    per_token = 1 / grid.user_tokens_per_s
    out, b = scenario.load.output_tokens, grid.batches[:, None, None]
    busy = np.minimum(0.95, (b - 1) * prefill / (out * per_token + prefill))  # the others' prompts
    return np.asarray(prefill * (1 + busy / (2 * (1 - busy))) + grid.round_s / 2 + grid.draft_s)


def evaluate(
    scenario: Scenario, mechanism: Mechanism, acceptance: Acceptance | None,
    batches: Sequence[float] | Array, lengths: Sequence[int] | Array, contexts: Sequence[float] | Array,
) -> Grid:  # fmt: skip
    """The grid for one mechanism. `lengths` begins with 0; a mechanism that drafts needs an acceptance
    profile.
    """
    b = np.asarray(batches, dtype=np.float64)
    d = np.asarray(lengths, dtype=np.float64)
    ctx = np.asarray(contexts, dtype=np.float64)
    assert d[0] == 0, f"lengths begin with {d[0]}, not 0"
    bb, dd, cc = b[:, None, None], d[None, :, None], ctx[None, None, :]
    c = scenario.priced_by
    target = target_cost(scenario, bb, mechanism.widths(dd), cc).total_s
    target = np.broadcast_to(target, (b.size, d.size, ctx.size))
    draft = np.broadcast_to(draft_seconds(mechanism, scenario, bb, dd, cc), target.shape)
    round_s = target + draft + mechanism.rounds(bb, dd) * c.round_s
    kept_up = draft_seconds(mechanism, scenario, bb, np.ones((1, 1, 1)), cc)
    idle = target[:, :1, :] + (
        kept_up + mechanism.rounds(bb, 1) * c.round_s if mechanism.kind != "none" else 0.0
    )
    seconds = np.where(dd > 0, prefill_seconds(scenario, mechanism, bb), prefill_seconds(scenario, None, bb))
    prefill = c.prefill * seconds / scenario.load.output_tokens
    return Grid(b, d, ctx, round_s, target, draft, np.asarray(idle), _tokens(mechanism, acceptance, d, ctx),
                prefill, scenario.layout.devices)  # fmt: skip


def _tokens(mechanism: Mechanism, acceptance: Acceptance | None, d: Array, ctx: Array) -> Array:
    longest = int(d.max())
    if longest == 0:
        return np.ones((1, 1, ctx.size))
    assert acceptance is not None, f"{mechanism.label} drafts without an acceptance profile"
    curves = np.stack([acceptance.lengths(longest, float(x)) for x in ctx], axis=-1)
    picked = curves[d.astype(int)]
    return mechanism.tokens(picked, acceptance.all_rounds)[None, :, :]

"""The shape of a model, as far as its cost goes: read from a `config.json`, or from the table of known
models.

Guarantees: every layer is in exactly one attention group and one feed-forward group; sizes are positive whole
numbers. Refuses a configuration that lacks a field it needs, by the field's name.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attention", "FeedForward", "ModelShape"]


@dataclass(frozen=True, slots=True)
class Attention:
    """`layers` attention layers of one kind.

    kind            "full": keys and values of every token (MHA, GQA, MQA); "mla": one shared latent;
                    "sparse": each query reads its own selection of at most `selected` entries;
                    "linear": a constant state instead of keys and values (Mamba, delta nets)
    window          tokens a query sees at most; None for all
    head_dim        width of a query/key head (of the latent row for "mla" and "sparse" it is `row_width`)
    row_width       numbers cached per token and layer, all heads together
    compression     tokens that share one cached row (1 but for compressed attention)
    extra_weights   weights beyond q, k, v, o projections (low-rank parts, indexers, gates)
    state_numbers   numbers of state per sequence and layer ("linear" only)
    """

    kind: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    row_width: int
    value_dim: int
    weights: int
    window: int | None = None
    selected: int | None = None
    compression: float = 1.0
    state_numbers: int = 0

    @property
    def group(self) -> float:
        """Query heads that share one cached row: G of the guidelines."""
        return self.heads / self.kv_heads


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`layers` feed-forward layers of one kind. `experts` = 0 is a dense layer of width `inner`."""

    layers: int
    inner: int
    matrices: int = 3  # gate, up, down; 2 without a gate
    experts: int = 0
    active: int = 0
    shared_inner: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model, by groups of like layers."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    attention: tuple[Attention, ...]
    feed_forward: tuple[FeedForward, ...]
    source: str
    keeps_linear_bf16: bool = False  # quantised releases leave all but the experts in bf16
    has_mtp: bool = False

    @property
    def layers(self) -> int:
        return sum(a.layers for a in self.attention)

    @property
    def is_moe(self) -> bool:
        return any(f.experts for f in self.feed_forward)

    @property
    def attention_weights(self) -> int:
        return sum(a.layers * a.weights for a in self.attention)

    @property
    def dense_weights(self) -> int:
        """Feed-forward weights every token touches: dense layers, shared experts, routers."""
        total = 0
        for f in self.feed_forward:
            inner = f.shared_inner if f.experts else f.inner
            total += f.layers * (f.matrices * self.hidden * inner + self.hidden * f.experts)
        return total

    @property
    def expert_weights(self) -> int:
        return sum(f.layers * f.experts * f.matrices * self.hidden * f.inner for f in self.feed_forward)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All weights, embeddings included."""
        embedding = 0 if self.tied else self.head_weights
        return (
            self.attention_weights + self.dense_weights + self.expert_weights + self.head_weights + embedding
        )

    @property
    def active_parameters(self) -> int:
        """Weights one token's forward pass touches, the input embedding left out."""
        experts = sum(f.layers * f.active * f.matrices * self.hidden * f.inner for f in self.feed_forward)
        return self.attention_weights + self.dense_weights + experts + self.head_weights

    def kv_numbers_per_token(self) -> float:
        """Numbers cached per token once windows are full of context (windowed layers are bounded apart)."""
        return sum(a.layers * a.row_width / a.compression for a in self.attention if a.window is None)

    def state_numbers(self) -> int:
        """Numbers of recurrent state per sequence (or, with drafts, per draft position that can be
        undone).
        """
        return sum(a.layers * a.state_numbers for a in self.attention)

"""Which paddings make a row's bits independent of the other rows of a pass, found by trying.

Kernels are chosen by shape, and another kernel sums in another order; so the result of one row may change with
the number of rows beside it (design: exactness 4). Nothing here goes by a processor's name or by a timing, so
the answer is the same at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.decode.model.attention import Attention
from paceline.decode.model.linear import Linear
from paceline.decode.model.step import KV_BLOCK, Geometry, RowPolicy

__all__ = ["CHUNK_ROWS", "find_row_policy"]

# Sizes a prefill chunk is padded to: few, so that each can be tried; a quarter of the work is wasted at most.
CHUNK_ROWS = (40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)

_MULTIPLES = (4, 8, 16, 32)  # below 4 rows the packed products are no faster (measured, avx512_bf16)
_KV_BLOCKS = (128, 256, 512)
_BLOCK = 32  # rows up to which every count is tried
_KEYS = 2 * KV_BLOCK  # the kernel sums keys in parts of KV_BLOCK: two parts show what every further one does


@torch.inference_mode()
def find_row_policy(
    products: Sequence[Linear], geometry: Geometry, head_dim: int, attention: Attention
) -> RowPolicy:
    """The cheapest padding that keeps rows independent in `products` and in attention of this geometry.

    The last of `products` is the LM head, which sees no prefill chunk as a whole.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).to(geometry.dtype).to(geometry.device)

    inputs = [noise(_BLOCK, m.in_features) for m in products]
    pairs = list(zip(products, inputs, strict=True))
    trial, chunk_trial = (
        _AttentionTrial(geometry, head_dim, attention, noise, rows) for rows in (_BLOCK, CHUNK_ROWS[-1])
    )
    for multiple in _MULTIPLES:
        if not all(_independent(f, x, multiple) for f, x in pairs):
            continue
        for kv_block in _KV_BLOCKS:
            if trial.independent(multiple, kv_block):
                policy = RowPolicy(multiple, _BLOCK, kv_block, chunk_rows=CHUNK_ROWS)
                chunks = _chunks_agree(products[:-1], noise) and chunk_trial.chunks_agree(policy)
                return policy if chunks else replace(policy, chunk_rows=())
    return RowPolicy(_BLOCK, _BLOCK, KV_BLOCK, proved=False)


def _independent(product: Callable[[Tensor], Tensor], x: Tensor, multiple: int) -> bool:
    """Whether every row has, in products of any allowed count up to `_BLOCK`, the bits it has in the smallest."""
    alone = torch.cat([product(F.pad(row[None], (0, 0, 0, multiple - 1)))[:1] for row in x])
    counts = range(multiple, _BLOCK + 1, multiple)
    return all(torch.equal(product(x[:count]), alone[:count]) for count in counts)


def _chunks_agree(products: Sequence[Linear], noise: Callable[[int, int], Tensor]) -> bool:
    """Whether rows have in products of every size of `CHUNK_ROWS` the bits they have in blocks of `_BLOCK`."""
    for product in products:
        x = noise(CHUNK_ROWS[-1], product.in_features)
        alone = torch.cat([product(part) for part in x.split(_BLOCK)])
        if not all(torch.equal(product(x[:rows]), alone[:rows]) for rows in CHUNK_ROWS):
            return False
    return True


class _AttentionTrial:
    """Compares queries inside blocks with the same queries alone, over every padded number of keys up to `_KEYS`.

    A query's own keys are the same in both; what changes is the queries beside it and the masked keys behind it.
    (Trying a few contexts was not enough: with 64-key blocks on a CPU with avx512_bf16 all agreed but those of
    320 keys padded to 384.)
    """

    def __init__(
        self, geometry: Geometry, head_dim: int, attention: Attention, noise: Callable[[int, int], Tensor], rows: int
    ) -> None:
        self.geometry, self.dim, self.attention = geometry, head_dim, attention
        length = _KEYS + KV_BLOCK
        self.keys, self.values = (
            noise(length, geometry.kv_heads * head_dim).view(length, -1, head_dim).transpose(0, 1)[None]
            for _ in range(2)
        )
        queries = noise(rows, geometry.kv_heads * geometry.group * head_dim)
        self.queries = queries.view(rows, geometry.kv_heads, geometry.group, head_dim)

    def independent(self, multiple: int, kv_block: int) -> bool:
        blocks = ((0, 1), (0, 2), (0, 5), (0, 8), (3, 9), (0, 17), (0, _BLOCK))
        for keys in range(kv_block, _KEYS + 1, kv_block):
            context = keys - min(40, kv_block // 2)
            alone = torch.cat(
                [self._attend(context, i, i + 1, multiple, kv_block, 0) for i in range(_BLOCK)], dim=2
            )
            for extra in range(0, _KEYS + KV_BLOCK - keys - kv_block + 1, kv_block):
                for low, high in blocks:
                    together = self._attend(context, low, high, multiple, kv_block, extra)
                    if not torch.equal(together, alone[:, :, low:high]):
                        return False
        return True

    def chunks_agree(self, policy: RowPolicy) -> bool:
        """Whether queries have in chunks of every size of `CHUNK_ROWS` the bits they have in blocks of `_BLOCK`."""
        return all(self._chunk_agrees(context, policy) for context in (0, _KEYS - KV_BLOCK + 188))

    def _chunk_agrees(self, context: int, policy: RowPolicy) -> bool:
        def attend(low: int, high: int) -> Tensor:
            return self._attend(context, low, high, policy.multiple, policy.kv_block, 0)

        alone = torch.cat([attend(low, low + _BLOCK) for low in range(0, CHUNK_ROWS[-1], _BLOCK)], dim=2)
        return all(torch.equal(attend(0, rows), alone[:, :, :rows]) for rows in CHUNK_ROWS)

    def _attend(
        self, context: int, low: int, high: int, multiple: int, kv_block: int, extra: int
    ) -> Tensor:
        """[kv_heads, group, high - low, head_dim] of queries low to high at positions context + their index."""
        kv_heads, group = self.geometry.kv_heads, self.geometry.group
        width = -(-(high - low) // multiple) * multiple
        span = -(-(context + high) // kv_block) * kv_block + extra
        padded = F.pad(self.queries[low:high], (0, 0, 0, 0, 0, 0, 0, width - high + low))
        folded = padded.permute(1, 2, 0, 3).reshape(1, kv_heads, group * width, self.dim)
        last = torch.arange(context + low, context + low + width)
        last[high - low :] = 0
        seen = torch.arange(span) <= last[:, None]
        mask = torch.zeros(seen.shape, dtype=self.geometry.dtype).masked_fill_(~seen, float("-inf"))
        mask = mask.repeat(group, 1)[None, None].to(self.geometry.device)
        mixed = self.attention(folded, self.keys[:, :, :span], self.values[:, :, :span], mask)
        return mixed.view(kv_heads, group, width, self.dim)[:, :, : high - low]

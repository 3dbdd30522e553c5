"""SOCKET: ranks keys by soft collisions in hash tables.

A key belongs to one bucket of each hash table. A query has a probability for each bucket, and a
key's score is the sum of the probabilities of its buckets.

SOCKET: SOft Collision Kernel EsTimator for Sparse Attention (as described in its authors'
repository). docs/indexes/socket.md lists the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import codes, group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

BLOCK = 2**24
"""Projections computed at a time (64 MiB)."""

LARGEST = 8
"""Maximum bits of a bucket: one byte per table."""

MOST_TABLES = 2**15
"""Maximum number of tables; the hyperplanes of one take `32 · D` bytes at 8 bits."""


@dataclass(frozen=True)
class SocketConfig:
    """Options of SOCKET.

    Args:
        bits: Number of hyperplanes per hash table, 1 to 8. A table has `2^bits` buckets.
        tables: Number of hash tables.
        tau: Temperature of a query's distribution over buckets. At lower values, more of the
            probability is in the bucket on the query's side of all hyperplanes.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the hyperplanes.
    """

    bits: int = 8
    tables: int = 60
    tau: float = 0.3
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        if check.at_least("bits", self.bits, 1) > LARGEST:
            raise ValueError(f"bits: got {self.bits}, allowed is 1 to {LARGEST}")
        if check.at_least("tables", self.tables, 1) > MOST_TABLES:
            raise ValueError(f"tables: got {self.tables}, allowed is 1 to {MOST_TABLES}")
        check.positive("tau", self.tau)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed)


class Socket(BaseIndex):
    """Ranks all keys by the probability of the key's bucket for the query, summed over hash tables.

    The sum for a key is its score for one query head. The scores of the query heads that share a KV
    head are combined like unnormalized attention weights (option `group`): the scores of each head
    are first divided by their sum over all keys. `Hits.scores` contains the combined scores.

    Source: SOCKET: SOft Collision Kernel EsTimator for Sparse Attention.
    """

    Config = SocketConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, config = self.geometry, self.config
        generator = torch.Generator().manual_seed(config.seed)
        shape = (g.head_dim, config.tables * config.bits)
        self._planes = torch.randn(shape, generator=generator).to(g.device)

    # Encoding

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Compute the bucket of each key in each table, uint8 `[B, G, N, tables]`.

        Bit `p` of the bucket's number is 1 if the inner product of the key with the normal of
        hyperplane `p` is at least 0.
        """
        step = max(BLOCK // (self._planes.shape[1] * keys.shape[0] * keys.shape[1]), 1)
        buckets = []
        for block in torch.split(keys, step, 2):
            positive = self._projected(block) >= 0
            buckets.append(codes.pack(pad(positive, (0, LARGEST - positive.shape[-1]))))
        return {"buckets": torch.cat(buckets, dim=2)}

    def _projected(self, vectors: Tensor) -> Tensor:
        """Compute the inner products of vectors `[..., D]` with the normals of all hyperplanes.

        The result is float32 `[..., tables, bits]`.
        """
        products: Tensor = vectors.float() @ self._planes
        return products.reshape(*vectors.shape[:-1], self.config.tables, self.config.bits)

    def _layout(self, sizes: StateSizes) -> Layout:
        if not sizes.length:
            return {}
        most = 2**self.config.bits - 1
        return {"codes.buckets": TensorSpec(f"B G N {self.config.tables}", torch.uint8, most=most)}

    # Search

    def _chances(self, queries: Tensor) -> Tensor:
        """Compute the probability of each bucket for each query, `[B, G, g, tables, 2^bits]`.

        For the bucket with signs `c_p = ±1` it is `softmax_c(Σ_p c_p tanh ⟨q, w_p⟩ / (τ √D))`,
        where `w_p` is the normal of hyperplane `p`, and the softmax is over the buckets of a table.
        """
        bits, device = self.config.bits, queries.device
        corners = torch.arange(2**bits, dtype=torch.uint8, device=device)
        signs = codes.unpack(corners)[:, :bits].float() * 2 - 1
        temperature = self.config.tau * self.geometry.head_dim**0.5
        logits: Tensor = self._projected(queries).tanh() @ signs.T / temperature
        return logits.softmax(-1)

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        chances = self._chances(group.fold(queries, g.kv_heads, policy))
        buckets = self._codes["buckets"]
        total = chances.new_zeros((*chances.shape[:3], len(self)))
        for table in range(self.config.tables):
            index = buckets[..., table].long()[:, :, None].expand(total.shape)
            total += chances[..., table, :].gather(-1, index)
        scores = total.clamp_min(torch.finfo(total.dtype).tiny).log() / g.scale
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid[:, None, None], float("-inf"))
        agreed = self.ops.group.agree(scores, policy, scale=g.scale, softcap=None)  # not logits
        best, ids = self.ops.select.top_k(agreed, k)
        return Hits(ids, best)

    def _other_tensors(self) -> list[Tensor]:
        return [self._planes]

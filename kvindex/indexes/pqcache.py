"""PQCache: ranks all keys by inner products with product-quantized keys.

The codebooks are trained on the keys of the prompt.

Zhang et al., PQCache: Product Quantization-based KVCache for Long Context LLM Inference
(SIGMOD 2025). docs/indexes/pqcache.md lists the differences from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.index import FIRST_APPEND, BaseIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import group
from kvindex.ops.kmeans import assign, kmeans
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

LARGEST = 8
"""Maximum bits of a code: one byte per subspace."""


@dataclass(frozen=True)
class PQCacheConfig:
    """Options of PQCache.

    Args:
        subspaces: Number of subspaces `M` into which a key is divided, a divisor of `head_dim`.
        bits: Bits per code, 1 to 8. A subspace has `2^bits` centroids.
        iterations: Number of k-means iterations (Lloyd's algorithm). With 0, the starting points
            are the centroids.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the starting points of k-means.
    """

    subspaces: int = 2
    bits: int = 6
    iterations: int = 10
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        check.at_least("subspaces", self.subspaces, 1)
        if check.at_least("bits", self.bits, 1) > LARGEST:
            raise ValueError(f"bits: got {self.bits}, allowed is 1 to {LARGEST}")
        check.at_least("iterations", self.iterations, 0)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed)


class PQCache(BaseIndex):
    """Ranks all keys by the inner product of the query with the product-quantized key.

    For each subspace of a key, the index stores the number of the nearest centroid in one byte. The
    centroids are trained on the first append. The query is not quantized. `Hits.scores` contains
    these inner products, combined over the query heads that share a KV head (option `group`).

    Source: Zhang et al., PQCache (SIGMOD 2025).
    """

    Config = PQCacheConfig
    learns_from = FIRST_APPEND
    presets: ClassVar = {"infinitebench": dict(subspaces=4, bits=8)}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        D, M = self.geometry.head_dim, self.config.subspaces
        if D % M:
            raise ValueError(f"subspaces: got {M}, allowed is a divisor of head_dim = {D}")

    # Encoding

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Train the codebooks of each sequence once, in its first append with valid keys.

        The codebooks are trained on the valid keys of this append.

        Returns:
            `codebooks`: Float32 `[B, G, M, 2^bits, m]`.
            `known`: True for sequences whose codebooks are trained, bool `[B]`.
        """
        B, counts = len(keys), [keys.shape[2]] * len(keys)
        known = self._learned["known"].tolist() if self._learned else [False] * B
        if valid is not None:
            counts = valid.sum(1).tolist()
        missing = [b for b in range(B) if counts[b] and not known[b]]
        if not missing:
            return self._learned
        parts = self._parts(keys)  # [B, G, M, N, m]
        shape = (*parts.shape[:3], 2**self.config.bits, parts.shape[-1])
        books = self._learned["codebooks"].clone() if self._learned else parts.new_zeros(shape)
        for count in sorted(
            {counts[b] for b in missing}
        ):  # sequences with equally many keys learn together
            rows = [b for b in missing if counts[b] == count]
            chosen = parts[rows]
            if valid is not None:
                # a stable sort keeps the order of valid keys, so padding does not change the result
                order = (~valid[rows]).byte().argsort(dim=1, stable=True)[:, :count]
                index = order[:, None, None, :, None].expand(
                    *chosen.shape[:3], -1, chosen.shape[-1]
                )
                chosen = chosen.gather(3, index)
            books[rows] = self._trained(chosen.flatten(0, 2)).view(len(rows), *shape[1:])
        flags = [known[b] or b in missing for b in range(B)]
        return {"codebooks": books, "known": torch.tensor(flags, device=keys.device)}

    def _trained(self, points: Tensor) -> Tensor:
        """Train `P` independent codebooks `[P, 2^bits, m]` on points `[P, n, m]`.

        If there are at most `2^bits` points, each point is a centroid. The remaining centroids are
        copies of the first point, and no key is assigned to them.
        """
        clusters, config = 2**self.config.bits, self.config
        if points.shape[1] > clusters:
            return kmeans(points, clusters, iterations=config.iterations, seed=config.seed)
        spare = points[:, :1].expand(-1, clusters - points.shape[1], -1)
        return torch.cat([points, spare], dim=1)

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        parts = self._parts(keys)
        if not learned:  # only padding so far
            labels = torch.zeros(parts.shape[:4], dtype=torch.uint8, device=keys.device)
        else:
            flat = assign(parts.flatten(0, 2), learned["codebooks"].flatten(0, 2))[0]
            labels = flat.view(parts.shape[:4]).to(torch.uint8)
        return {"labels": labels.transpose(2, 3).contiguous()}  # [B, G, N, M]

    def _layout(self, sizes: StateSizes) -> Layout:
        layout: Layout = {}
        M, centroids = self.config.subspaces, 2**self.config.bits
        if sizes.length:
            layout["codes.labels"] = TensorSpec(f"B G N {M}", torch.uint8, most=centroids - 1)
        if sizes.has("learned"):
            axes = f"B G {M} {centroids} {self.geometry.head_dim // M}"
            layout["learned.codebooks"] = TensorSpec(axes, torch.float32)
            layout["learned.known"] = TensorSpec("B", torch.bool)
        return layout

    def _parts(self, vectors: Tensor) -> Tensor:
        """Split vectors `[B, G, N, D]` into subspaces, float32 `[B, G, M, N, m]`."""
        cut = (*vectors.shape[:3], self.config.subspaces, -1)
        return vectors.float().reshape(cut).transpose(2, 3)

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        estimates = self.estimates(group.fold(queries, g.kv_heads, policy))
        agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        scores, ids = self.ops.select.top_k(agreed, k)
        return Hits(ids, scores)

    def estimates(self, queries: Tensor) -> Tensor:
        """Estimate `q·k` for every token.

        Args:
            queries: Float32 `[B, G, g, D]`.

        Returns:
            Float32 `[B, G, g, N]`, `-inf` for invalid tokens.
        """
        table = self._parts(queries) @ self._learned["codebooks"].mT  # [B, G, M, g, 2^bits]
        labels = self._codes["labels"]
        total = table.new_zeros((*queries.shape[:3], len(self)))
        for b in range(self.config.subspaces):
            index = labels[..., b].long()[:, :, None].expand(total.shape)
            total += table[:, :, b].gather(-1, index)
        if self.valid is not None:
            total = total.masked_fill(~self.valid[:, None, None], float("-inf"))
        return total

"""Product quantization with trained codebooks, the baseline for analytic codes under drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.ops.kmeans import assign, kmeans
from kvindex.ops.select import top_k


@dataclass(frozen=True)
class PQ:
    """One byte per subspace of `m` coordinates; a key is the nearest centroid in each.

    codebooks: float32 `[G, M, clusters, m]`, of each KV head. With 256 clusters, `m = 8` takes 1
    bit per coordinate and `m = 2` takes 4.
    """

    codebooks: Tensor

    @classmethod
    def train(
        cls,
        keys: Tensor,
        *,
        subspace: int = 8,
        clusters: int = 256,
        iterations: int = 10,
        seed: int = 0,
    ) -> Self:
        """Codebooks by k-means on keys `[G, N, D]`.

        subspace: coordinates of one, `m`, which divides D; clusters: up to 256. Raises TypeError
        or ValueError for a wrong tensor, sizes out of range, or fewer keys than clusters.
        """
        check.tensor("keys", keys, {"G": None, "N": None, "D": None})
        if keys.shape[2] % check.at_least("subspace", subspace, 1):
            raise ValueError(f"subspace: got {subspace}, allowed divides head_dim {keys.shape[2]}")
        if check.at_least("clusters", clusters, 1) > 256:
            raise ValueError(f"clusters: got {clusters}, allowed is 1 to 256")
        parts = _parts(keys, subspace)
        centroids = kmeans(parts, clusters, iterations=iterations, seed=seed)
        return cls(centroids.view(len(keys), -1, *centroids.shape[1:]))

    def encode(self, keys: Tensor) -> Tensor:
        """Codes uint8 `[G, N, M]` of keys `[G, N, D]`: the nearest centroid of each subspace."""
        G, M, _, m = self.codebooks.shape
        check.tensor("keys", keys, {"G": G, "N": None, "D": M * m})
        labels = assign(_parts(keys, m), self.codebooks.flatten(0, 1))[0]
        return labels.view(G, M, keys.shape[1]).transpose(1, 2).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The keys that codes `[G, N, M]` stand for, float32 `[G, N, D]`."""
        index = codes.long().transpose(1, 2)[..., None]  # [G, M, N, 1]
        rows = self.codebooks.gather(2, index.expand(-1, -1, -1, self.codebooks.shape[3]))
        return rows.transpose(1, 2).flatten(2)

    def scores(self, queries: Tensor, codes: Tensor) -> Tensor:
        """`q·k` of queries `[G, T, D]` with what codes `[G, N, M]` stand for, float32 `[G, T, N]`.

        The sum over subspaces of the entries of a table `[G, T, M, clusters]`, computed otherwise.
        """
        return queries.float() @ self.decode(codes).mT


class Quantized:
    """A search by product quantization, trained on the keys that are added first and never again.

    subspace: coordinates of one, `m`.
    """

    def __init__(self, *, subspace: int) -> None:
        self._subspace = subspace
        self._pq: PQ | None = None

    def add(self, keys: Tensor) -> None:
        """Append keys `[G, N, D]`."""
        if self._pq is None:
            self._pq = PQ.train(keys, subspace=self._subspace)
            self._codes = self._pq.encode(keys[:, :0])
        self._codes = torch.cat([self._codes, self._pq.encode(keys)], 1)

    def truncate(self, length: int) -> None:
        """Forget the keys from `length` on; the codebooks stay."""
        self._codes = self._codes[:, :length]

    def find(self, queries: Tensor, k: int) -> Tensor:
        """Ids int64 `[H, T, k]` for queries `[H, T, D]`, each query head on its own.

        Raises ValueError where nothing was added.
        """
        if self._pq is None:
            raise ValueError("keys: got none, allowed is a search after the first `add`")
        grouped = queries.reshape(len(self._codes), -1, queries.shape[2])  # [G, H/G · T, D]
        best = top_k(self._pq.scores(grouped, self._codes), k)[1]
        return best.view(*queries.shape[:2], k)

    def bytes(self) -> dict[str, float]:
        """Bytes per key and KV head, `kept` and `scanned`; the codebooks not counted."""
        return dict.fromkeys(("kept", "scanned"), float(self._codes.shape[2]))


def _parts(keys: Tensor, subspace: int) -> Tensor:
    """Split keys `[G, N, D]` into subspaces, float32 `[G · M, N, m]`."""
    parts = keys.float().reshape(*keys.shape[:2], keys.shape[2] // subspace, subspace)
    return parts.transpose(1, 2).flatten(0, 1)

"""FAISS IVF-PQ: an inverted file of product-quantized keys.

The list of a centroid stores the quantized differences (residuals) of its keys from the centroid.

Jégou et al., Product Quantization for Nearest Neighbor Search (2011), section IV; Douze et al.,
The Faiss library (2024): `IndexIVFPQ`. Details: docs/indexes/faiss_ivfpq.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.faiss_library import in_threads
from kvindex.core import check
from kvindex.indexes.faiss_ivf import FaissIVF, FaissIVFConfig
from kvindex.ops.kmeans import assign
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

BLOCK = 1024
"""Candidates quantized at a time, where FAISS cannot reconstruct them."""


@dataclass(frozen=True)
class FaissIVFPQConfig(FaissIVFConfig):
    """Options of FAISS IVF-PQ, in addition to those of `FaissIVFConfig`.

    Args:
        subspaces: Number of subspaces into which a residual is divided (FAISS: `M`), a divisor of
            `head_dim`. None: `head_dim / 4`.
        bits: Bits of the code of a subspace, 1 to 8.
        code_iterations: Number of k-means iterations for the codebooks.
    """

    subspaces: int | None = None
    bits: int = 8
    code_iterations: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subspaces is not None:
            check.at_least("subspaces", self.subspaces, 1)
        check.at_least("code_iterations", self.code_iterations, 1)
        if check.at_least("bits", self.bits, 1) > 8:
            raise ValueError(f"bits: got {self.bits}, allowed is 1 to 8")


class FaissIVFPQ(FaissIVF):
    """Scores product-quantized keys in the lists of the nearest centroids, with FAISS.

    There is one `IndexIVFPQ` per sequence and KV head. It quantizes residuals: the difference of a
    key and its centroid. `Hits.scores` contains the inner products of the query with the decoded
    keys of the candidates, combined over the query heads that share a KV head (option `group`).

    Source: Jégou et al., Product Quantization for Nearest Neighbor Search (2011), section IV.
    """

    Config = FaissIVFPQConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        D = self.geometry.head_dim
        self._subspaces = self.config.subspaces or D // 4
        if D % self._subspaces:
            raise ValueError(
                f"subspaces: got {self._subspaces}, allowed is a divisor of head_dim = {D}"
            )

    def _trained(self, keys: Tensor, lists: int) -> dict[str, Tensor]:
        """Train centroids on the keys, and codebooks float32 `[G, M, 2^bits, m]` on the residuals.

        FAISS's product quantizer would train bitwise equal codebooks, but one after the other. This
        function trains several at the same time.
        """
        learned, points = super()._trained(keys, lists), self._points(keys)
        residuals = points - _nearest(points, learned["centroids"])
        G, n, D = residuals.shape
        M = self._subspaces
        parts = residuals.view(G, n, M, D // M).transpose(1, 2)  # [G, M, n, m]
        books = in_threads(
            self._codebook, parts.flatten(0, 1).contiguous(), torch.get_num_threads()
        )
        return {**learned, "codebooks": torch.stack(books).view(G, M, -1, D // M)}

    def _codebook(self, part: Tensor) -> Tensor:
        """Train the codebook of one subspace, `[2^bits, m]`, on its residuals `[n, m]`.

        If there are at most `2^bits` residuals, the codebook consists of the residuals.
        """
        (n, m), size = part.shape, 2**self.config.bits
        if n <= size:
            return torch.cat([part, part[:1].expand(size - n, -1)])
        means = self._faiss.Clustering(m, size)
        means.niter, means.seed = self.config.code_iterations, self.config.seed
        means.min_points_per_centroid = 1
        means.train(part.numpy(), self._faiss.IndexFlatL2(m))
        return torch.from_numpy(self._faiss.vector_to_array(means.centroids)).view(size, m)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout = super()._layout(sizes)
        if sizes.has("learned"):
            M = self._subspaces
            axes = f"B G {M} {2**self.config.bits} {self.geometry.head_dim // M}"
            layout["learned.codebooks"] = TensorSpec(axes, torch.float32)
        return layout

    def _new(self, b: int, g: int) -> Any:
        faiss, D, metric = self._faiss, self.geometry.head_dim, self._faiss.METRIC_INNER_PRODUCT
        quantizer, lists = self._quantizer(b, g)
        bits = self.config.bits
        index = faiss.IndexIVFPQ(quantizer, D, lists, self._subspaces, bits, metric)
        books = self._learned["codebooks"][b, g].flatten().cpu().numpy()
        faiss.copy_array_to_vector(books, index.pq.centroids)
        return self._ready(index)

    def _reconstructed(self, keys: Tensor, ids: Tensor) -> Tensor:
        """Quantize the keys `[B, G, C, D]` and return the decoded result.

        This computes codes again from the keys, and does not read them from FAISS.
        """
        B, G, C, _ = keys.shape
        represented = torch.empty_like(keys)
        books = self._learned["codebooks"]  # [B, G, M, 2^bits, m]
        M, _, m = books.shape[2:]
        for b in range(B):
            lists = int(self._learned["lists"][b])
            for start in range(0, C, BLOCK):
                block = keys[b, :, start : start + BLOCK]
                means = _nearest(block, self._learned["centroids"][b, :, :lists])
                parts = (block - means).view(G, -1, M, m).transpose(1, 2).flatten(0, 1)
                book = books[b].flatten(0, 1)  # [G M, 2^bits, m]
                label = assign(parts, book)[0][..., None].expand(-1, -1, m)
                coded = book.gather(1, label).view(G, M, -1, m).transpose(1, 2).flatten(-2)
                represented[b, :, start : start + BLOCK] = means + coded
        return represented

    def _token_bytes(self) -> float:
        bits: int = self._subspaces * self.config.bits
        return -(-bits // 8) + 8  # a code and its 8-byte id


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Find the centroid that has the largest inner product with each point.

    Returns the centroids, `[G, n, D]`, one for each of the `n` points.
    """
    best = (points @ centroids.mT).argmax(-1)[..., None]
    return centroids.gather(1, best.expand(-1, -1, points.shape[-1]))

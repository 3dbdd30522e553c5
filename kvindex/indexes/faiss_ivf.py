"""FAISS IVF: an inverted file. Each centroid has a list of keys, and a search scans a few lists.

Douze et al., The Faiss library (2024), section 5.1: `IndexIVFFlat`. Details:
docs/indexes/faiss_ivf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.faiss import FaissConfig, FaissIndex
from kvindex.bases.faiss_library import in_threads
from kvindex.bases.index import FIRST_APPEND
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

PER_LIST = 39
"""Minimum keys per list if `lists` is None: FAISS's k-means warns below this number."""


@dataclass(frozen=True)
class FaissIVFConfig(FaissConfig):
    """Options of FAISS IVF, in addition to those of `FaissConfig`.

    Args:
        lists: Number of centroids (FAISS: `nlist`), at most the number `n` of training keys. None:
            `4 √n`, or fewer so that a list has at least 39 training keys on average.
        probes: Number of lists that a search scans (FAISS: `nprobe`).
        iterations: Number of k-means iterations.
        seed: Seed of k-means.
    """

    lists: int | None = None
    probes: int = 64
    iterations: int = 10
    seed: int = 1234

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lists is not None:
            check.at_least("lists", self.lists, 1)
        check.at_least("probes", self.probes, 1)
        check.at_least("iterations", self.iterations, 1)
        check.seed(self.seed, bits=31)


class FaissIVF(FaissIndex):
    """Scores the keys in the lists of the nearest centroids, with FAISS.

    There is one `IndexIVFFlat` per sequence and KV head, with a float32 copy of the keys.
    `Hits.scores` contains the `q·k` of the candidates, combined over the query heads that share a
    KV head (option `group`).

    Source: Douze et al., The Faiss library (2024), section 5.1.
    """

    Config = FaissIVFConfig
    learns_from = FIRST_APPEND

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Train the centroids of each sequence on its valid keys in the first append that contains
        valid keys of this sequence.

        Returns:
            `lists`: Number of centroids of each sequence, int64 `[B]`; 0 before the training.
            `centroids`: Float32 `[B, G, L, D]`.
        """
        B, learned = len(keys), self._learned
        known = learned["lists"].tolist() if learned else [0] * B
        counts = [keys.shape[2]] * B if valid is None else valid.sum(1).tolist()
        missing = [b for b in range(B) if counts[b] and not known[b]]
        if not missing:
            return learned
        rows: list[Codes] = []
        for b in range(B):
            if b in missing:
                points = keys[b] if valid is None else keys[b][:, valid[b]]
                rows.append(self._trained(points, self._lists(counts[b])))
            else:
                rows.append({name: tensor[b] for name, tensor in learned.items()})
        return self._stacked(rows, keys.device)

    def _lists(self, count: int) -> int:
        """Return the number of centroids to train on `count` keys."""
        lists: int | None = self.config.lists
        if lists is None:
            lists = max(min(round(4 * count**0.5), count // PER_LIST), 1)
        return min(lists, count)

    def _trained(self, keys: Tensor, lists: int) -> dict[str, Tensor]:
        """Train `lists` centroids on the keys `[G, n, D]` of one sequence.

        Returns:
            `lists`: The number of centroids, int64 `[]`.
            `centroids`: Float32 `[G, lists, D]`.
        """
        faiss, D = self._faiss, self.geometry.head_dim

        def train(points: Tensor) -> Tensor:
            means = faiss.Clustering(D, lists)
            means.niter, means.seed = self.config.iterations, self.config.seed
            means.spherical, means.min_points_per_centroid = True, 1
            means.train(points.numpy(), faiss.IndexFlatIP(D))
            return torch.from_numpy(faiss.vector_to_array(means.centroids)).view(lists, D)

        centroids = in_threads(train, self._points(keys), torch.get_num_threads())
        return {"lists": torch.tensor(lists), "centroids": torch.stack(centroids)}

    def _points(self, keys: Tensor) -> Tensor:
        return keys.to("cpu", torch.float32).contiguous()

    def _stacked(self, rows: list[Codes], device: torch.device) -> Codes:
        """Stack the learned tensors of all sequences.

        If a sequence has fewer centroids than others, zeros are appended.
        """
        full = next(row for row in rows if row and int(row["lists"]))
        most = max(row["centroids"].shape[1] for row in rows if row)
        batch: dict[str, list[Tensor]] = {name: [] for name in full}
        for row in rows:
            for name, like in full.items():
                tensor = row[name] if row else torch.zeros_like(like)
                if name == "centroids":
                    tensor = torch.nn.functional.pad(tensor, (0, 0, 0, most - tensor.shape[1]))
                batch[name].append(tensor.to(device))
        return {name: torch.stack(tensors) for name, tensors in batch.items()}

    def _layout(self, sizes: StateSizes) -> Layout:
        layout = super()._layout(sizes)
        if sizes.has("learned"):
            layout["learned.lists"] = TensorSpec(
                "B",
                torch.int64,
                least=0,
                allowed="at most the number of learned.centroids, and 0 only without a valid token",
                rule=lambda state: _in_lists(state, sizes.counts),
            )
            layout["learned.centroids"] = TensorSpec("B G L D", torch.float32)
        return layout

    def _quantizer(self, b: int, g: int) -> tuple[Any, int]:
        """Return a FAISS index with the centroids of sequence `b` and KV head `g`.

        The second result is the number of centroids.
        """
        quantizer = self._faiss.IndexFlatIP(self.geometry.head_dim)
        lists = int(self._learned["lists"][b])
        quantizer.add(self._learned["centroids"][b, g, :lists].cpu().numpy())
        return quantizer, lists

    def _new(self, b: int, g: int) -> Any:
        quantizer, lists = self._quantizer(b, g)
        D, metric = self.geometry.head_dim, self._faiss.METRIC_INNER_PRODUCT
        return self._ready(self._faiss.IndexIVFFlat(quantizer, D, lists, metric))

    def _ready(self, faiss_index: Any) -> Any:
        faiss_index.is_trained = True
        faiss_index.nprobe = min(self.config.probes, faiss_index.nlist)
        return faiss_index

    def _token_bytes(self) -> float:
        return 4 * self.geometry.head_dim + 8  # a float32 key and its 8-byte id

    def _scanned_bytes(self) -> float:
        """Return the bytes that a query head's search reads, per stored key.

        All lists are assumed to have equally many keys.
        """
        if not self._learned:
            return 0.0
        lists, tokens = self._learned["lists"].clamp_min(1), self.counts.clamp_min(1)
        fraction = (self.config.probes / lists).clamp_max(1).mean().item()
        centroids = (4 * self.geometry.head_dim * lists.cpu() / tokens).mean().item()
        scanned: float = fraction * self._token_bytes() + centroids
        return scanned


def _in_lists(state: Mapping[str, Tensor], counts: Tensor | None) -> bool:
    lists, most = state["learned.lists"].cpu(), state["learned.centroids"].shape[2]
    needed = 0 if counts is None else (counts > 0).long()
    return bool(((lists >= needed) & (lists <= most)).all())

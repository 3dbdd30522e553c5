"""FAISS HNSW: search of a hierarchical small-world graph over the keys.

Malkov and Yashunin, Efficient and Robust Approximate Nearest Neighbor Search Using Hierarchical
Navigable Small World Graphs (2016); FAISS: `IndexHNSWFlat`. Details: docs/indexes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.faiss import FaissConfig, FaissIndex
from kvindex.core import check


@dataclass(frozen=True)
class FaissHNSWConfig(FaissConfig):
    """As `FaissConfig`, without a GPU (FAISS has no HNSW there), and:

    neighbors: links of a key, FAISS's `M` (on the lowest level twice as many).
    ef_construction: size of the candidate list while a key is linked.
    ef_search: size of the candidate list of a search; never below the rows it returns.
    """

    neighbors: int = 32
    ef_construction: int = 40
    ef_search: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of("where", self.where, ("cpu",))
        check.at_least("neighbors", self.neighbors, 2)
        check.at_least("ef_construction", self.ef_construction, 1)
        check.at_least("ef_search", self.ef_search, 1)


class FaissHNSW(FaissIndex):
    """`IndexHNSWFlat` per row and KV head: a float32 copy of the keys, and their links.

    Keys are linked one after the other, so that the graph does not depend on the appends.
    Hits' scores: what `group.agree` returns for `q·k` of the heads' candidates.
    """

    Config = FaissHNSWConfig
    removes: ClassVar = False

    def _new(self, b: int, g: int) -> Any:
        faiss, config = self._faiss, self.config
        D, metric = self.geometry.head_dim, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexHNSWFlat(D, config.neighbors, metric)
        index.hnsw.efConstruction = config.ef_construction
        return index

    def _add(self, faiss_index: Any, keys: Tensor) -> None:
        for i in range(len(keys)):
            faiss_index.add_c(1, self._floats(keys[i]))

    def _candidate_count(self, k: int) -> int:
        """FAISS's whole candidate list, which costs nothing more."""
        least: int = self.config.ef_search
        return max(super()._candidate_count(k), least)

    def _query_faiss(
        self, faiss_index: Any, queries: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None]:
        # FAISS's walk stops by efSearch, however many rows are asked for
        faiss_index.hnsw.efSearch = max(self.config.ef_search, count)
        return super()._query_faiss(faiss_index, queries, count)

    def _token_bytes(self) -> float:
        """A key, its level, the offset of its links, links of the lowest level, and above.

        A key has another `M` links with a chance of `1/M`, once more with `1/M²`, …: as expected.
        """
        M: int = self.config.neighbors
        return 4 * self.geometry.head_dim + 4 + 8 + 4 * (2 * M + M / (M - 1))

    def _scanned_bytes(self) -> float:
        """Keys compared and links read per query head, measured with some of the first keys."""
        row = next((row for row in self._faiss_indexes if row[0]), None)
        if row is None:
            return 0.0
        index, stats = row[0], self._faiss.cvar.hnsw_stats
        count = min(index.ntotal, 16)
        before = stats.ndis, stats.nhops
        queries = torch.from_numpy(index.reconstruct_n(0, count))
        self._query_faiss(index, queries, min(self.config.ef_search, index.ntotal))
        compared, hops = stats.ndis - before[0], stats.nhops - before[1]
        links = 4 * 2 * self.config.neighbors
        read = compared * 4 * self.geometry.head_dim + hops * links
        bytes_per_key: float = read / count / index.ntotal
        return bytes_per_key

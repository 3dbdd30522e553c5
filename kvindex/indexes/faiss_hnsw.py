"""FAISS HNSW: searches a hierarchical navigable small-world graph of the keys.

Malkov and Yashunin, Efficient and Robust Approximate Nearest Neighbor Search Using Hierarchical
Navigable Small World Graphs (2016); FAISS's `IndexHNSWFlat`. Details:
docs/indexes/faiss_hnsw.md.
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
    """Options of FAISS HNSW, in addition to those of `FaissConfig`.

    Args:
        where: Only "cpu" is supported, because FAISS has no HNSW on a GPU.
        neighbors: Links per key on each level of the graph (FAISS: `M`). The lowest level has twice
            as many.
        ef_construction: Size of the candidate list when a key is added (FAISS: `efConstruction`).
        ef_search: Minimum size of the candidate list of a search (FAISS: `efSearch`). It is at
            least the number of requested rows.
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
    """Searches a graph over the keys, with FAISS.

    There is one `IndexHNSWFlat` per sequence and KV head, with a float32 copy of the keys. Keys are
    added one at a time, so that the graph does not depend on how the keys were divided into
    appends. `Hits.scores` contains the `q·k` of the candidates, combined over the query heads that
    share a KV head (option `group`).

    Source: Malkov and Yashunin, HNSW (2016).
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
        """Return how many keys to request from FAISS: at least `ef_search`.

        A smaller request would not be faster, because FAISS's candidate list has `ef_search` keys.
        """
        least: int = self.config.ef_search
        return max(super()._candidate_count(k), least)

    def _query_faiss(
        self, faiss_index: Any, queries: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None]:
        # The end of FAISS's graph search depends on efSearch, not on `count`. So efSearch must be
        # at least `count`.
        faiss_index.hnsw.efSearch = max(self.config.ef_search, count)
        return super()._query_faiss(faiss_index, queries, count)

    def _token_bytes(self) -> float:
        """Return the bytes that FAISS stores per key: the key, its level, an offset, and its links.

        A key has `2 M` links on the lowest level of the graph. It is on the next level with
        probability `1/M`, on the level above that with probability `1/M²`, and so on, and has `M`
        links on each of these levels. The result contains the expected number of these links.
        """
        M: int = self.config.neighbors
        return 4 * self.geometry.head_dim + 4 + 8 + 4 * (2 * M + M / (M - 1))

    def _scanned_bytes(self) -> float:
        """Return how many bytes a search reads for one query head, divided by the number of keys.

        These are bytes of keys and links. They are measured in up to 16 test searches.
        """
        self._synchronize()  # after a copy, the graphs must be built again
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

"""FAISS flat: brute-force search with FAISS's `IndexFlatIP`.

The best keys of each query head are candidates. The candidates of all query heads that share a KV
head are then ranked in one list.

Douze et al., The Faiss library (2024), section 4. Details: docs/indexes/faiss_flat.md.
"""

from __future__ import annotations

from typing import Any

from kvindex.bases.faiss import FaissConfig, FaissIndex


class FaissFlat(FaissIndex):
    """Scores every key with FAISS.

    There is one `IndexFlatIP` per sequence and KV head, with a float32 copy of the keys.
    `Hits.scores` contains the `q·k` of the candidates, combined over the query heads that share a
    KV head (option `group`).

    Source: Douze et al., The Faiss library (2024), section 4.
    """

    Config = FaissConfig

    def _new(self, b: int, g: int) -> Any:
        return self._faiss.IndexFlatIP(self.geometry.head_dim)

    def _token_bytes(self) -> float:
        return 4 * self.geometry.head_dim

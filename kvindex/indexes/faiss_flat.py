"""FAISS flat: brute-force search with `IndexFlatIP`, each query head's best keys as candidates.

Douze et al., The Faiss library (2024), section 4: `IndexFlatIP`. Details: docs/indexes.
"""

from __future__ import annotations

from typing import Any

from kvindex.bases.faiss import FaissConfig, FaissIndex


class FaissFlat(FaissIndex):
    """`IndexFlatIP` per row and KV head: a float32 copy of the keys.

    Hits' scores: what `group.agree` returns for `q·k` of the heads' candidates.
    """

    Config = FaissConfig

    def _new(self, b: int, g: int) -> Any:
        return self._faiss.IndexFlatIP(self.geometry.head_dim)

    def _token_bytes(self) -> float:
        return 4 * self.geometry.head_dim

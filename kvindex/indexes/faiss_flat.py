"""FAISS flat: brute-force search by `IndexFlatIP`; each query head's best keys are candidates.

Douze et al., The Faiss library (2024), section 4. Details: docs/indexes/faiss_flat.md.
"""

from __future__ import annotations

from typing import Any

from kvindex.bases.faiss import FaissConfig, FaissIndex


class FaissFlat(FaissIndex):
    """One `IndexFlatIP` per sequence and KV head, which stores a float32 copy of the keys.

    `Hits.scores` contains the scores that the group policy computes from `q·k`, for the candidates
    of all heads.

    Source: Douze et al., The Faiss library (2024), section 4.
    """

    Config = FaissConfig

    def _new(self, b: int, g: int) -> Any:
        return self._faiss.IndexFlatIP(self.geometry.head_dim)

    def _token_bytes(self) -> float:
        return 4 * self.geometry.head_dim

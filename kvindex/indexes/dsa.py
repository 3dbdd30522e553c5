"""DSA: the lightning indexer of DeepSeek Sparse Attention, whose small heads choose rows.

DeepSeek-AI, DeepSeek-V3.2 (arXiv 2512.02556, section 2.1, equation 1). The keys and queries of
this index are not those of attention, but those that the trained model computes for its indexer
(docs/indexes/dsa.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import group
from kvindex.storage.codecs import CODES, rotated, scaled
from kvindex.storage.layout import Held, Layout, TensorSpec

BLOCK = 16_384
"""Tokens scored at a time; bounds the memory for float32 keys, not the result."""

PRODUCTS = 2**24
"""Products of heads, queries and keys at a time (64 MiB); bounds memory, not the result."""


@dataclass(frozen=True)
class DSAConfig:
    """Options of DSA.

    Args:
        key_codec: "fp8" (published: rotated, one byte per number and a scale per key) or "plain".
    """

    key_codec: str = "fp8"

    def __post_init__(self) -> None:
        check.one_of("key_codec", self.key_codec, ("fp8", "plain"))


class DSA(BaseIndex):
    """Ranks all keys by `I_s = Σ_j w_j ReLU(q_j · k_s)` over the heads of a group.

    `search` uses weight 1 for all heads; to use other weights of at least 0, multiply the queries
    with them. `choose` takes weights of either sign. `Hits.scores` contains `I`, without a scale.

    Source: DeepSeek-AI, DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """

    Config = DSAConfig

    # Keys

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        if self.config.key_codec == "plain":
            return {"keys": keys}
        codes, scales = scaled(rotated(keys.float()), self.config.key_codec)
        return {"keys": codes, "scales": scales}

    def _layout(self, held: Held) -> Layout:
        if not held.length:
            return {}
        if self.config.key_codec == "plain":
            return {"codes.keys": TensorSpec("B G N D", self.geometry.dtype)}
        keys = TensorSpec(
            "B G N D",
            torch.uint8,
            allowed="finite numbers of e4m3",
            rule=lambda state: not bool((state["codes.keys"] & 127 == 127).any()),
        )
        return {"codes.keys": keys, "codes.scales": TensorSpec("B G N 1", torch.float32, least=0)}

    def _keys(self, start: int) -> Tensor:
        """Return keys of the block at `start`, float32 `[B, G, n, D]`, rotated if encoded."""
        keys = self._codes["keys"][:, :, start : start + BLOCK]
        if self.config.key_codec == "plain":
            return keys.float()
        scales = self._codes["scales"][:, :, start : start + BLOCK]
        return keys.view(CODES[self.config.key_codec][0]).float() * scales

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        folded = group.fold(queries, self.geometry.kv_heads, "mean_share")[:, :, :, None]
        scores = self._scores(folded, torch.ones_like(folded[..., 0]))[:, :, 0]
        best, ids = self.ops.select.top_k(scores, k)
        return Hits(ids, best)

    def choose(self, queries: Tensor, weights: Tensor, *, k: int) -> Tensor:
        """Choose the best `k` rows for each of the newest `T` tokens among the tokens up to it.

        Args:
            queries: `[B, H, T, D]`.
            weights: Weights of the heads, float32 `[B, H, T]`.
            k: Rows per token, at least 1.

        Returns:
            Token ids int64 `[B, G, T, K]`, best first, -1 where there are fewer. Pass them as `ids`
            to `AttentionLayer.step`.

        Raises:
            ValueError: A shape, dtype or device does not fit, a number is not finite, there are
                fewer than `T` tokens, or `k` is not positive.
            TypeError: An argument is not a tensor.
        """
        g = self.geometry
        check.wanted_rows(k)
        shape = {"B": self._batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        B, H, T, D = queries.shape
        if not 1 <= T <= len(self):
            raise ValueError(f"queries.shape[2] (tokens): got {T}, allowed is 1 to {len(self)}")
        check.tensor("weights", weights, {"B": B, "H": H, "T": T}, torch.float32, g.device)
        self._check_finite("queries", queries)
        self._check_finite("weights", weights)
        folded = queries.detach().float().reshape(B, g.kv_heads, -1, T, D)
        weights = weights.detach().reshape(B, g.kv_heads, -1, T)
        own = torch.arange(len(self) - T, len(self), device=g.device)
        step = max(PRODUCTS // max(B * H * min(BLOCK, len(self)), 1), 1)
        parts = []
        for start in range(0, T, step):
            cut = slice(start, start + step)
            scores = self._scores(folded[:, :, :, cut], weights[..., cut])
            later = torch.arange(len(self), device=g.device) > own[cut, None]
            best = self.ops.select.top_k(scores.masked_fill(later, float("-inf")), k)
            parts.append(best[1])
        return torch.cat(parts, dim=2)

    def _scores(self, queries: Tensor, weights: Tensor) -> Tensor:
        """Return the indexer's score `I` of every token, float32 `[B, G, T, N]`, `-inf` if invalid.

        Args:
            queries: Float32 `[B, G, g, T, D]`.
            weights: Float32 `[B, G, g, T]`.
        """
        if self.config.key_codec != "plain":
            queries = rotated(queries)
        parts = []
        for start in range(0, len(self), BLOCK):
            products = (queries @ self._keys(start)[:, :, None].mT).relu()
            parts.append((products * weights[..., None]).sum(2))
        scores = torch.cat(parts, dim=-1)
        if self.valid is None:
            return scores
        return scores.masked_fill(~self.valid[:, None, None], float("-inf"))

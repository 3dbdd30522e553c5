"""DSA: the lightning indexer of DeepSeek Sparse Attention, which ranks tokens with small heads.

The keys and queries of this index are not the keys and queries of attention. The model is trained
to compute separate, smaller keys and queries for its indexer (docs/indexes/dsa.md).

DeepSeek-AI, DeepSeek-V3.2 (arXiv 2512.02556, section 2.1, equation 1).
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
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

BLOCK = 16_384
"""Tokens scored at a time; bounds the memory for float32 keys, not the result."""

PRODUCTS = 2**24
"""Products of heads, queries and keys at a time (64 MiB); bounds memory, not the result."""


@dataclass(frozen=True)
class DSAConfig:
    """Options of DSA.

    Args:
        key_codec: How keys are stored. "fp8" (published): rotated, one byte per coordinate, and a
            scale per key. "plain": in the layer's dtype.
    """

    key_codec: str = "fp8"

    def __post_init__(self) -> None:
        check.one_of("key_codec", self.key_codec, ("fp8", "plain"))


class DSA(BaseIndex):
    """Ranks each key `k_s` by `I_s = Σ_j w_j ReLU(q_j · k_s)`, a sum over the query heads `j`.

    `search` uses the weight `w_j = 1` for all heads. For other weights that are not negative,
    multiply the queries by the weights. `choose` has an argument for weights, which may also be
    negative. `Hits.scores` contains `I_s`.

    Source: DeepSeek-AI, DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """

    Config = DSAConfig

    # Keys

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        if self.config.key_codec == "plain":
            return {"keys": keys}
        codes, scales = scaled(rotated(keys.float()), self.config.key_codec)
        return {"keys": codes, "scales": scales}

    def _layout(self, sizes: StateSizes) -> Layout:
        if not sizes.length:
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
        """Decode the keys of `BLOCK` tokens from `start` on, float32 `[B, G, n, D]`.

        With `key_codec="fp8"` the keys are rotated, and queries must be rotated in the same way.
        """
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
        """Select `k` rows for each of the newest `T` tokens, from this token and all earlier ones.

        Args:
            queries: Queries of the newest `T` tokens, `[B, H, T, D]`.
            weights: Weights of the heads, float32 `[B, H, T]`.
            k: Rows to select per token, at least 1.

        Returns:
            Token ids int64 `[B, G, T, k]`, best first, padded with -1. Pass them as `ids` to
            `AttentionLayer.step`.

        Raises:
            ValueError: A shape, dtype or device does not fit, a number is NaN or infinite, the
                index has fewer than `T` tokens, or `k` is not positive.
            TypeError: `queries` or `weights` is not a tensor.
        """
        g = self.geometry
        check.wanted_rows(k)
        shape = {"B": self._batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        B, H, T, D = queries.shape
        if not 1 <= T <= len(self):
            stored = len(self)
            raise ValueError(
                f"queries.shape[2] (tokens): got {T}, allowed is 1 to {stored}, the number of "
                "tokens in the index"
            )
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
        """Compute the indexer's score of every token for each of `T` queries.

        Args:
            queries: Float32 `[B, G, g, T, D]`.
            weights: Weights of the heads, float32 `[B, G, g, T]`.

        Returns:
            Float32 `[B, G, T, N]`; `-inf` for invalid tokens.
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

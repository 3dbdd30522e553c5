"""Double Sparsity: ranks all keys by a few of their coordinates, which are stored in 4 bits each.

The paper calls these coordinates label channels, and chooses them by calibration.

Yang et al., Post-Training Sparse Attention with Double Sparsity (arXiv 2408.07092, section 3).
docs/indexes/doublesparsity.md lists the differences from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import are_valid, joined_flags
from kvindex.bases.index import FIRST_APPEND
from kvindex.bases.prompt_queries import PromptQueries, PromptQueriesIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec
from kvindex.storage.quantize import BITS, code_bytes, dequantize, groups, quantize


@dataclass(frozen=True)
class DoubleSparsityConfig:
    """Options of Double Sparsity.

    Args:
        channels: Number of coordinates that are stored per key, at most `head_dim`.
        bits: Bits per stored coordinate: 2, 4 (published) or 8. None stores coordinates in the
            layer's dtype.
        queries: Number of queries, spread evenly over the prompt, by which the coordinates are
            chosen.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    channels: int = 16
    bits: int | None = 4
    queries: int = 64
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("channels", self.channels, 1)
        check.at_least("queries", self.queries, 1)
        if self.bits is not None and self.bits not in BITS:
            raise ValueError(f"bits: got {self.bits!r}, allowed is one of {list(BITS)} or None")
        check.one_of("group", self.group, group.POLICIES)


class DoubleSparsity(PromptQueriesIndex):
    """Ranks all keys by the inner product `Σ_j q_j k_j` over a few channels `j` of each KV head.

    A channel is a coordinate of keys and queries. Channels are chosen once for each sequence, at
    the first append that contains a valid token of the sequence. The chosen channels have the
    largest `mean |q_j| · mean |k_j|`, summed over the query heads of the KV head. If no query was
    observed before, they have the largest `mean |k_j|`.

    The learned tensors are `channels`, int64 `[B, G, R]`, and `known`, bool `[B]`, which is True
    for sequences whose channels are chosen. `Hits.scores` contains the estimated `q·k`, combined
    over the query heads that share a KV head (option `group`).

    Source: Yang et al., Double Sparsity (arXiv 2408.07092), section 3.
    """

    Config = DoubleSparsityConfig
    learns_from = FIRST_APPEND

    # Calibration

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store a sample of the prompt's queries, `[B, H, T, D]`.

        The label channels are chosen from the keys and this sample. Queries that are observed after
        `end_prompt` are ignored. NaN and infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if not self._prompt_ended and len(positions):
            self._observed = PromptQueries.of(
                self._observed, queries, positions, most=self.config.queries, choice="evenly"
            )

    def end_prompt(self) -> None:
        """End the prompt: queries that are observed later do not affect the choice of channels."""
        self._prompt_ended = True

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        super()._learn(keys, valid)  # checks the batch
        B, _, N, _ = keys.shape
        seen = valid.any(1) if valid is not None else keys.new_full((B,), N > 0, dtype=torch.bool)
        sizes = keys.double().abs().sum(2)  # float64, so that padding does not change a sum
        flags = joined_flags(self.valid, len(self), keys, valid)
        products = (sizes * self._activity(flags, B)).float()
        channels = self.ops.select.top_k(products, min(self.config.channels, keys.shape[-1]))[1]
        if not self._learned:
            return {"channels": channels, "known": seen}
        known = self._learned["known"]
        kept = torch.where(known[:, None, None], self._learned["channels"], channels)
        return {"channels": kept, "known": known | seen}

    def _activity(self, valid: Tensor | None, batch: int) -> Tensor:
        """Sum the absolute values of each coordinate over the observed queries of each KV head.

        Args:
            valid: Mask of valid tokens, bool `[B, N]`, or None if all are valid.
            batch: Number of sequences `B`.

        Returns:
            Float64 `[B, G, D]`; ones if no query was observed.
        """
        g, observed = self.geometry, self._observed
        ones = torch.ones((batch, g.kv_heads, g.head_dim), dtype=torch.float64, device=g.device)
        if observed is None:
            return ones
        counted = are_valid(observed.queries, observed.positions, valid)
        sizes = observed.queries.double().abs() * counted[:, None, :, None]
        total = sizes.sum(2).reshape(batch, g.kv_heads, -1, g.head_dim).sum(2)
        return torch.where(total.any(-1, keepdim=True), total, ones)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout, g, bits = super()._layout(sizes), self.geometry, self.config.bits
        count = min(self.config.channels, g.head_dim)
        if sizes.length and bits is None:
            layout["codes.labels"] = TensorSpec(f"B G N {count}", g.dtype)
        elif sizes.length and bits is not None:
            layout["codes.labels"] = TensorSpec(f"B G N {code_bytes(count, bits)}", torch.uint8)
            layout["codes.scales"] = TensorSpec(f"B G N {groups(count)[0]} 2", torch.bfloat16)
        if sizes.length or sizes.has("learned"):
            channels = TensorSpec(f"B G {count}", torch.int64, least=0, most=g.head_dim - 1)
            layout["learned.channels"] = channels
            layout["learned.known"] = TensorSpec("B", torch.bool)
        return layout

    # Labels

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        channels = learned["channels"][:, :, None].expand(*keys.shape[:3], -1)
        labels = keys.gather(-1, channels)
        if self.config.bits is None:
            return {"labels": labels}
        codes, scales = quantize(labels, self.config.bits)
        return {"labels": codes, "scales": scales}

    def _labels(self) -> Tensor:
        """Decode the stored coordinates of all keys, float32 `[B, G, N, R]`."""
        labels, bits = self._codes["labels"], self.config.bits
        if bits is None:
            return labels.float()
        count = self._learned["channels"].shape[-1]
        return dequantize(labels, self._codes["scales"], count, bits)

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        folded = group.fold(queries, g.kv_heads, policy)
        channels = self._learned["channels"][:, :, None].expand(*folded.shape[:3], -1)
        estimates = folded.gather(-1, channels) @ self._labels().mT
        if self.valid is not None:
            estimates = estimates.masked_fill(~self.valid[:, None, None], float("-inf"))
        agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        scores, ids = self.ops.select.top_k(agreed, k)
        return Hits(ids, scores)

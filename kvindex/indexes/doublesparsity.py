"""Double Sparsity: ranks keys by a few of their coordinates, the label channels, stored in 4 bits.

Yang et al., Post-Training Sparse Attention with Double Sparsity (arXiv 2408.07092, section 3).
Calibration chooses the channels. docs/indexes/doublesparsity.md lists the differences from the
published code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.eviction import are_valid, joined_flags
from kvindex.bases.prompt_queries import PromptQueries, PromptQueriesIndex
from kvindex.core import check
from kvindex.core.protocol import Codes, Hits
from kvindex.ops import group
from kvindex.storage.layout import Held, Layout, TensorSpec
from kvindex.storage.quantize import BITS, code_bytes, dequantize, groups, quantize


@dataclass(frozen=True)
class DoubleSparsityConfig:
    """Options of Double Sparsity.

    Args:
        channels: Label channels per key; all channels if `head_dim` is smaller.
        bits: Bits per label: 2, 4 (published) or 8. None stores labels in the layer's dtype.
        queries: Number of the prompt's queries, evenly spread, that calibrate the channels.
        group: How the query heads of a group agree (`kvindex.ops.group`).
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
    """Ranks all keys by `Σ_{j in channels} q_j k_j`, with channels chosen for each KV head.

    Each sequence learns its channels once, from the first append that contains a valid token of it.
    `channels`, int64 `[B, G, R]`, are those with the largest `mean |q_j| · mean |k_j|`, summed over
    the heads of the group. If no query was observed before, the largest `mean |k_j|` decides.
    `known`, bool `[B]`, flags the sequences that have learned their channels. `Hits.scores`
    contains the scores that the group policy computes from the estimated `q·k`.

    Source: Yang et al., Double Sparsity (arXiv 2408.07092), section 3.
    """

    Config = DoubleSparsityConfig

    # Calibration

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Keep a sample of the prompt's queries `[B, H, T, D]` to calibrate the channels.

        Queries after `end_prompt` are ignored. Numbers that are not finite count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if not self._prompt_ended and len(positions):
            self._observed = PromptQueries.of(
                self._observed, queries, positions, most=self.config.queries, choice="evenly"
            )

    def end_prompt(self) -> None:
        """End the prompt: later queries do not calibrate."""
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
        """Return the summed absolute coordinates of the observed queries, float64 `[B, G, D]`.

        Without observed queries, all entries are one. `valid`, bool `[B, N]` or None, flags the
        valid tokens.
        """
        g, observed = self.geometry, self._observed
        ones = torch.ones((batch, g.kv_heads, g.head_dim), dtype=torch.float64, device=g.device)
        if observed is None:
            return ones
        counted = are_valid(observed.queries, observed.positions, valid)
        sizes = observed.queries.double().abs() * counted[:, None, :, None]
        total = sizes.sum(2).reshape(batch, g.kv_heads, -1, g.head_dim).sum(2)
        return torch.where(total.any(-1, keepdim=True), total, ones)

    def _layout(self, held: Held) -> Layout:
        layout, g, bits = super()._layout(held), self.geometry, self.config.bits
        count = min(self.config.channels, g.head_dim)
        if held.length and bits is None:
            layout["codes.labels"] = TensorSpec(f"B G N {count}", g.dtype)
        elif held.length and bits is not None:
            layout["codes.labels"] = TensorSpec(f"B G N {code_bytes(count, bits)}", torch.uint8)
            layout["codes.scales"] = TensorSpec(f"B G N {groups(count)[0]} 2", torch.bfloat16)
        if held.length or held.has("learned"):
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
        """Return the labels as float32 `[B, G, N, R]`."""
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

"""LOCKS: selects pages of tokens by the estimated attention weights of their keys.

The estimates are computed from a low-rank approximation of the keys of each page.

LOCKS: Page-Local Compact Key Summaries for efficient long-context decoding (documentation of the
package locks-kv 0.1.4). The code here was written from that text; docs/indexes/locks.md lists the
differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.pages import PagedIndex
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.ops import group
from kvindex.storage.layout import Layout, TensorSpec
from kvindex.storage.quantize import code_bytes, dequantize, groups, quantize

PAGES = 1024
"""Pages of a head that are scored at a time; bounds memory, not the result."""

FACTORIZED = 4096
"""Pages of all heads and sequences that are factorized at a time. On a GPU, `torch.linalg.eigh`
allocates about 0.6 MB for each of them."""

NOTHING = 1e-12
"""Directions with less than this fraction of a page's sum of squares are rounding errors."""

BITS = {"basis": 4, "coefficients": 8, "center": 8}
"""Bits per number of each part of a summary (published)."""


@dataclass(frozen=True)
class LocksConfig:
    """Options of LOCKS.

    Args:
        page: Tokens per page (published: 16).
        rank: Rank of the approximation of a page's keys (published: 8).
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 16
    rank: int = 8
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.at_least("rank", self.rank, 1)
        check.one_of("group", self.group, group.POLICIES)


class Locks(PagedIndex):
    """Selects whole pages by the mean of `exp(scale · q·k)` over a page's approximated keys `k`.

    `Hits.scores` contains the logarithms of these means, combined over the query heads that share a
    KV head (option `group`). With `group="mean_share"`, the score of a page corresponds to the
    attention weight that its approximated keys would receive.

    Source: LOCKS (documentation of the package locks-kv 0.1.4).
    """

    Config = LocksConfig

    @property
    def _rank(self) -> int:
        return min(int(self.config.rank), int(self.config.page), self.geometry.head_dim)

    # Summaries

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        """Approximate the keys of each page (`factors`), and quantize the three resulting tensors.

        The tensors are `basis` `[B, G, pages, r, D]`, `coefficients` `[B, G, pages, r, P]` and
        `center` `[B, G, pages, D]`. The result contains the codes and scales of each tensor.
        """
        pages = max(1, FACTORIZED // max(1, keys.shape[0] * keys.shape[1]))
        parts = zip(torch.split(keys, pages, 2), torch.split(present, pages, 2), strict=True)
        made = [_quantized(factors(*part, self._rank)) for part in parts]
        return {name: torch.cat([codes[name] for codes in made], dim=2) for name in made[0]}

    def _rebuilt(self, name: str, pages: slice, count: int) -> Tensor:
        """Dequantize the tensor `name` ("basis", "coefficients" or "center") of some pages.

        The result is float32 `[B, G, pages, …, count]`.
        """
        codes, scales = self._codes[name], self._codes[f"{name}_scales"]
        return dequantize(codes[:, :, pages], scales[:, :, pages], count, BITS[name])

    # Scores

    def _page_layout(self, pages: str) -> Layout:
        D, r, P = self.geometry.head_dim, self._rank, int(self.config.page)
        layout, parts = {}, (("basis", f" {r}", D), ("coefficients", f" {r}", P), ("center", "", D))
        for name, axes, count in parts:
            codes, scales = code_bytes(count, BITS[name]), f"{groups(count)[0]} 2"
            layout[f"codes.{name}"] = TensorSpec(f"B G {pages}{axes} {codes}", torch.uint8)
            layout[f"codes.{name}_scales"] = TensorSpec(
                f"B G {pages}{axes} {scales}", torch.bfloat16
            )
        return layout

    def _page_scores(self, queries: Tensor) -> Tensor:
        pages = self._codes["center"].shape[2]
        blocks = (slice(start, start + PAGES) for start in range(0, pages, PAGES))
        return torch.cat([self._mean_logits(queries, block) for block in blocks], dim=-1)

    def _mean_logits(self, queries: Tensor, pages: slice) -> Tensor:
        """Compute `log(mean exp(scale · q·k)) / scale` over the keys of each page.

        The result is float32 `[B, G, g, pages]`.
        """
        g, P = self.geometry, self.config.page
        center, basis = (self._rebuilt(name, pages, g.head_dim) for name in ("center", "basis"))
        coefficients = self._rebuilt("coefficients", pages, P)
        along = torch.einsum("bghd,bgprd->bghpr", queries, basis)
        products = torch.einsum("bghpr,bgprt->bghpt", along, coefficients)
        products = products + (queries @ center.mT)[..., None]
        ranks = torch.arange(pages.start * P, (pages.start + center.shape[2]) * P, device=g.device)
        real = ranks < self.counts.to(g.device)[:, None]  # [B, pages · P]
        real = real.reshape(len(real), 1, 1, -1, P)
        products = products.masked_fill(~real, float("-inf"))
        best = products.amax(-1).clamp_min(torch.finfo(torch.float32).min)
        terms = ((products - best[..., None]) * g.scale).exp().sum(-1)
        return best + (terms / real.sum(-1).clamp_min(1)).log() / g.scale


def factors(keys: Tensor, present: Tensor, rank: int) -> dict[str, Tensor]:
    """Approximate the keys of each page by `center + Σ_r coefficients_r basis_r`.

    No approximation of the same rank has a smaller squared error (Eckart and Young). The
    computation is in float64.

    Args:
        keys: Keys of the pages, `[B, G, pages, P, D]`.
        present: True for positions that have a key, bool `[B, 1, pages, P, 1]`.
        rank: Maximum rank `r` of the approximation.

    Returns:
        `basis`: `[B, G, pages, r, D]`, orthonormal vectors. If fewer than `r` vectors suffice, the
        others are zero.
        `coefficients`: `[B, G, pages, r, P]`.
        `center`: Mean key of each page, `[B, G, pages, D]`.
    """
    real = keys.double().masked_fill(~present, 0)
    center = real.sum(3) / present.sum(3).clamp_min(1)
    residuals = (real - center[:, :, :, None]).masked_fill(~present, 0)
    squares, vectors = torch.linalg.eigh(residuals @ residuals.mT)  # ascending
    squares, vectors = squares[..., -rank:, None], vectors[..., -rank:].mT
    known = squares > NOTHING * real.square().sum((-2, -1))[..., None, None]
    lengths = squares.clamp_min(0).sqrt()
    place = vectors.abs().argmax(-1, keepdim=True)
    vectors = vectors * vectors.gather(-1, place).sign()  # fix the sign of each vector
    basis = torch.where(known, vectors @ residuals / lengths, 0)
    return {
        "basis": basis,
        "coefficients": torch.where(known, vectors * lengths, 0),
        "center": center,
    }


def _quantized(parts: dict[str, Tensor]) -> Codes:
    """Quantize each of the tensors `parts`, and return their codes and scales."""
    codes = {}
    for name, part in parts.items():
        codes[name], codes[f"{name}_scales"] = quantize(part, BITS[name])
    return codes

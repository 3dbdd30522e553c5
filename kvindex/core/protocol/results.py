"""What the methods of an index return: codes, hits, rows, attention outputs, and row placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import pad

Codes: TypeAlias = Mapping[str, Tensor]
"""Codes of tokens on the compute device, by name: tensors `[B, G, N, ...]`."""

UNUSED = -1
"""The id of an unused slot."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The rows that a search selected, best first.

    Args:
        ids: Int64 `[B, G, K]`. -1 marks an unused slot, and an id below -1 belongs to a row that is
            not a token, such as a summary of several tokens.
        scores: Float32 `[B, G, K]`, descending: one score for the group of query heads that share a
            KV head.
        log_weight: Float32 `[B, H, K]`, added to the attention logits before the softmax, or None
            for zeros.
        coverage: Float32 `[B, H]`, for each query head an estimate of the fraction of attention
            weight, over all tokens in the index, that the selected rows have. None if not
            requested.
    """

    ids: Tensor
    scores: Tensor
    log_weight: Tensor | None = None
    coverage: Tensor | None = None

    def narrowed(self, k: int) -> Hits:
        """Return the first `k` slots of each KV head. The other slots must be unused."""
        weight = self.log_weight
        return Hits(
            self.ids[..., :k],
            self.scores[..., :k],
            None if weight is None else weight[..., :k],
            self.coverage,
        )

    def widened(self, k: int) -> Hits:
        """Return the same hits, padded with unused slots to `k` slots per KV head."""
        more = (0, k - self.ids.shape[-1])
        weight = self.log_weight
        return Hits(
            pad(self.ids, more, value=UNUSED),
            pad(self.scores, more, value=float("-inf")),
            None if weight is None else pad(weight, more, value=float("-inf")),
            self.coverage,
        )


MOST_FOUND = 1024
"""Largest number of rows that a histogram of the numbers of rows distinguishes from larger ones."""


@dataclass(frozen=True, eq=False)
class ErrorLimit:
    """How accurate attention must be over the rows that a search selects.

    A search that samples rows can predict the variance of their attention weights, `Σ p² (1/π − 1)`
    over all rows of the index: `p` is the attention weight of a row, and `π` the probability with
    which it is sampled. Times the mean squared distance between values and output, this is the
    expected squared error of the output.

    Args:
        variance: Largest allowed variance, added up over the query heads of a KV head, float32
            `[B, G]`.
        resident_lse: Log-sum-exp of the logits of those tokens that are not in the index, but that
            the query also attends to (sink and window), float32 `[B, H]`. They are part of the
            attention weights' sum of 1. None if there are none.
    """

    variance: Tensor
    resident_lse: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Keys and values of tokens in the layer's dtype. Unused slots are zero.

    Args:
        keys: `[B, G, K, D]`.
        values: `[B, G, K, Dv]`.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Attended:
    """The output of attention over some rows, which can be merged with the output over other rows.

    Args:
        output: `[B, H, Dv]`, in the geometry's dtype.
        lse: Float32 `[B, H]`, the log-sum-exp (natural logarithm) of the logits after scale,
            softcap and weights; `-inf` where no row is visible.
        found: Int32 `[B, G]`, the number of rows in the softmax that a search has selected. The
            other rows are those of the attention sink and the local window.
        histogram: Only for steps in a CUDA graph with a limit of the error (`ErrorLimit`): how
            often a KV head of these steps got each number of rows, int64 `[MOST_FOUND + 1]`. The
            last entry counts `MOST_FOUND` rows or more.
    """

    output: Tensor
    lse: Tensor
    found: Tensor
    histogram: Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """How many rows of an index are on the device and on the host, and how its row cache is used.

    The row cache is memory on the device for copies of rows that are stored on the host.

    Args:
        row_codec: Name of the row codec.
        row_bytes: Bytes of a row.
        device: Number of rows on the device, of all KV heads and sequences.
        host: Number of rows on the host, of all KV heads and sequences.
        cache_rows: Capacity of the cache in rows per KV head; 0 without a cache.
        looked_up: Number of host rows that decode steps have looked up in the cache so far.
        found: Number of looked-up rows that were in the cache.
    """

    row_codec: str
    row_bytes: int
    device: int
    host: int
    cache_rows: int = 0
    looked_up: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the looked-up host rows that were in the cache; 0 without look-ups."""
        return self.found / self.looked_up if self.looked_up else 0.0

    def __add__(self, other: Placement) -> Placement:
        """Return the placement of the rows of two indexes together.

        The numbers of rows, look-ups and hits are added up. Both indexes must have the same row
        codec.
        """
        return replace(
            self,
            device=self.device + other.device,
            host=self.host + other.host,
            cache_rows=max(self.cache_rows, other.cache_rows),
            looked_up=self.looked_up + other.looked_up,
            found=self.found + other.found,
        )

    def __str__(self) -> str:
        size = f"{self.row_bytes} bytes each, row_codec {self.row_codec!r}"
        places = f"{self.device:,} on the device, {self.host:,} on the host ({size})"
        if not self.cache_rows:
            return places
        had = f"had {self.hit_rate:.1%} of {self.looked_up:,} host rows"
        return f"{places}; a cache of {self.cache_rows:,} per KV head {had}"

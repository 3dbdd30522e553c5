"""What the calls of the protocol give: codes, hits, rows, attention, places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import pad

Codes: TypeAlias = Mapping[str, Tensor]
"""What an index keeps per token on the compute device: named tensors `[B, G, N, ...]`."""

UNUSED = -1
"""The id of a slot that holds no row."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The rows a search selected, best first.

    ids: int64 `[B, G, K]`; `-1` marks an unused slot, lower ids name rows that are not tokens.
    scores: float32 `[B, G, K]`, descending; what the group of query heads agreed on.
    log_weight: float32 `[B, H, K]` added to the attention logit before softmax, or None (zeros).
    coverage: float32 `[B, H]`, the fraction of the index's attention that each query head finds in
      these rows by an estimate, where the search was asked for one; else None.
    """

    ids: Tensor
    scores: Tensor
    log_weight: Tensor | None = None
    coverage: Tensor | None = None

    def widened(self, k: int) -> Hits:
        """The same hits with unused slots after them, `K = k`."""
        more = (0, k - self.ids.shape[-1])
        weight = self.log_weight
        return Hits(
            pad(self.ids, more, value=UNUSED),
            pad(self.scores, more, value=float("-inf")),
            None if weight is None else pad(weight, more, value=float("-inf")),
            self.coverage,
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Full-precision rows: keys `[B, G, K, D]`, values `[B, G, K, Dv]`; unused slots are zero."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Attended:
    """What attention over some rows gives, and what it takes to merge it with that over others.

    output: `[B, H, Dv]`, of the geometry's dtype.
    lse: float32 `[B, H]`, the natural logarithm of the sum of the exponentials of the logits, after
      scale, softcap and weights; `-inf` where no row is visible.
    found: int32 `[B, G]`, rows that a search found among those attended to.
    """

    output: Tensor
    lse: Tensor
    found: Tensor


@dataclass(frozen=True)
class Placement:
    """Where an index's rows are, and what a cache of them on the device has spared.

    device, host: rows there, of all KV heads and rows of the batch; row_codec: how they are kept,
    in so many row_bytes each. cache_rows: of the host's, what the cache has room for, per KV head;
    0 for none. looked_up: rows of the host that steps have wanted so far; found: those it had.
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
        """Share of the host's rows that were found in the cache; 0 before any was wanted."""
        return self.found / self.looked_up if self.looked_up else 0.0

    def __add__(self, other: Placement) -> Placement:
        """Of two indexes together, which keep rows alike."""
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
        told = f"{self.device:,} on the device, {self.host:,} on the host ({size})"
        if not self.cache_rows:
            return told
        had = f"had {self.hit_rate:.1%} of {self.looked_up:,} rows of the host"
        return f"{told}; a cache of {self.cache_rows:,} per KV head {had}"

"""Traffic: rows and bytes that a layer's searching steps have read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvindex.core.restore import Restorable

AT_ONCE = 128
"""Steps whose counts are added up together: a few operations of the device for all of them."""


@dataclass(frozen=True)
class Traffic:
    """Sums over the searching steps of a layer; the counts stay on the device until read.

    steps: queries that searched, one for each token of such a step; rows_read: rows attended to and
    rows_full: rows that full attention would have read, both per KV head and row of the batch;
    bytes_fetched: of rows that the store gave; coverage: `Hits.coverage`, mean over heads, where
    searches were asked for one.
    """

    steps: int = 0
    rows_read: Tensor | float = 0.0
    rows_full: Tensor | float = 0.0
    bytes_fetched: Tensor | int = 0
    coverage: Tensor | float = 0.0


class Counts(NamedTuple):
    """What one step has read, as it comes, so that counting it takes no operation.

    found: rows that the index gave, int `[B, G]`; beside: others that were attended to, and
    length: tokens of the sequence, padded ones in both; masked, padded: how many of each are
    padded, mean over the batch; row_bytes: of a row found; coverage: of `Hits`, or None.
    """

    found: Tensor
    beside: int
    masked: Tensor | float
    length: int
    padded: Tensor | float
    row_bytes: int
    coverage: Tensor | None = None


class Tally(Restorable):
    """Counts of steps, added up when someone asks or when there are many."""

    def __init__(self) -> None:
        self._sum, self._new = Traffic(), list[Counts]()

    def count(self, step: Counts) -> None:
        """A step more. Its tensors must stay as they are."""
        self._new = [*self._new, step]
        if len(self._new) >= AT_ONCE:
            self._add_up()

    @property
    def traffic(self) -> Traffic:
        """The sums so far; waits for nothing."""
        self._add_up()
        return self._sum

    def checkpoint(self) -> Any:
        """What has been counted so far, for `rollback`."""
        return self._sum, self._new

    def rollback(self, checkpoint: Any) -> None:
        """Forget the steps that came after."""
        self._sum, self._new = checkpoint

    def _add_up(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        read, fetched = _of_rows(new)
        shares = [step.coverage.mean() for step in new if step.coverage is not None]
        before = self._sum
        self._sum = Traffic(
            steps=before.steps + len(new),
            rows_read=before.rows_read + read + _less(new, "beside", "masked"),
            rows_full=before.rows_full + _less(new, "length", "padded"),
            bytes_fetched=before.bytes_fetched + fetched,
            coverage=before.coverage + (torch.stack(shares).sum() if shares else 0.0),
        )


def _of_rows(steps: list[Counts]) -> tuple[Tensor, Tensor]:
    """Rows found, mean over heads and batch, and their bytes: sums over the steps."""
    means, sums = [], []
    for some in _alike(steps, lambda step: (step.found.shape, step.row_bytes)):
        rows = torch.stack([step.found for step in some]).sum()
        means.append(rows / some[0].found.numel())
        sums.append(rows * some[0].row_bytes)
    return sum(means[1:], means[0]), sum(sums[1:], sums[0])


def _less(steps: list[Counts], all_of: str, some_of: str) -> Tensor | float:
    """The sum of one count, less that of another."""
    total: Tensor | float = float(sum(getattr(step, all_of) for step in steps))
    for some in _alike(steps, lambda step: id(getattr(step, some_of))):
        total = total - len(some) * getattr(some[0], some_of)
    return total


def _alike(steps: list[Counts], what: Callable[[Counts], Hashable]) -> list[list[Counts]]:
    """The steps, those together that are alike in this."""
    found: dict[Hashable, list[Counts]] = {}
    for step in steps:
        found.setdefault(what(step), []).append(step)
    return list(found.values())

"""Traffic: rows and bytes that a layer's searching steps have read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvindex.core.restore import Restorable

T = TypeVar("T")

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

    found: rows that the index gave, int `[B, G]`, or None where the device adds them up
    (`Tally.watch`); beside: others that were attended to, and
    length: tokens of the sequence, padded ones in both; masked, padded: how many of each are
    padded, mean over the batch; row_bytes: of a row found; coverage: of `Hits`, or None; steps: of
    several captured ones that are alike, how many: `beside` and `length` are sums over them.
    """

    found: Tensor | None
    beside: int
    masked: Tensor | float
    length: int
    padded: Tensor | float
    row_bytes: int
    coverage: Tensor | None = None
    steps: int = 1

    def joined(self, step: Counts) -> Counts | None:
        """This and one more captured step, or None where they must be counted apart."""
        if self.found is not None or step.found is not None or self.row_bytes != step.row_bytes:
            return None
        if not (_same(self.masked, step.masked) and _same(self.padded, step.padded)):
            return None
        beside, length = self.beside + step.beside, self.length + step.length
        sizes = beside, self.masked, length, self.padded, self.row_bytes
        return Counts(None, *sizes, self.coverage, self.steps + step.steps)


class Tally(Restorable):
    """Counts of steps, added up when someone asks or when there are many."""

    def __init__(self) -> None:
        self._sum, self._new = Traffic(), list[Counts]()
        self._watched: list[Tensor] = []  # sums of captured steps; of the last graph the last one

    def watch(self, found: Tensor) -> None:
        """Captured steps add up here what they find: int64 `[B, G]`, set to 0 when it is read.

        No operation, which would be captured, too.
        """
        self._watched = [*(old for old in self._watched if old is not found), found]

    def count(self, step: Counts) -> None:
        """A step more. Its tensors must stay as they are.

        Captured ones take no operation, however many: all layers would add up at the same token.
        """
        together = self._new[-1].joined(step) if self._new else None
        if together is not None:
            self._new = [*self._new[:-1], together]
            return
        self._new = [*self._new, step]
        if len(self._new) >= AT_ONCE:
            self._add_up()

    @property
    def traffic(self) -> Traffic:
        """The sums so far; waits for nothing."""
        self._add_up()
        return self._sum

    def checkpoint(self) -> Any:
        """What has been counted so far, for `rollback`: of captured steps a copy of the sums."""
        captured = any(step.found is None for step in self._new)
        sums = [(found, found.clone()) for found in self._watched] if captured else []
        return self._sum, self._new, sums

    def rollback(self, checkpoint: Any) -> None:
        """Forget the steps that came after."""
        self._sum, self._new, sums = checkpoint
        before = {id(found): value for found, value in sums}
        for found in self._watched:
            value = before.get(id(found))
            found.zero_() if value is None else found.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, whose captured steps are others."""
        self._add_up()
        return super().__deepcopy__(memo)

    def _after_copy(self) -> None:
        self._watched = []

    def _add_up(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        found = [(step.found, step.row_bytes) for step in new if step.found is not None]
        read, fetched = _of_rows(found)
        captured = [step.row_bytes for step in new if step.found is None]
        for some in self._watched if captured else []:
            rows = some.sum()
            read, fetched = read + rows / some.numel(), fetched + rows * captured[0]
            some.zero_()
        shares = [step.coverage.mean() for step in new if step.coverage is not None]
        before = self._sum
        self._sum = Traffic(
            steps=before.steps + sum(step.steps for step in new),
            rows_read=before.rows_read + read + _less(new, "beside", "masked"),
            rows_full=before.rows_full + _less(new, "length", "padded"),
            bytes_fetched=before.bytes_fetched + fetched,
            coverage=before.coverage + (torch.stack(shares).sum() if shares else 0.0),
        )


def _of_rows(found: list[tuple[Tensor, int]]) -> tuple[Tensor | float, Tensor | int]:
    """Rows found, mean over heads and batch, and their bytes: sums over the steps.

    found: of each step, and the bytes of a row.
    """
    mean: Tensor | float = 0.0
    nbytes: Tensor | int = 0
    for some in _alike(found, lambda step: (step[0].shape, step[1])):
        rows = torch.stack([one for one, _ in some]).sum()
        mean, nbytes = mean + rows / some[0][0].numel(), nbytes + rows * some[0][1]
    return mean, nbytes


def _less(steps: list[Counts], all_of: str, some_of: str) -> Tensor | float:
    """The sum of one count, less that of another."""
    total: Tensor | float = float(sum(getattr(step, all_of) for step in steps))
    for some in _alike(steps, lambda step: id(getattr(step, some_of))):
        total = total - sum(step.steps for step in some) * getattr(some[0], some_of)
    return total


def _same(one: Tensor | float, other: Tensor | float) -> bool:
    """Whether two counts are surely the same, as far as the host knows."""
    return one is other or (isinstance(one, float) and isinstance(other, float) and one == other)


def _alike(steps: list[T], what: Callable[[T], Hashable]) -> list[list[T]]:
    """The steps, those together that are alike in this."""
    found: dict[Hashable, list[T]] = {}
    for step in steps:
        found.setdefault(what(step), []).append(step)
    return list(found.values())

"""Statistics of a layer: rows and bytes that its searching steps have read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvindex.core.restore import Restorable

T = TypeVar("T")

AT_ONCE = 128
"""Number of steps after which their counts are added up, in a few operations on the device."""


@dataclass(frozen=True)
class Traffic:
    """Sums over the searching steps of a layer. The counts stay on the device until they are read.

    Args:
        steps: Number of tokens that searched.
        rows_read: Number of rows that they attended to, per KV head and sequence.
        rows_full: Number of rows that full attention would have read, per KV head and sequence.
        bytes_fetched: Bytes of the rows that the index returned.
        coverage: Sum of `Hits.coverage` (mean over heads and sequences) over the searches that
            estimated it.
    """

    steps: int = 0
    rows_read: Tensor | float = 0.0
    rows_full: Tensor | float = 0.0
    bytes_fetched: Tensor | int = 0
    coverage: Tensor | float = 0.0


class Counts(NamedTuple):
    """The rows that one step has read. Making this object launches no operation on the device.

    Args:
        found: Number of rows that the index returned, int `[B, G]`, or None if the device adds the
            numbers up (`Tally.watch`).
        beside: Number of rows of sink and window, padding included.
        masked: How many rows of sink and window are not attended to, mean over the batch.
        length: Number of tokens of the sequence, padding included.
        padded: How many tokens of the sequence are padding, mean over the batch.
        row_bytes: Bytes of a row of the index.
        coverage: `Hits.coverage`, or None.
        steps: Number of captured steps that were merged into this object. `beside` and `length` are
            the sums over these steps.
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
        """Merge this captured step with another one; None if they must be counted separately."""
        if self.found is not None or step.found is not None or self.row_bytes != step.row_bytes:
            return None
        if not (_same(self.masked, step.masked) and _same(self.padded, step.padded)):
            return None
        beside, length = self.beside + step.beside, self.length + step.length
        sizes = beside, self.masked, length, self.padded, self.row_bytes
        return Counts(None, *sizes, self.coverage, self.steps + step.steps)


class Watched(NamedTuple):
    """A device counter of the rows that captured steps have found.

    Args:
        found: Int64 `[B, G]`, the sum over all captured steps.
        counted: Int64 `[]`, the part of `found.sum()` that `State.total` already includes.
    """

    found: Tensor
    counted: Tensor | int = 0


class State(NamedTuple):
    """The state of a `Tally`: sums, steps that are not yet added to the sums, device counters."""

    total: Traffic
    new: list[Counts]
    watched: list[Watched]  # the last entry is the counter of the last captured graph


class Tally(Restorable):
    """Collects the counts of steps, and adds them up after every few steps.

    Its state is one object, which is replaced as a whole. So any thread may read `traffic` at any
    time.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._state = State(Traffic(), [], [])

    def watch(self, found: Tensor) -> None:
        """Register the counter to which captured steps add the rows that they find.

        This launches no operation on the device, because the graph would capture it, too.

        Args:
            found: Int64 `[B, G]`. Its values never decrease.
        """
        total, new, watched = self._state
        same = next((one for one in watched if one.found is found), Watched(found))
        self._state = State(total, new, [*(one for one in watched if one is not same), same])

    def count(self, step: Counts) -> None:
        """Count a step. Nobody may write to its tensors afterwards.

        Captured steps launch no operation, however many there are, because otherwise all layers
        would add up their counts at the same token.
        """
        total, new, watched = self._state
        together = new[-1].joined(step) if new else None
        if together is not None:
            self._state = State(total, [*new[:-1], together], watched)
            return
        self._state = State(total, [*new, step], watched)
        if len(new) + 1 >= AT_ONCE:
            self._state = _added_up(self._state)

    @property
    def traffic(self) -> Traffic:
        """The sums so far. Reading them does not wait for the device, and changes nothing."""
        return _added_up(self._state).total

    def checkpoint(self) -> Any:
        """Return the counts so far, for `rollback`. Counters of captured steps are copied."""
        state = self._state
        captured = any(step.found is None for step in state.new)
        return state, [one.found.clone() for one in state.watched] if captured else []

    def rollback(self, checkpoint: Any) -> None:
        """Forget the steps after a checkpoint.

        Args:
            checkpoint: The value that `checkpoint()` returned.
        """
        before, copies = checkpoint
        pairs = zip(before.watched, copies, strict=False)  # no copies if no step was captured
        rest = {id(one.found): copy.sum() - one.counted for one, copy in pairs}
        now = self._state.watched
        lost = [one for one in before.watched if all(one.found is not two.found for two in now)]
        watched = [
            Watched(one.found, one.found.sum() - rest.get(id(one.found), 0))
            for one in (*lost, *now)  # `lost` is not empty if `reset` was called in between
        ]
        self._state = State(before.total, before.new, watched)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy. Later captured steps of the copy do not count in the original."""
        self._state = _added_up(self._state)
        return super().__deepcopy__(memo)

    def _after_copy(self) -> None:
        self._state = self._state._replace(watched=[])


def _added_up(state: State) -> State:
    """Add all steps to the sums, and return the new state."""
    before, new, watched = state
    if not new:
        return state
    found = [(step.found, step.row_bytes) for step in new if step.found is not None]
    read, fetched = _of_rows(found)
    captured = [step.row_bytes for step in new if step.found is None]
    if captured:
        sums = [one.found.sum() for one in watched]
        for one, now in zip(watched, sums, strict=True):
            rows = now - one.counted
            read, fetched = read + rows / one.found.numel(), fetched + rows * captured[0]
        watched = [Watched(one.found, now) for one, now in zip(watched, sums, strict=True)]
    shares = [step.coverage.mean() for step in new if step.coverage is not None]
    total = Traffic(
        steps=before.steps + sum(step.steps for step in new),
        rows_read=before.rows_read + read + _less(new, "beside", "masked"),
        rows_full=before.rows_full + _less(new, "length", "padded"),
        bytes_fetched=before.bytes_fetched + fetched,
        coverage=before.coverage + (torch.stack(shares).sum() if shares else 0.0),
    )
    return State(total, [], watched)


def _of_rows(found: list[tuple[Tensor, int]]) -> tuple[Tensor | float, Tensor | int]:
    """Return the rows found, mean over heads and batch, and their bytes, summed over the steps.

    found: for each step the number of rows `[B, G]`, and the bytes of a row.
    """
    mean: Tensor | float = 0.0
    nbytes: Tensor | int = 0
    for some in _alike(found, lambda step: (step[0].shape, step[1])):
        rows = torch.stack([one for one, _ in some]).sum()
        mean, nbytes = mean + rows / some[0][0].numel(), nbytes + rows * some[0][1]
    return mean, nbytes


def _less(steps: list[Counts], all_of: str, some_of: str) -> Tensor | float:
    """Return the sum of the count `all_of` minus that of `some_of`."""
    total: Tensor | float = float(sum(getattr(step, all_of) for step in steps))
    for some in _alike(steps, lambda step: id(getattr(step, some_of))):
        total = total - sum(step.steps for step in some) * getattr(some[0], some_of)
    return total


def _same(one: Tensor | float, other: Tensor | float) -> bool:
    """Return True if two counts are known to be equal, without waiting for the device."""
    return one is other or (isinstance(one, float) and isinstance(other, float) and one == other)


def _alike(steps: list[T], what: Callable[[T], Hashable]) -> list[list[T]]:
    """Group the steps by the value of `what`."""
    found: dict[Hashable, list[T]] = {}
    for step in steps:
        found.setdefault(what(step), []).append(step)
    return list(found.values())

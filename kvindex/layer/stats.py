"""Counts of how many rows (keys and values) a layer's attention has read, and of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvindex.core.protocol.results import MOST_FOUND
from kvindex.core.restore import Restorable

T = TypeVar("T")

AT_ONCE = 128
"""Number of decode steps whose counts are added up together, in a few operations on the device."""


@dataclass(frozen=True)
class Traffic:
    """Numbers of rows (keys and values) that attention has read, summed over decoded tokens.

    An object counts for one layer, and counts only tokens whose queries searched the index. Sums
    that are tensors stay on the device, so the constructor does not wait for the device.

    Args:
        steps: Number of tokens whose queries searched the index.
        rows_read: Number of rows that these tokens attended to, per KV head and sequence.
        rows_full: Number of rows that full attention would have read, per KV head and sequence.
        bytes_fetched: Bytes of the rows that the index returned.
        coverage: Sum of the searches' `Hits.coverage`, each averaged over heads and sequences.
            Searches without an estimate of the coverage add nothing.
        found: Histogram of the number of rows that a search returned for a KV head, int64 `[1025]`:
            entry `n` counts searches that returned `n` rows, and the last entry those that returned
            1,024 or more. None unless the layer chooses the number of rows by their error.
    """

    steps: int = 0
    rows_read: Tensor | float = 0.0
    rows_full: Tensor | float = 0.0
    bytes_fetched: Tensor | int = 0
    coverage: Tensor | float = 0.0
    found: Tensor | None = None


class Counts(NamedTuple):
    """Counts of the rows (keys and values) that attention has read for one decoded token.

    The constructor launches no operation on the device.

    Args:
        found: Number of rows that the index returned, int `[B, G]`. None for a step in a CUDA
            graph, whose kernels add this number to a counter on the device (`Tally.watch`).
        resident: Number of rows of sink and window, padding included.
        masked: How many of the rows of sink and window are masked out, mean over the batch.
        length: Number of tokens of the sequence, padding included.
        padded: How many tokens of the sequence are padding, mean over the batch.
        row_bytes: Bytes of one row (key and value) that the index fetches.
        coverage: `Hits.coverage`, or None.
        steps: Number of decode steps that this object counts. More than 1 if steps in a CUDA graph
            were merged; `resident` and `length` are then sums over these steps, and `masked` and
            `padded` means.
    """

    found: Tensor | None
    resident: int
    masked: Tensor | float
    length: int
    padded: Tensor | float
    row_bytes: int
    coverage: Tensor | None = None
    steps: int = 1

    def joined(self, step: Counts) -> Counts | None:
        """Add the counts of another decode step, so that one object counts both steps.

        This is for decode steps that run as a CUDA graph. Returns None if one object cannot
        represent the counts of both steps.
        """
        if self.found is not None or step.found is not None or self.row_bytes != step.row_bytes:
            return None
        both = self.steps, step.steps
        masked = _mean(self.masked, step.masked, *both)
        padded = _mean(self.padded, step.padded, *both)
        if masked is None or padded is None:
            return None
        resident, length = self.resident + step.resident, self.length + step.length
        sizes = resident, masked, length, padded, self.row_bytes
        return Counts(None, *sizes, self.coverage, self.steps + step.steps)


class Watched(NamedTuple):
    """Counters on the device, to which steps in a CUDA graph add the number of rows that they find.

    Args:
        found: The sum of these numbers, int64 `[B·T, G]` for steps of `T` tokens of each sequence.
        counted: How much of `found.sum()` is already included in `State.total`, int64 `[]`.
        histogram: How often each number was found, int64 `[n + 1]`, or None.
        tallied: How much of `histogram` is already included in `State.total`, int64 `[n + 1]`.
        tokens: Number of tokens of each sequence in a step, `T`.
    """

    found: Tensor
    counted: Tensor | int = 0
    histogram: Tensor | None = None
    tallied: Tensor | int = 0
    tokens: int = 1

    @property
    def heads(self) -> int:
        """Number of KV heads of all sequences."""
        return self.found.numel() // self.tokens

    def copied(self) -> Watched:
        """Return copies of the counters."""
        histogram = None if self.histogram is None else self.histogram.clone()
        return self._replace(found=self.found.clone(), histogram=histogram)

    def counting(self, since: Watched | None = None) -> Watched:
        """Return the same counters, of which everything is included in `State.total`, except what
        the copies `since` of earlier values show as not included then."""
        found, histogram = self.found.sum(), self.histogram
        if since is not None:
            found = found - (since.found.sum() - since.counted)
        if histogram is not None:
            rest = None if since is None else since.histogram
            histogram = histogram.clone()
            if since is not None and rest is not None:
                histogram = histogram - (rest - since.tallied)
        return self._replace(counted=found, tallied=0 if histogram is None else histogram)


class State(NamedTuple):
    """The state of a `Tally`, which counts the rows that decode steps read.

    Args:
        total: Sums over decode steps.
        new: Counts of recent decode steps that are not included in `total` yet.
        watched: Counters on the device that CUDA graphs increase.
    """

    total: Traffic
    new: list[Counts]
    watched: list[Watched]  # the counter of the last captured graph comes last


class Tally(Restorable):
    """Collects the counts of decode steps, and adds them up after every `AT_ONCE` counts.

    A change replaces the object that contains the counts, and never modifies it. So any thread may
    read the property `traffic` at any time.

    Args:
        histogram: Whether to count how often each number of rows was found (`Traffic.found`).
    """

    def __init__(self, *, histogram: bool = False) -> None:
        self._histogram = histogram
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        found = torch.zeros(MOST_FOUND + 1, dtype=torch.int64) if self._histogram else None
        self._state = State(Traffic(found=found), [], [])

    def restart(self, *, histogram: bool) -> None:
        """Set all counts to 0. Counters on the device, to which graphs add, stay registered.

        histogram: Whether to count from now on how often each number of rows was found.
        """
        self._histogram = histogram
        watched = [one.counting() for one in self._state.watched]
        found = torch.zeros(MOST_FOUND + 1, dtype=torch.int64) if histogram else None
        self._state = State(Traffic(found=found), [], watched)

    def watch(self, found: Tensor, histogram: Tensor | None = None, *, tokens: int = 1) -> None:
        """Register counters on the device, for decode steps that run as a CUDA graph.

        Each replay of the graph adds the number of rows that its search found to the counters. This
        method is called during the capture and launches nothing on the device. An operation that it
        launched would become part of the graph.

        Args:
            found: The sum of these numbers, int64 `[B·T, G]` for steps of `T` tokens of each
                sequence. Its values never decrease.
            histogram: How often each number was found, int64 `[n + 1]`, or None. Its values never
                decrease.
            tokens: Number of tokens of each sequence in a step, `T`.
        """
        total, new, watched = self._state
        fresh = Watched(found, tokens=tokens)
        same = next((one for one in watched if one.found is found), fresh)
        if histogram is not None and same.histogram is not histogram:
            same = same._replace(histogram=histogram, tallied=0)
        others = [one for one in watched if one.found is not found]
        self._state = State(total, new, [*others, same])

    def count(self, step: Counts) -> None:
        """Add the counts of a decode step. The caller must not change their tensors afterwards.

        Counts of decode steps in a CUDA graph are merged on the host, so this launches no operation
        on the device. Otherwise all layers would add up their counts on the device in the same
        decode step, and this step would take longer.
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
        """Numbers of rows (keys and values) that attention has read so far, and their bytes.

        Reading this attribute does not wait for the device.
        """
        return _added_up(self._state).total

    def checkpoint(self) -> Any:
        """Return the present counts of read rows, for `rollback`, which restores these counts.

        Counters on the device are copied.
        """
        state = self._state
        if not state.watched:  # no step was captured
            return state, []
        captured = any(step.found is None for step in state.new)
        return state, [one.copied() for one in state.watched] if captured else []

    def rollback(self, checkpoint: Any) -> None:
        """Remove the counts of the steps after a checkpoint.

        Args:
            checkpoint: The value that `checkpoint()` returned.
        """
        before, copies = checkpoint
        pairs = zip(before.watched, copies, strict=False)  # no copies if no step was captured
        rest = {id(one.found): copy for one, copy in pairs}
        now = self._state.watched
        lost = [one for one in before.watched if all(one.found is not two.found for two in now)]
        watched = [
            one.counting(rest.get(id(one.found)))
            for one in (*lost, *now)  # `lost` is not empty if `reset` was called in between
        ]
        self._state = State(before.total, before.new, watched)
        self._histogram = before.total.found is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that does not share the counters on the device."""
        self._state = _added_up(self._state)
        return super().__deepcopy__(memo)

    def _after_copy(self) -> None:
        self._state = self._state._replace(watched=[])


def _added_up(state: State) -> State:
    """Add the pending counts of `state` to its sums, and return the new state."""
    before, new, watched = state
    if not new:
        return state
    found = [(step.found, step.row_bytes) for step in new if step.found is not None]
    read, fetched = _of_rows(found)
    captured = [step.row_bytes for step in new if step.found is None]
    histogram = _histogram(before.found, [step.found for step in new if step.found is not None])
    if captured:
        sums = [one.found.sum() for one in watched]
        for one, now in zip(watched, sums, strict=True):
            rows = now - one.counted
            read, fetched = read + rows / one.heads, fetched + rows * captured[0]
            if histogram is not None and one.histogram is not None:
                histogram = histogram.to(one.histogram.device) + one.histogram - one.tallied
        watched = [one.counting() for one in watched]
    coverages = [step.coverage.mean() for step in new if step.coverage is not None]
    total = Traffic(
        steps=before.steps + sum(step.steps for step in new),
        rows_read=before.rows_read + read + _less(new, "resident", "masked"),
        rows_full=before.rows_full + _less(new, "length", "padded"),
        bytes_fetched=before.bytes_fetched + fetched,
        coverage=before.coverage + (torch.stack(coverages).sum() if coverages else 0.0),
        found=histogram,
    )
    return State(total, [], watched)


def _histogram(before: Tensor | None, found: list[Tensor]) -> Tensor | None:
    """Add the numbers of rows of several decode steps to a histogram.

    Args:
        before: Int64 `[1025]`, or None for no histogram.
        found: Numbers of rows, int `[B, G]` each.
    """
    if before is None or not found:
        return before
    each = torch.cat([one.flatten() for one in found]).long().clamp_max(MOST_FOUND)
    return before.to(each.device).scatter_add(0, each, torch.ones_like(each))


def _of_rows(found: list[tuple[Tensor, int]]) -> tuple[Tensor | float, Tensor | int]:
    """Add up the numbers of rows that the index returned in several decode steps, and their bytes.

    Args:
        found: For each decode step: the number of rows `[B, G]`, and the bytes of one row.

    Returns:
        The mean number of rows per KV head and sequence, summed over the decode steps; and the
        total bytes of all rows.
    """
    mean: Tensor | float = 0.0
    nbytes: Tensor | int = 0
    for some in _alike(found, lambda step: (step[0].shape, step[1])):
        rows = torch.stack([one for one, _ in some]).sum()
        mean, nbytes = mean + rows / some[0][0].numel(), nbytes + rows * some[0][1]
    return mean, nbytes


def _less(steps: list[Counts], all_of: str, some_of: str) -> Tensor | float:
    """Return the sum of one attribute over all decode steps, minus the sum of another attribute.

    Args:
        steps: The counts of the decode steps.
        all_of: Name of the first attribute.
        some_of: Name of the attribute whose sum is subtracted.
    """
    total: Tensor | float = float(sum(getattr(step, all_of) for step in steps))
    for some in _alike(steps, lambda step: id(getattr(step, some_of))):
        total = total - sum(step.steps for step in some) * getattr(some[0], some_of)
    return total


def _mean(
    one: Tensor | float, other: Tensor | float, steps: int, more: int
) -> Tensor | float | None:
    """Return the mean of two counts, of which the first is that of `steps` decode steps and the
    second that of `more`; None if the host cannot know it without waiting for the device."""
    if one is other:
        return one
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return None
    return one if one == other else (steps * one + more * other) / (steps + more)


def _alike(steps: list[T], what: Callable[[T], Hashable]) -> list[list[T]]:
    """Divide decode steps into lists, one for each value that the function `what` returns."""
    found: dict[Hashable, list[T]] = {}
    for step in steps:
        found.setdefault(what(step), []).append(step)
    return list(found.values())

"""Checks that a call that runs out of memory leaves the index unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch

from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import Hits
from kvindex.testing.cases import Case, left_padding
from kvindex.testing.compare import assert_same_hits, assert_same_snapshot, snapshot
from kvindex.testing.contract.common import Make, searched
from kvindex.testing.faults import fail_at, operations_of

TOKENS = 30
POINTS = 6
"""Number of operations per call that are made to fail, one in each run. Half of them are the last
operations of the call, because a call changes the index near its end."""

Change: TypeAlias = Callable[[BaseIndex], object]
Seen: TypeAlias = tuple[tuple[object, ...], Hits]


def changes(case: Case) -> Iterator[tuple[str, Change]]:
    """Yield the name and the function of every public call that can change an index."""
    B, device = case.batch, case.device
    tokens, more = case.tokens(19, seed=5), case.tokens(3, seed=6)
    queries, at = case.queries(3)[:, :, None], torch.tensor([TOKENS - 1], device=device)
    order = torch.tensor([B - 1, 0], device=device)
    pads = left_padding([2] * B, 3, device)
    text = torch.arange(TOKENS, device=device).expand(B, -1)
    yield "append", lambda index: index.append(*tokens)
    yield "append padded", lambda index: index.append(*more, valid=pads)
    yield "truncate", lambda index: index.truncate(11)
    yield "reorder", lambda index: index.reorder(order)
    yield "reset", lambda index: index.reset()
    yield "end_prompt", lambda index: index.end_prompt()
    yield "observe_queries", lambda index: index.observe_queries(queries, at)
    yield "mark_boundary", lambda index: index.mark_boundary()
    yield "observe_tokens", lambda index: index.observe_tokens(text, first=0)
    yield "search", lambda index: index.search(case.queries(4), k=5)


def points(count: int, most: int) -> list[int]:
    """Return `most` numbers from 0 to `count - 1`: the last ones, and some evenly spaced ones."""
    if count <= most:
        return list(range(count))
    late = range(count - most // 2, count)
    early = (place * (count - most // 2) // (most - most // 2) for place in range(most // 2))
    return sorted({*early, *late})


def check_memory_that_runs_out_anywhere_changes_nothing(
    make: Make, case: Case, most: int = POINTS
) -> None:
    """A public call that runs out of memory leaves the index unchanged, wherever that happens."""
    for prompt_ended in (False, True):
        index = make()
        index.append(
            *case.tokens(TOKENS), valid=left_padding([3] * case.batch, TOKENS, case.device)
        )
        index.observe_queries(
            case.queries(2)[:, :, None], torch.tensor([TOKENS - 1], device=case.device)
        )
        if prompt_ended:
            index.end_prompt()
        searched(index, case)
        before = seen(index, case)
        for name, change in changes(case):
            if not prompt_ended and name not in ("append", "end_prompt"):
                continue  # other calls are checked after `end_prompt`
            whole = copy.deepcopy(index)
            count = operations_of(partial(change, whole))
            for point in points(count, most):
                broken = copy.deepcopy(index)
                if fail_at(partial(change, broken), point):
                    assert_as_it_was(broken, before, case, f"{name}, operation {point}")


def seen(index: BaseIndex, case: Case) -> Seen:
    """Return what public calls report about an index, and the result of a search after an append.

    The append and the calls are made on copies, so the index does not change.
    """
    return snapshot(copy.deepcopy(index), case.queries()), later(index, case)


def later(index: BaseIndex, case: Case) -> Hits:
    """Copy an index, append tokens to the copy, and return the result of a search."""
    index = copy.deepcopy(index)
    index.append(*case.tokens(7, seed=8))
    return searched(index, case)


def assert_as_it_was(index: BaseIndex, before: Seen, case: Case, where: str) -> None:
    """Check that an index is unchanged. If not, the AssertionError begins with `where`."""
    try:
        now, then = seen(index, case)
        assert_same_snapshot(now, before[0])
        assert_same_hits(then, before[1])
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error

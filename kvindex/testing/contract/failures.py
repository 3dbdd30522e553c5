"""Checks that a call that raises an error leaves the index unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from kvindex.testing.cases import Case, left_padding
from kvindex.testing.compare import (
    all_rows,
    assert_same_hits,
    assert_same_snapshot,
    raises,
    snapshot,
)
from kvindex.testing.contract.common import Make, N, filled, searched


def check_a_refused_append_changes_nothing(make: Make, case: Case) -> None:
    """An append that raises ValueError leaves the index unchanged."""
    keys, values = case.tokens(N)
    bad = keys.clone()
    bad[0, 0, 5, 3] = float("nan")
    for start in ([], [(keys, values)]):
        index = filled(make, *start, check=True)
        before = snapshot(index, case.queries())
        with raises(ValueError, says=("keys",)):
            index.append(bad, values)
        with raises(ValueError, says=("values",)):
            index.append(keys, values[:, :, 1:])
        assert_same_snapshot(snapshot(index, case.queries()), before)


def check_an_append_that_runs_out_of_memory_changes_nothing(make: Make, case: Case) -> None:
    """An `append` that runs out of memory, at any allocation, leaves the index unchanged."""
    tokens, more = case.tokens(16), case.tokens(64, seed=1)
    for start in ([], [tokens]):
        for allowed in range(20):
            index = filled(make, *start)
            before = snapshot(index, case.queries())
            if not _fail_after(allowed, partial(index.append, *more), torch, "empty"):
                break
            assert_same_snapshot(snapshot(index, case.queries()), before)
            other = case.tokens(9, seed=2, batch=case.batch if start else case.batch + 1)
            index.append(*other)  # the same call must work when there is memory again
            fresh = filled(make, *start, other)
            batch = len(other[0])
            assert_same_hits(searched(index, case, batch=batch), searched(fresh, case, batch=batch))
        assert allowed, "no allocation was made to fail"


def check_a_reorder_that_runs_out_of_memory_changes_nothing(make: Make, case: Case) -> None:
    """A `reorder` that runs out of memory, at any allocation, leaves the index unchanged."""
    keys, values = case.tokens(16)
    rows = torch.tensor([0, 0], device=case.device)
    for allowed in range(20):
        index = make()
        index.append(keys, values, valid=left_padding([3] * case.batch, 16, case.device))
        before = snapshot(index, case.queries())
        if not _fail_after(allowed, partial(index.reorder, rows), torch.Tensor, "index_select"):
            break
        assert len(all_rows(index, case.batch).keys) == case.batch
        assert_same_snapshot(snapshot(index, case.queries()), before)
    assert allowed, "no allocation was made to fail"


def _fail_after(allowed: int, call: Callable[[], None], owner: object, name: str) -> bool:
    """Run `call` so that the function `name` of `owner` runs out of memory after `allowed` calls.

    Returns True if `call` reached this point and failed.
    """
    right, left = getattr(owner, name), [allowed]

    def failing(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory left")
        return right(*args, **options)

    with mock.patch.object(owner, name, failing):
        try:
            call()
        except torch.OutOfMemoryError:
            return True
    return False

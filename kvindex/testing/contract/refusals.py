"""Checks that the error for a wrong argument names the argument, and says what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from kvindex.bases.index import BaseIndex
from kvindex.testing.cases import Case
from kvindex.testing.compare import assert_same_snapshot, hits_of, raises, snapshot
from kvindex.testing.contract.common import Make, N, filled

Wrong: TypeAlias = tuple[str, str, Callable[[BaseIndex], object]]
"""The argument that the error must name, what is wrong with the argument, and the call."""


def check_wrong_calls_are_refused_and_change_nothing(make: Make, case: Case) -> None:
    """Wrong arguments raise errors that name the argument, and leave the index unchanged."""
    index = filled(make, case.tokens(N), check=True)
    before = snapshot(index, case.queries())
    for argument, what, call in [*_appends(case), *_reads(case)]:
        _assert_refused(index, argument, what, call)
        assert_same_snapshot(snapshot(index, case.queries()), before)


def check_wrong_appends_leave_an_empty_index_empty(make: Make, case: Case) -> None:
    """If the first append fails, the index stays empty and accepts any batch size."""
    index = make(check=True)
    for argument, what, call in _appends(case):
        if "batch" not in what:
            _assert_refused(index, argument, what, call)
            assert len(index) == 0, f"{argument} {what}: a refused append adds nothing"
    index.append(*case.tokens(N, batch=case.batch + 1))
    assert len(index) == N


def _assert_refused(
    index: BaseIndex, argument: str, what: str, call: Callable[[BaseIndex], object]
) -> None:
    try:
        with raises(ValueError, TypeError, says=(argument, "got", "allowed")):
            call(index)
    except Exception as error:
        raise AssertionError(f"{argument} {what}: {error}") from error


def _appends(case: Case) -> Iterator[Wrong]:
    keys, values = case.tokens(N)
    flags = torch.ones(case.batch, N, dtype=torch.bool, device=case.device)
    bad = keys.clone()
    bad[-1, -1, 5, 3] = float("nan")
    more, numbers = case.tokens(N, batch=case.batch + 1), _as_anything([1.0])
    yield "keys", "of rank 3", lambda i: i.append(keys[0], values)
    yield "keys", "that are no tensor", lambda i: i.append(numbers, values)
    yield "keys", "of another dtype", lambda i: i.append(keys.double(), values)
    yield "keys", "on another device", lambda i: i.append(keys.to("meta"), values)
    yield "keys", "of too many heads", lambda i: i.append(keys.repeat(1, 2, 1, 1), values)
    yield "keys", "of another width", lambda i: i.append(keys[..., :4], values)
    yield "keys", "of another batch", lambda i: i.append(*more)
    yield "keys", "with NaN", lambda i: i.append(bad, values)
    yield "keys", "with NaN next to padding", lambda i: i.append(bad, values, valid=_padded(flags))
    yield "keys", "with NaN to encode", lambda i: i.encode(bad)
    yield "values", "of another length", lambda i: i.append(keys, values[:, :, 1:])
    yield "values", "of another width", lambda i: i.append(keys, values[..., 1:])
    yield "values", "of another dtype", lambda i: i.append(keys, values.double())
    yield "valid", "for each head", lambda i: i.append(keys, values, valid=flags[:, None])
    yield "valid", "as numbers", lambda i: i.append(keys, values, valid=flags.long())


def _reads(case: Case) -> Iterator[Wrong]:
    B, G, device = case.batch, case.kv_heads, case.device
    queries = case.queries()
    bad = queries.clone()
    bad[-1, -1, 3] = float("nan")

    def ids(*shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int64, device=device)

    yield "queries", "with tokens", lambda i: i.search(queries[:, :, None], k=3)
    yield "queries", "of another batch", lambda i: i.search(torch.cat([queries] * 2), k=3)
    yield "queries", "of another dtype", lambda i: i.search(queries.double(), k=3)
    yield "queries", "with NaN", lambda i: i.search(bad, k=3)
    yield "length", "below 0", lambda i: i.truncate(-1)
    yield "length", "as a decimal", lambda i: i.truncate(_as_anything(3.5))
    yield "ids", "past the end", lambda i: i.fetch(hits_of(ids(B, G, 3, fill=N)))
    yield "ids", "that name no row", lambda i: i.fetch(hits_of(ids(B, G, 3, fill=-(2**40))))
    yield "ids", "of another batch", lambda i: i.fetch(hits_of(ids(B + 1, G, 3)))
    yield "hits", "that are ids", lambda i: i.fetch(_as_anything(ids(B, G, 3)))
    yield "batch_indices", "past the batch", lambda i: i.reorder(ids(1, fill=B))
    yield "batch_indices", "below 0", lambda i: i.reorder(ids(1, fill=-1))
    yield "batch_indices", "of no row", lambda i: i.reorder(ids(0))
    yield "batch_indices", "as flags", lambda i: i.reorder(ids(1).bool())


def _as_anything(wrong: object) -> Any:
    """Return the argument with type `Any`, so that a type checker accepts a wrong argument."""
    return wrong


def _padded(flags: torch.Tensor) -> torch.Tensor:
    """Return `flags` with False for the first two tokens, so that they count as padding."""
    return flags & (torch.arange(flags.shape[1], device=flags.device) > 1)

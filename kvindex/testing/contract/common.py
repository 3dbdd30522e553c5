"""Helpers of the checks: an index with tokens in it, and a search in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import Hits
from kvindex.testing.cases import Case, Tokens
from kvindex.testing.compare import assert_well_formed

Make: TypeAlias = Callable[..., BaseIndex]

N = 40
K = 9


def searched(
    index: BaseIndex, case: Case, *, k: int = K, seed: int = 0, batch: int | None = None
) -> Hits:
    """Search for the case's queries, and check that the hits are well formed.

    `batch` is the batch size of the index if it differs from the case's.
    """
    batch = case.batch if batch is None else batch
    hits = index.search(case.queries(seed, batch), k=k)
    assert_well_formed(hits, index, batch, k)
    return hits


def filled(make: Make, *parts: Tokens, **options: object) -> BaseIndex:
    """Create an index and append the parts one by one."""
    index = make(**options)
    for keys, values in parts:
        index.append(keys, values)
    return index

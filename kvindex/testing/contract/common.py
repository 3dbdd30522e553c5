"""Helpers for the checks of an index: create an index with tokens, and search in it."""

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
    """Search with random queries, and check the properties that every result must have.

    `batch` is the batch size of the index. None means the batch size of `case`.
    """
    batch = case.batch if batch is None else batch
    hits = index.search(case.queries(seed, batch), k=k)
    assert_well_formed(hits, index, batch, k)
    return hits


def filled(make: Make, *parts: Tokens, **options: object) -> BaseIndex:
    """Create an index, and append each element of `parts` with a separate call."""
    index = make(**options)
    for keys, values in parts:
        index.append(keys, values)
    return index

"""What the checks share: an index with tokens in it, and a search of it."""

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
    """Hits of the case's queries, well formed; batch: the index's, where it is not the case's."""
    batch = case.batch if batch is None else batch
    hits = index.search(case.queries(seed, batch), k=k)
    assert_well_formed(hits, index, batch, k)
    return hits


def filled(make: Make, *parts: Tokens, **options: object) -> BaseIndex:
    """A new index with the pieces appended one by one."""
    index = make(**options)
    for keys, values in parts:
        index.append(keys, values)
    return index

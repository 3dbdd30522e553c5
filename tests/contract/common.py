"""What the checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from kvindex import BaseIndex, Hits
from tests.support.helpers import Case, assert_well_formed

Make: TypeAlias = Callable[..., BaseIndex]

N = 40
K = 9


def searched(index: BaseIndex, case: Case, *, k: int = K, seed: int = 0) -> Hits:
    """Hits of the case's queries, well formed."""
    held = getattr(index, "_batch", case.batch)  # a wrapper has none
    batch = case.batch if held is None else held
    hits = index.search(case.queries(seed, batch), k=k)
    assert_well_formed(hits, index, batch, k)
    return hits


def filled(make: Make, *pieces: tuple[torch.Tensor, torch.Tensor], **options: object) -> BaseIndex:
    """A new index with the pieces appended one by one."""
    index = make(**options)
    for keys, values in pieces:
        index.append(keys, values)
    return index

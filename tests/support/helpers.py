"""Helpers of several tests, and the cases and comparisons of `kvindex.testing`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvindex.testing.cases import Case, join, left_padding, part, rope
from kvindex.testing.compare import (
    ROUNDED,
    all_rows,
    assert_same_hits,
    assert_same_snapshot,
    assert_well_formed,
    hits_of,
    snapshot,
)

__all__ = [
    "ROUNDED",
    "Case",
    "Operations",
    "all_rows",
    "assert_same_hits",
    "assert_same_snapshot",
    "assert_well_formed",
    "far_apart",
    "follow_changes",
    "hits_of",
    "join",
    "left_padding",
    "mostly_slow",
    "part",
    "rope",
    "sampled",
    "slow",
    "slow_as",
    "snapshot",
]


def far_apart(tensor: Tensor) -> Tensor:
    """Return a tensor `[1, 2, ...]` whose heads are more than 2^31 elements apart.

    A CPU allocates only the pages that are touched, a GPU all of them.
    """
    far, one = 2**31 + 2**20, tensor[0, 0].contiguous()
    spread = torch.empty(far + one.numel(), dtype=tensor.dtype, device=tensor.device)
    return spread.as_strided(tensor.shape, (0, far, *one.stride())).copy_(tensor)


class Operations(TorchDispatchMode):
    """A context that records the names of torch's operations, except views, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **kwargs or {})


def follow_changes(mine, theirs, case, device, assert_same):
    """Change two indexes of a batch of 2 by appends, a truncation, a reorder and a reset.

    `assert_same` gets both and queries after each change.
    """
    tokens = [piece.to(device) for piece in case.tokens(900)]
    queries, pair = case.queries().to(device), (mine, theirs)
    for index in pair:
        index.append(*part(tokens, 0, 300), valid=left_padding([0, 70], 300).to(device))
    assert_same(mine, theirs, queries)
    for start, stop in ((300, 301), (301, 700)):
        for index in pair:
            index.append(*part(tokens, start, stop))
        assert_same(mine, theirs, queries)
    for index in pair:
        index.truncate(500)
        index.append(*part(tokens, 700, 900))
    assert_same(mine, theirs, queries)
    for index in pair:
        index.reorder(torch.tensor([1, 1, 0]))
    assert_same(mine, theirs, case.queries(batch=3).to(device))
    for index in pair:
        index.reset()
        index.append(*part(tokens, 0, 200))
    assert_same(mine, theirs, queries)


def slow(*values: object) -> object:
    """Parameters of one case of a test, marked `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_as(elsewhere: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return marks of a slow test. With `elsewhere`, CI omits it because another test has the
    case."""
    return (pytest.mark.slow, *[pytest.mark.longest] * elsewhere)


def mostly_slow(values: Iterable[object], *fast: object) -> list[object]:
    """`values` as parameters of a test, each marked `slow` unless it is one of `fast`.

    A value that is a tuple has one element for each argument.
    """
    values = list(values)
    if unknown := [one for one in fast if one not in values]:
        raise ValueError(f"fast: got {unknown}, allowed is one of {values}")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in fast else pytest.mark.slow,
        )
        for value in values
    ]


def sampled(*lists: object) -> list[object]:
    """Return the product of lists as parameters of a test: `slow`, except a diagonal with every
    value."""
    lists = [list(one) for one in lists]
    longest = max(map(len, lists))
    fast = {tuple(step % len(one) for one in lists) for step in range(longest)}
    return [
        pytest.param(
            *(one[place] for one, place in zip(lists, places, strict=True)),
            marks=() if places in fast else pytest.mark.slow,
        )
        for places in product(*(range(len(one)) for one in lists))
    ]

"""Sequences that come and go: opened, forked, cut and closed, each by a number of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import KVIndex
from kvindex.core.restore import Restorable
from kvindex.layer.attention_layer import AttentionLayer

S = TypeVar("S", KVIndex, AttentionLayer)


class Sequences(Generic[S]):
    """Sequences of one kind, each a copy of `like`: what a fork has of its source is shared.

    A sequence is named by the number that `open` or `fork` gives, which no other one ever has. A
    call on several is all or nothing. To be used by one thread at a time. like: empty; its memory
    is the pool's. Raises ValueError for one that holds tokens, or cannot go back after an error.
    """

    def __init__(self, like: S) -> None:
        if not isinstance(like, Restorable):
            name = type(like).__name__
            raise ValueError(f"index: got {name}, allowed is one that is a Restorable")
        if len(like):
            raise ValueError(f"index: got one that holds {len(like)} tokens, allowed is empty")
        self._like: S = deepcopy(like)  # its owner may go on with it
        self._open: dict[int, S] = {}
        self._next = 0

    def __len__(self) -> int:
        """Sequences that are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        """Those that are open, the first opened first."""
        return iter(tuple(self._open))

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._open

    def __getitem__(self, sequence: int) -> S:
        """What an open sequence is, to read and to tell signals. Raises ValueError."""
        if sequence not in self._open:
            raise ValueError(f"sequence: got {sequence!r}, allowed is one that is open")
        return self._open[sequence]

    def open(self) -> int:
        """A new sequence, empty."""
        return self._added(deepcopy(self._like))

    def fork(self, sequence: int) -> int:
        """A new sequence that goes on from what another one holds; rows and codes are shared."""
        return self._added(deepcopy(self[sequence]))

    def close(self, sequence: int) -> None:
        """Forget a sequence: what no other one shares is free. Raises ValueError if not open."""
        self[sequence]
        del self._open[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget its tokens with ids from `length` on. Raises ValueError below 0."""
        self[sequence].truncate(length)

    def _added(self, new: S) -> int:
        sequence, self._next = self._next, self._next + 1
        self._open[sequence] = new
        return sequence

    def _several(self, sequences: Sequence[int]) -> list[S]:
        """Those of a call, each once. Raises ValueError."""
        if not sequences or len(set(sequences)) < len(sequences):
            got = list(sequences)
            raise ValueError(f"sequences: got {got}, allowed are one or more, each once")
        return [self[sequence] for sequence in sequences]


@contextmanager
def all_or_nothing(some: Sequence[object]) -> Iterator[None]:
    """Each of these, a `Restorable`, is as it was before, where anything raises."""
    restorable = (one for one in some if isinstance(one, Restorable))
    with undone([partial(one.rollback, one.checkpoint()) for one in restorable]):
        yield


@contextmanager
def undone(ways_back: list[Callable[[], None]]) -> Iterator[None]:
    """Where anything raises, all ways back are gone, the last one first; more may come."""
    try:
        yield
    except BaseException:  # an interrupt, too
        with ExitStack() as back:  # each, though one may fail
            for way in ways_back:
                back.callback(way)
        raise


def check_queries(queries: Tensor, count: int, geometry: Geometry, tokens: int | None) -> None:
    """Raises TypeError or ValueError for other than queries `[n, H, T, D]`; None: `[n, H, D]`."""
    g = geometry
    shape: dict[str, int | None] = {"n": count, "H": g.q_heads, "T": tokens, "D": g.head_dim}
    if tokens is None:
        del shape["T"]
    check.tensor("queries", queries, shape, g.dtype, g.device)


def check_tokens(keys: Tensor, values: Tensor, count: int, geometry: Geometry) -> None:
    """Raises TypeError or ValueError for other than keys `[n, G, T, D]`, values `[n, G, T, Dv]`."""
    g = geometry
    shape = {"n": count, "G": g.kv_heads, "T": None, "D": g.head_dim}
    check.tensor("keys", keys, shape, g.dtype, g.device)
    shape |= {"T": keys.shape[2], "D": g.value_dim}
    check.tensor("values", values, shape, g.dtype, g.device)

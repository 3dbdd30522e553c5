"""Base class of `Pool` and `LayerPool`: opens, forks, truncates and closes sequences."""

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
    """A set of sequences, each with its own copy of one index or layer.

    `open` and `fork` return a number that identifies the sequence in later calls. A number is never
    used again. A fork shares memory with its source. A call on several sequences changes either all
    of them or none. Only one thread may use a pool at a time.

    Args:
        like: An empty index or layer, which is copied for each sequence. All copies allocate from
            the same memory pool.

    Raises:
        ValueError: `like` is not empty, or cannot undo a failed call (it is not `Restorable`).
    """

    def __init__(self, like: S) -> None:
        if not isinstance(like, Restorable):
            name = type(like).__name__
            raise ValueError(f"index: got {name}, allowed is an index or layer that is Restorable")
        if len(like):
            count = len(like)
            raise ValueError(f"index: got an index with {count} tokens, allowed is an empty index")
        self._like: S = deepcopy(like)  # because the caller may use `like` later
        self._open: dict[int, S] = {}
        self._next = 0

    def __len__(self) -> int:
        """Number of open sequences."""
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the open sequences, in the order in which they were opened."""
        return iter(tuple(self._open))

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._open

    def __getitem__(self, sequence: int) -> S:
        """Return the index or layer of an open sequence.

        Use it to read, and to call methods that the pool does not have, such as `end_prompt`.

        Raises:
            ValueError: The sequence is not open.
        """
        if sequence not in self._open:
            raise ValueError(
                f"sequence: got {sequence!r}, allowed is the number of an open sequence"
            )
        return self._open[sequence]

    def open(self) -> int:
        """Open a new, empty sequence.

        Returns:
            The number of the new sequence.
        """
        return self._added(deepcopy(self._like))

    def fork(self, sequence: int) -> int:
        """Open a new sequence that begins with all tokens of another one, and shares its memory.

        Args:
            sequence: Number of an open sequence.

        Returns:
            The number of the new sequence.

        Raises:
            ValueError: The sequence is not open.
        """
        return self._added(deepcopy(self[sequence]))

    def close(self, sequence: int) -> None:
        """Close a sequence, and free the memory that no other sequence shares.

        Args:
            sequence: Number of an open sequence.

        Raises:
            ValueError: The sequence is not open.
        """
        self[sequence]
        del self._open[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Remove the tokens of a sequence from position `length` on.

        Args:
            sequence: Number of an open sequence.
            length: Number of tokens to keep, at least 0.

        Raises:
            ValueError: The sequence is not open, or `length` is negative.
        """
        self[sequence].truncate(length)

    def _added(self, new: S) -> int:
        sequence, self._next = self._next, self._next + 1
        self._open[sequence] = new
        return sequence

    def _several(self, sequences: Sequence[int]) -> list[S]:
        """Return the indexes or layers of the given sequences.

        Raises ValueError if the list is empty, or if a sequence is not open or occurs twice, and
        TypeError if it is no list but a single number.
        """
        if isinstance(sequences, int):
            raise TypeError(f"sequences: got {sequences}, allowed is a list such as [{sequences}]")
        if not sequences or len(set(sequences)) < len(sequences):
            got = list(sequences)
            raise ValueError(f"sequences: got {got}, allowed is at least one, without duplicates")
        return [self[sequence] for sequence in sequences]


@contextmanager
def all_or_nothing(some: Sequence[object]) -> Iterator[None]:
    """Restore the state of each `Restorable` object in `some` if the context raises an error."""
    restorable = (one for one in some if isinstance(one, Restorable))
    with undone([partial(one.rollback, one.checkpoint()) for one in restorable]):
        yield


@contextmanager
def undone(ways_back: list[Callable[[], None]]) -> Iterator[None]:
    """Context manager: if its body raises an error, call all functions in `ways_back`.

    The last function of the list is called first. The body may add functions to the list.
    """
    try:
        yield
    except BaseException:  # also KeyboardInterrupt
        with ExitStack() as back:  # this calls every function, even if one fails
            for way in ways_back:
                back.callback(way)
        raise


def check_queries(queries: Tensor, count: int, geometry: Geometry, tokens: int | None) -> None:
    """Raise TypeError or ValueError unless queries fit `count` sequences of `tokens` tokens.

    The shape must be `[count, H, tokens, D]`, or `[count, H, D]` if `tokens` is None.
    """
    g = geometry
    shape: dict[str, int | None] = {"n": count, "H": g.q_heads, "T": tokens, "D": g.head_dim}
    if tokens is None:
        del shape["T"]
    check.tensor("queries", queries, shape, g.dtype, g.device)


def check_tokens(keys: Tensor, values: Tensor, count: int, geometry: Geometry) -> None:
    """Raise TypeError or ValueError unless keys and values fit `count` sequences.

    The shapes must be `[count, G, T, D]` and `[count, G, T, Dv]`, with any `T`.
    """
    g = geometry
    shape = {"n": count, "G": g.kv_heads, "T": None, "D": g.head_dim}
    check.tensor("keys", keys, shape, g.dtype, g.device)
    shape |= {"T": keys.shape[2], "D": g.value_dim}
    check.tensor("values", values, shape, g.dtype, g.device)

"""The tokens of a layer: the older ones in its index, the newer ones and the sink in its window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Self

from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import ChecksState, KeepsState, KVIndex
from kvindex.core.restore import Restorable, cut_back
from kvindex.layer.window import Window
from kvindex.storage.state import State, above, below, length_and_batch


class LayerContents(Restorable):
    """An index, and the window with the tokens that come after the tokens in the index.

    An attention layer and its helpers (such as `Updates` and `Retrieval`) share one object of this
    class. So all of them see the new window after `reorder`, and the new index after an assignment
    to `layer.index`.
    """

    def __init__(self, index: KVIndex, window: Window) -> None:
        self.index, self.window = index, window
        # While tokens move from the window into the index, this list contains one element: the
        # number of tokens in the index and in the window together. At other times it is empty.
        self._length_in_move: list[int] = []

    def __len__(self) -> int:
        """Number of tokens in the index and in the window together, `N`."""
        return len(self.index) + len(self.window)

    @property
    def tokens(self) -> int:
        """Number of tokens, equal to `len(self)` but safe to read from any thread.

        The number is correct even while tokens move from the window into the index.
        """
        while True:
            in_move = self._length_in_move
            length = in_move[0] if in_move else len(self)
            if self._length_in_move is in_move:  # no move began or ended in between
                return length

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Keep the attribute `tokens` constant within this context, while tokens move into the
        index.
        """
        self._length_in_move = [len(self)]
        try:
            yield
        finally:
            self._length_in_move = []

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on.

        Do not call this method while any of these tokens is being moved from the window into the
        index.
        """
        window, indexed = self.window, len(self.index)
        sink = window.sink
        with self.moving():
            if length < indexed:
                sink = None if sink is None else sink.before(length)
                self.index.truncate(length)
            window.truncate(indexed, length, sink)

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` of the batch by sequence `batch_indices[b]`."""
        window = self.window.reordered(batch_indices)
        self.index.reorder(batch_indices)
        self.window = window

    def reset(self) -> None:
        """Remove all tokens."""
        with self.moving():
            self.index.reset()
            self.window.reset()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of each part of the index, and the bytes of the window as `window`."""
        return {**self.index.nbytes(), "window": self.window.nbytes()}

    # Copies

    def checkpoint(self) -> Any:
        """Return the present contents for `rollback`, without waiting for the GPU."""
        index, window = self.index, self.window
        before = index.checkpoint() if isinstance(index, Restorable) else len(index)
        return before, window, window.checkpoint()

    def rollback(self, checkpoint: Any) -> None:
        """Restore the contents that `checkpoint` returned.

        An index that is not `Restorable` has no checkpoints, so it is only truncated to its former
        length. If it has learned from queries since the checkpoint, this is not undone.
        """
        before, self.window, window = checkpoint
        with self.moving():
            self.window.rollback(window)
            if isinstance(self.index, Restorable):
                self.index.rollback(before)
            else:
                cut_back(self.index, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with a copy of the index, even if the index is not `Restorable`."""
        twin = super().__deepcopy__(memo)
        if not isinstance(self.index, Restorable):
            twin.index = deepcopy(self.index, memo)
        return twin

    # State as named tensors

    def packed(self) -> State:
        """Return the state of index and window as named tensors.

        The names of the index's tensors begin with `index.`. Raises ValueError if the index does
        not offer `KeepsState`.
        """
        return above("index", self._stateful().state_dict()) | self.window.packed()

    def check_index(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the index cannot load its part of the saved state `state`."""
        index = capability(self.index, ChecksState)
        if index is not None:
            index.check_state(below("index", state))

    def check_window(self, parts: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the window's tensors `parts` do not fit the rest of `state`."""
        self.window.check(parts, length_and_batch(below("index", state)))

    def unpack(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of index and window from a state that `packed` returned."""
        with self.moving():
            self._stateful().load_state_dict(below("index", state))
            self.window.unpack(state)

    def _stateful(self) -> KeepsState:
        index = capability(self.index, KeepsState)
        if index is None:
            name = type(self.index).__name__
            raise ValueError(f"index: got {name}, allowed is an index that offers KeepsState")
        return index

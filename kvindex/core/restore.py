"""Checkpoints and rollback of objects, to undo a failed call or to branch a sequence.

A checkpoint contains references, not copies of tensors, so it needs no device memory. It stays
valid because data that a reader can see is never overwritten: attributes are assigned new objects,
and tensors are written only at positions after the current length. A rollback does not wait for the
device.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from kvindex.core.protocol import KVIndex


class Restorable:
    """Base of objects with checkpoints.

    Attributes are replaced, and never modified in place. Only attributes that are `Restorable`
    themselves may be modified. A checkpoint becomes invalid when tokens that it contains are
    truncated and other tokens are appended in their place.
    """

    def checkpoint(self) -> Any:
        """Return all attributes, and the checkpoints of those that are `Restorable`, for
        `rollback`.
        """
        state = vars(self).copy()
        parts = [(part, part.checkpoint()) for part in state.values() if _is_part(part)]
        return state, parts

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of a checkpoint. The same checkpoint may be used several times."""
        state, parts = checkpoint
        self.__dict__ = state.copy()
        for part, before in parts:
            part.rollback(before)
        self._after_rollback()

    def _after_rollback(self) -> None:
        """Update data outside of the attributes, such as data on the device.

        Called after `rollback`.
        """

    def _after_copy(self) -> None:
        """Replace objects that a copy must not share. Called on the result of `copy.deepcopy`."""

    def _shallow(self) -> Self:
        """Return a new object with the same attributes."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares the tensors, because neither object ever overwrites them."""
        twin = self._shallow()
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if _is_part(value):
                setattr(twin, name, deepcopy(value, memo))
            elif isinstance(value, list | dict):
                setattr(twin, name, value.copy())
        twin._after_copy()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError, because pickling is not supported."""
        raise TypeError(
            f"pickle: got a {type(self).__name__}, which cannot be pickled, because its memory may "
            "be pinned or on a device; use copy.deepcopy, or save to a folder"
        )


def cut_back(index: KVIndex, held: int) -> None:
    """Truncate an index that is not `Restorable` to `held` tokens, to undo a failed call.

    What the index has learned from signals, such as observed queries, is not undone.
    """
    if len(index) != held:
        index.truncate(held)
        if not held:
            index.reset()


def _is_part(value: object) -> bool:
    return isinstance(value, Restorable)

"""Checkpoints and rollback, to undo a failed call or to branch a sequence.

A checkpoint contains references, and no copies of tensors. It stays valid because visible data is
never overwritten: an attribute is assigned a new object, and tensors are written only behind the
present length, where nobody reads. So a checkpoint needs no device memory, and a rollback does not
wait for the device.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from kvindex.core.protocol import KVIndex


class Restorable:
    """An object whose attributes are replaced and never modified, unless they are `Restorable`.

    A checkpoint becomes invalid when some of its tokens are truncated or rolled back, and other
    tokens are appended in their place.
    """

    def checkpoint(self) -> Any:
        """Return the attributes, and the checkpoints of those that are `Restorable`."""
        state = vars(self).copy()
        parts = [(part, part.checkpoint()) for part in state.values() if _is_part(part)]
        return state, parts

    def rollback(self, checkpoint: Any) -> None:
        """Go back to a checkpoint. The same checkpoint may be used several times."""
        state, parts = checkpoint
        self.__dict__ = state.copy()
        for part, before in parts:
            part.rollback(before)
        self._after_rollback()

    def _after_rollback(self) -> None:
        """Called after `rollback`, to update state outside of the attributes, like device data."""

    def _after_copy(self) -> None:
        """Called on a new deep copy, to replace objects that it must not share."""

    def _shallow(self) -> Self:
        """Return an object with the same attributes."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy. It shares tensors, because neither object ever overwrites them."""
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
            f"pickle: got a {type(self).__name__}, which lives in this process (its memory may be "
            "pinned or on a device); allowed is copy.deepcopy"
        )


def cut_back(index: KVIndex, held: int) -> None:
    """Truncate an index that is not `Restorable` to `held` tokens, to undo a failed call.

    The index keeps what it has learned from signals.
    """
    if len(index) != held:
        index.truncate(held)
        if not held:
            index.reset()


def _is_part(value: object) -> bool:
    return isinstance(value, Restorable)

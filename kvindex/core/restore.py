"""Checkpoint and rollback: what an object was before a call that failed, or before a branch.

A checkpoint is a copy of references. It holds because what can be seen is never written to: an
attribute gets a new value, and tensors are written only where nobody looks yet (room beyond a
length). So it takes no memory of the device, and going back to it asks the device for nothing.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from kvindex.core.protocol import KVIndex


class Restorable:
    """An object whose attributes are replaced, never changed; those that are `Restorable`, too.

    A checkpoint holds until the object is truncated, or rolled back, below what it held then, and
    appended to again.
    """

    def checkpoint(self) -> Any:
        """What this object is now, for `rollback`: its attributes and its parts' checkpoints."""
        state = vars(self).copy()
        parts = [(part, part.checkpoint()) for part in state.values() if _is_part(part)]
        return state, parts

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says; it may be gone back to more than once."""
        state, parts = checkpoint
        self.__dict__ = state.copy()
        for part, before in parts:
            part.rollback(before)
        self._after_rollback()

    def _after_rollback(self) -> None:
        """After `rollback`: what lies outside of attributes (device state) follows them again."""

    def _after_copy(self) -> None:
        """On a deep copy, once it is made: what must not be shared is made anew."""

    def _shallow(self) -> Self:
        """An object with the same attributes."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares tensors which neither ever writes to."""
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
        """Raises TypeError: there is no pickle of it."""
        raise TypeError(
            f"pickle: got a {type(self).__name__}, which lives in this process (its memory may be "
            "pinned or on a device); allowed is copy.deepcopy"
        )


def cut_back(index: KVIndex, held: int) -> None:
    """An index of others, which is no `Restorable`, holds so many tokens again, as far as it can.

    What signals told it stays told.
    """
    if len(index) != held:
        index.truncate(held)
        if not held:
            index.reset()


def _is_part(value: object) -> bool:
    return isinstance(value, Restorable)

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

    A checkpoint contains references to the objects in the attributes. Methods must therefore assign
    a new object to an attribute instead of modifying the old object in place. The exception is an
    attribute that is `Restorable` itself: it may be modified, because the checkpoint contains a
    checkpoint of it. A checkpoint becomes invalid when tokens that it contains are truncated and
    other tokens are appended in their place.
    """

    def checkpoint(self) -> Any:
        """Return the current state, to be passed to `rollback`.

        It consists of references to all attributes, and of checkpoints of the attributes that are
        `Restorable` themselves.
        """
        state = vars(self).copy()
        parts = [(part, part.checkpoint()) for part in state.values() if _is_part(part)]
        return state, parts

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state in `checkpoint`. The same checkpoint may be restored several times."""
        state, parts = checkpoint
        self.__dict__ = state.copy()
        for part, before in parts:
            part.rollback(before)
        self._after_rollback()

    def _after_rollback(self) -> None:
        """Update data that is not in the attributes, such as data on the device.

        `rollback` calls this method after it has restored the attributes.
        """

    def _after_copy(self) -> None:
        """Replace objects that a copy must not share with the original.

        `copy.deepcopy` calls this method on the copy.
        """

    def _shallow(self) -> Self:
        """Return a new object with the same attributes."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that uses the same tensors as this object.

        This is safe because neither object ever overwrites a tensor.
        """
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
    """Undo a failed call of an index that is not `Restorable`: truncate it to `held` tokens.

    `held` is the number of tokens before the call. Changes that the call made to learned
    parameters, for example from observed queries, are not undone.
    """
    if len(index) != held:
        index.truncate(held)
        if not held:
            index.reset()


def _is_part(value: object) -> bool:
    return isinstance(value, Restorable)

"""Buffers for intermediate results. Each thread has its own buffers, which all indexes use."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Room = TypeVar("Room")

MOST_ROOMS = 64
"""Largest number of keys for which `Buffers.room` stores arrays.

A key is a tuple of sizes, and the layers of a model have few different sizes.
"""


class Buffers(threading.local):
    """Arrays that are reused between calls, so that their memory is allocated once per thread.

    An array is identified by a name. If another caller in the same thread asks for the same name,
    it gets the same memory and overwrites the array.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}
        self._rooms: dict[Any, Any] = {}

    @property
    def owner(self) -> object:
        """An object that identifies the current thread: every thread has a different object.

        A caller that reuses a buffer in a later call remembers this object too. If `owner` is still
        the same object in the later call, the buffer belongs to the thread of that call.
        """
        return self._memory

    def array(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
        """Return the array `name` in the given shape, with undefined contents.

        All calls with the same name must have the same dtype.
        """
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        count = math.prod(shape)
        stored = self._memory.get(name)
        if stored is None or len(stored) < count:
            stored = self._memory[name] = np.empty(count + count // 2, dtype)
            self._rooms.clear()
        made = self._last[name] = stored[:count].reshape(shape)
        return made

    def room(self, key: Any, make: Callable[[], Room]) -> Room:
        """Return the arrays that an earlier call has stored under `key`.

        If there are none, call `make`, store the arrays that it returns, and return them.
        """
        made: Room | None = self._rooms.get(key)
        if made is None:
            made = make()
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            self._rooms[key] = made
        return made


BUFFERS = Buffers()

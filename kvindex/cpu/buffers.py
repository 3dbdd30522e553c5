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

    An array is identified by a name. The next caller that asks for the same name overwrites it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}
        self._rooms: dict[Any, Any] = {}

    @property
    def owner(self) -> object:
        """An object of this thread, to find out later whether arrays belong to it."""
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
        """Return the arrays that `make()` has created for `key`; call `make` if there are none."""
        made: Room | None = self._rooms.get(key)
        if made is None:
            made = make()
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            self._rooms[key] = made
        return made


BUFFERS = Buffers()

"""Buffers for intermediate results, allocated once per thread and shared by all indexes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Room = TypeVar("Room")

MOST_ROOMS = 64
"""Number of keys for which `Buffers.room` stores arrays. Layers differ in few shapes."""


class Buffers(threading.local):
    """Named arrays that keep their memory between calls. The next caller overwrites them."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}
        self._rooms: dict[Any, Any] = {}

    def array(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
        """Return an array of this shape with undefined contents; a name always has one dtype."""
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
        """Return the arrays that `make` creates. `make` is called once per thread and key."""
        made: Room | None = self._rooms.get(key)
        if made is None:
            made = make()
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            self._rooms[key] = made
        return made


BUFFERS = Buffers()

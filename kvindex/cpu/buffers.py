"""Room for what a step makes on its way: made once for each thread, shared by all indexes."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np


class Buffers(threading.local):
    """Arrays by name, which keep their memory: whoever asks next writes over them."""

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}

    def array(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
        """An array of that shape; what it holds means nothing. A name has one dtype."""
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        count = math.prod(shape)
        held = self._memory.get(name)
        if held is None or len(held) < count:
            held = self._memory[name] = np.empty(count + count // 2, dtype)
        made = self._last[name] = held[:count].reshape(shape)
        return made


BUFFERS = Buffers()

"""Who shares a buffer whose tokens are written once, and which of its tokens each may read."""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

from kvindex.core import forks

_lock = forks.lock(sys.modules[__name__], "_lock")


class Sharing:
    """Users of one buffer, and up to which token each has ever held it.

    A user writes only beyond what every other one may read: so what one appends never shows in
    another, and what all hold is there once. Safe between threads.

    shared: whether there was ever more than one; else nobody need ask.
    """

    def __init__(self) -> None:
        self.shared = False
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def join(self, user: object, length: int) -> None:
        """`user` may read the first `length` tokens."""
        with _lock:
            self.shared = True
            self._held[user] = max(length, self._held.get(user, 0))

    def claim(self, user: object, start: int, stop: int) -> bool:
        """Whether `user` may write the tokens from `start` to `stop`, which are then its own."""
        with _lock:
            if any(held > start for other, held in self._held.items() if other is not user):
                return False
            self._held[user] = max(stop, self._held.get(user, 0))
            return True

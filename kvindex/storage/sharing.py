"""Sharing of a buffer between copies: which of its tokens each user may read or write."""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

from kvindex.core import forks

_lock = forks.lock(sys.modules[__name__], "_lock")


class Sharing:
    """The users of one buffer, and the largest length that each of them has ever had.

    A user may write only behind the tokens that every other user may read. So tokens that all
    users have in common are stored once, and tokens that one user appends never appear in another.
    Methods may be called from any thread.

    Attributes:
        shared: Whether the buffer ever had several users. If not, `claim` is not needed.
    """

    def __init__(self) -> None:
        self.shared = False
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def join(self, user: object, length: int) -> None:
        """Let `user` read the first `length` tokens."""
        with _lock:
            self.shared = True
            self._held[user] = max(length, self._held.get(user, 0))

    def claim(self, user: object, start: int, stop: int) -> bool:
        """Return whether `user` may write tokens `start` to `stop`, which then belong to it."""
        with _lock:
            if any(held > start for other, held in self._held.items() if other is not user):
                return False
            self._held[user] = max(stop, self._held.get(user, 0))
            return True

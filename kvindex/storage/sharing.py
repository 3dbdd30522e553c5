"""`Sharing`: records which tokens of a buffer each copy of an object may read or write."""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

from kvindex.core import forks

_lock = forks.lock(sys.modules[__name__], "_lock")


class Sharing:
    """Records which tokens of a shared buffer each object may read and write.

    An object may write only to positions in the buffer that no other object may read. So tokens
    that all objects have in common are stored once, and tokens that one object appends never appear
    in another one. Methods may be called from any thread.

    Attributes:
        shared: True if several objects have ever used the buffer. If not, `claim` is not needed.
    """

    def __init__(self) -> None:
        self.shared = False
        self._held: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def join(self, user: object, length: int) -> None:
        """Record that the object `user` may read the first `length` tokens of the buffer."""
        with _lock:
            self.shared = True
            self._held[user] = max(length, self._held.get(user, 0))

    def claim(self, user: object, start: int, stop: int) -> bool:
        """Return True if the object `user` may write the tokens `start` to `stop - 1`.

        If the result is True, these tokens are reserved for `user`, and no other object may write
        them.
        """
        with _lock:
            if any(held > start for other, held in self._held.items() if other is not user):
                return False
            self._held[user] = max(stop, self._held.get(user, 0))
            return True

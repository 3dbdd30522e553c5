"""`Exclusive`: a lock that raises an error in a second thread instead of making it wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident


class Exclusive:
    """A reentrant lock: if another thread holds it, a call raises RuntimeError instead of waiting.

    Args:
        name: Argument name at the beginning of the error message, for example "session".
        target: Phrase for the locked object in the error message, for example "the same session".
    """

    def __init__(self, name: str, target: str) -> None:
        self._name, self._target = name, target
        self._lock = threading.RLock()
        self._inside: int | None = None  # identifier of the thread that holds the lock

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock for the duration of a `with` block.

        Raises:
            RuntimeError: Another thread holds the lock. The call does not wait.
        """
        if not self._lock.acquire(blocking=False):
            raise self._error()
        before, self._inside = self._inside, get_ident()
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()

    @property
    def used_by_other_thread(self) -> bool:
        """True if a thread other than the calling thread holds the lock."""
        inside = self._inside
        return inside is not None and inside != get_ident()

    def check(self) -> None:
        """Check that no other thread holds the lock.

        Raises:
            RuntimeError: Another thread holds the lock.
        """
        if self.used_by_other_thread:
            raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: got a call while another thread is in a call of {self._target}; "
            "allowed is one thread at a time"
        )

"""`Exclusive`: one thread at a time; the call of another thread raises, the first one goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident


class Exclusive:
    """Lets one thread in at a time, as often as it likes.

    Args:
        name: What is called, for the error message.
        of: What the calls are of, for the error message.
    """

    def __init__(self, name: str, of: str) -> None:
        self._name, self._of = name, of
        self._lock = threading.RLock()
        self._inside: int | None = None  # a thread

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter. Raises RuntimeError immediately if another thread is inside."""
        if not self._lock.acquire(blocking=False):
            raise self._error()
        before, self._inside = self._inside, get_ident()
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()

    @property
    def elsewhere(self) -> bool:
        """Whether a thread other than the caller's is inside."""
        inside = self._inside
        return inside is not None and inside != get_ident()

    def check(self) -> None:
        """Raise RuntimeError if another thread is inside."""
        if self.elsewhere:
            raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: got a call while another thread is in a call of {self._of}; "
            "allowed is one thread at a time"
        )

"""`lazy`: a property that is computed at the first access and then stored, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  # used as `functools.cached_property` is
    """Like `functools.cached_property`, but without a lock.

    Before Python 3.12, `functools.cached_property` has one lock for all objects of a class. If a
    thread holds this lock while another thread calls `os.fork`, the lock is never released in the
    child process. Without a lock, two threads may both compute the value.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._make(instance)
        instance.__dict__[self._name] = value  # later reads find this attribute first
        return value

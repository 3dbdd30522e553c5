"""`lazy`: a property that is computed once for each object, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  # used as `functools.cached_property` is
    """As `functools.cached_property`, which before Python 3.12 holds a lock for all objects of a
    class: another thread's would stay locked in the child of a fork.

    Threads that ask at the same time may compute it twice.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._make(instance)
        instance.__dict__[self._name] = value  # found there first from now on
        return value

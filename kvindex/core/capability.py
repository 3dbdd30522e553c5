"""`capability`: tests which optional protocols of `kvindex.core.protocol` an index supports.

A class may have a method that some of its instances do not support, for example because the kernels
are not installed, or because the index inside a wrapper lacks the method. So callers do not use
`isinstance`. They call `capability(index, protocol)`, which returns the index or None.
"""

from __future__ import annotations

from typing import TypeVar

P = TypeVar("P")

_speaks: dict[
    tuple[type, type], bool
] = {}  # (class, protocol) -> True if instances have all methods of the protocol


class Capable:
    """Base class of objects whose method `capability` reports which protocols they support."""

    def capability(self, wanted: type[P]) -> P | None:
        """Return `self` if it supports the protocol `wanted`, otherwise None."""
        if not self._offers(wanted):
            return None
        known = type(self), wanted
        if known not in _speaks:  # `isinstance` with a protocol takes longer than a kernel launch
            _speaks[known] = isinstance(self, wanted)
        return self if _speaks[known] else None  # type: ignore[return-value]

    def _offers(self, wanted: type) -> bool:
        """Return False if this instance does not support the protocol `wanted`, even though its
        class has the methods of the protocol. Otherwise return True.
        """
        return True


def capability(index: object, wanted: type[P]) -> P | None:
    """Return `index` if it supports the protocol `wanted`, otherwise None.

    An object that is not `Capable` supports a protocol if it has all methods of the protocol.
    Compare the result with None, because an empty index is false in a boolean context.
    """
    if isinstance(index, Capable):
        return index.capability(wanted)
    return index if isinstance(index, wanted) else None


def required(index: object, wanted: type[P], *, name: str = "index") -> P:
    """Return `index`, or raise TypeError if it does not support the protocol `wanted`.

    name: the argument's name in the error message.
    """
    able = capability(index, wanted)
    if able is None:
        raise TypeError(
            f"{name}: got {type(index).__name__}, which does not support the protocol "
            f"{wanted.__name__} (kvindex.core.protocol)"
        )
    return able

"""Capabilities of an index: which small protocols of `kvindex.core.protocol` an instance supports.

A class may have a method that an instance does not support, for example because its kernels are
missing, or because the index inside a wrapper lacks it. So callers ask with `capability`, which
returns the index or None.
"""

from __future__ import annotations

from typing import TypeVar

P = TypeVar("P")

_speaks: dict[
    tuple[type, type], bool
] = {}  # (class, protocol) -> whether instances have all methods of the protocol


class Capable:
    """An object that decides itself which capabilities it has."""

    def capability(self, wanted: type[P]) -> P | None:
        """Return this object if it supports the protocol `wanted`, otherwise None."""
        if not self._offers(wanted):
            return None
        known = type(self), wanted
        if known not in _speaks:  # `isinstance` with a protocol takes longer than a kernel launch
            _speaks[known] = isinstance(self, wanted)
        return self if _speaks[known] else None  # type: ignore[return-value]

    def _offers(self, wanted: type) -> bool:
        """Return whether this instance supports a protocol whose methods its class has."""
        return True


def capability(index: object, wanted: type[P]) -> P | None:
    """Return `index` if it supports the protocol `wanted`, otherwise None.

    An index that is not `Capable` supports every protocol whose methods it has. Compare the result
    with None, because an empty index is false.
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
            f"{name}: got {type(index).__name__}, allowed is one that offers {wanted.__name__}"
        )
    return able

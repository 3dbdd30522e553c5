"""Which capabilities an index has: the small protocols of `kvindex.core.protocol`, by instance.

A class may have a method that an instance cannot serve (kernels that are not there, an inner index
that has it not), so whoever needs one asks, and gets the index itself or None.
"""

from __future__ import annotations

from typing import TypeVar

P = TypeVar("P")

_speaks: dict[tuple[type, type], bool] = {}  # (class, protocol) -> whether its instances have all


class Capable:
    """An object that says itself which capabilities it has."""

    def capability(self, wanted: type[P]) -> P | None:
        """This object, if it can do what the protocol `wanted` says, else None."""
        if not self._offers(wanted):
            return None
        known = type(self), wanted
        if known not in _speaks:  # looking at a protocol takes longer than a kernel
            _speaks[known] = isinstance(self, wanted)
        return self if _speaks[known] else None  # type: ignore[return-value]

    def _offers(self, wanted: type) -> bool:
        """Whether this instance serves a protocol whose methods its class has."""
        return True


def capability(index: object, wanted: type[P]) -> P | None:
    """`index`, if it can do what the protocol `wanted` says, else None.

    One of others that does not say it (`Capable`) can do what it has the methods for. Compare with
    None: an index is false while it is empty.
    """
    if isinstance(index, Capable):
        return index.capability(wanted)
    return index if isinstance(index, wanted) else None


def required(index: object, wanted: type[P], *, name: str = "index") -> P:
    """`index`, which can do what the protocol `wanted` says. Raises TypeError where it cannot.

    name: what the error calls it.
    """
    able = capability(index, wanted)
    if able is None:
        raise TypeError(
            f"{name}: got {type(index).__name__}, allowed is one that offers {wanted.__name__}"
        )
    return able

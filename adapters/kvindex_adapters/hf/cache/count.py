"""`Count`: an int for the number of tokens, which reports when a model branches on it.

A forward pass that branches on the number of tokens cannot be captured as a CUDA graph. Comparing
the traces of two decode steps can miss such a branch: if a model recomputes a table at every
hundredth token, most pairs of steps look the same. Therefore the number itself reports each branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "pos", "abs")
"""Methods of int whose result is again a `Count`."""

BRANCHES = ("lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod", "divmod", "truediv")
"""Methods of int that are reported as branches, because their result is the same for many numbers
of tokens."""


class Count(int):
    """The number of tokens, as an int that calls a function whenever it is compared or divided.

    A comparison with 0 does not call the function, because the number of tokens is always positive.
    """

    _on_branch: Callable[[str], None]

    @classmethod
    def of(cls, number: int, on_branch: Callable[[str], None]) -> Count:
        """Make a `Count` with a given value.

        Args:
            number: The value, a number of tokens.
            on_branch: Function that is called whenever the number is compared or divided, with a
                description of this operation.
        """
        count = cls(number)
        count._on_branch = on_branch
        return count

    __hash__ = int.__hash__


def _counting(name: str) -> Any:
    plain: Any = vars(int)[name]

    def counting(self: Count, *others: Any) -> Any:
        result = plain(self, *others)
        return result if result is NotImplemented else Count.of(result, self._on_branch)

    return counting


def _branching(name: str) -> Any:
    plain: Any = vars(int)[name]

    def branching(self: Count, other: Any) -> Any:
        result = plain(self, other)
        if result is not NotImplemented and other != 0:
            self._on_branch(f"the host asks for the number of tokens {name} {other!r}")
        return result

    return branching


for _names, _made in ((ARITHMETIC, _counting), (BRANCHES, _branching)):
    for _name in _names:
        setattr(Count, f"__{_name}__", _made(f"__{_name}__"))

"""`Count`: the number of tokens in a cache, as an int that reports branches on it.

A forward pass that branches on the number of tokens cannot be captured as a CUDA graph. Comparing
the traces of two successive decode steps does not find every such branch: if a model renews a table
at every hundredth token, most pairs of steps are equal. Therefore the count itself reports
branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "pos", "abs")
"""Methods of int whose result is a number of tokens, too."""

BRANCHES = ("lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod", "divmod", "truediv")
"""Methods of int whose result is the same for most numbers of tokens."""


class Count(int):
    """A positive int that reports comparisons and divisions, except comparisons with 0."""

    _on_branch: Callable[[str], None]

    @classmethod
    def of(cls, number: int, on_branch: Callable[[str], None]) -> Count:
        """Make a count. `on_branch` is called with a description of each branch on it."""
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

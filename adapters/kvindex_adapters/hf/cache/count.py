"""`Count`: how many tokens a cache holds, for a forward that is asked whether it branches on it.

A branch that most tokens take alike (a table that is renewed at every hundredth token) shows in no
two traces of neighboring tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "pos", "abs")
"""Methods of int whose result counts tokens, too."""

BRANCHES = ("lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod", "divmod", "truediv")
"""Methods of int whose result seldom changes."""


class Count(int):
    """A number above 0 that tells what is done with it, but for comparing it with 0."""

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

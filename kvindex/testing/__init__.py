"""Tests for authors of indexes, for indexes in this repository and in other packages.

`check_index(MyIndex)` checks that an index behaves as the protocol (`kvindex.core.protocol`)
requires. `python -m kvindex.testing package.module:MyIndex` prints one line for each check. Neither
needs pytest or Hypothesis.
"""

from kvindex.testing.faults import fail_at, interrupt_at, lines_of, operations_of
from kvindex.testing.run import ContractError, Outcome, check_index, outcomes

__all__ = [
    "ContractError",
    "Outcome",
    "check_index",
    "fail_at",
    "interrupt_at",
    "lines_of",
    "operations_of",
    "outcomes",
]


def __dir__() -> list[str]:
    return __all__

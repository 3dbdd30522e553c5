"""What authors of indexes test theirs with, inside this tree and outside.

`check_index(MyIndex)` holds an index to the whole contract; `python -m kvindex.testing
package.module:MyIndex` prints a line for each check. Neither needs pytest or Hypothesis.
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

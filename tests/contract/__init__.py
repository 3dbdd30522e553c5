"""The invariants of the protocol (DESIGN, section 3), one check each.

A check takes `make`, which gives a new index for `case`, and raises AssertionError where the
index breaks the invariant. References share the tested index's first append, from which an index
may learn. `test_contract.py` holds every index to them; `test_contract_can_fail.py` breaks each.
"""

from tests.contract import failures, housekeeping, rows, search

CHECKS = [
    check
    for module in (search, rows, housekeeping, failures)
    for name, check in vars(module).items()
    if name.startswith("check_")
]

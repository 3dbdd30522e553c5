"""Checks that tests run over products of indexes, options and shapes.

`test_contexts.py`, `test_elsewhere.py`, `test_faults.py`, `test_limits.py` and `test_bad_input.py`
run further checks on every index, which take longer or have their own tables.
"""

from kvindex.testing import contract

APART = {"contexts", "devices", "faults", "limits", "refusals"}
CHECKS = [check for check in contract.CHECKS if check.__module__.rpartition(".")[2] not in APART]

"""Checks that an index behaves as the protocol (`kvindex.core.protocol`) requires.

A check is a function in one of these modules whose name begins with `check_`. Importing this
package finds all checks. The first line of a check's docstring says what the check requires. The
argument `make` of a check creates an index, and `case` is the shape of the attention layer. The
check raises AssertionError if the index violates the requirement.

Some indexes learn from the first append. So a check that compares two indexes makes the same first
append to both of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvindex.testing.cases import Case
from kvindex.testing.contract.common import Make

Check: TypeAlias = Callable[[Make, Case], None]


def _found() -> Iterator[Check]:
    for module in pkgutil.iter_modules(__path__):
        for name, value in vars(importlib.import_module(f"{__name__}.{module.name}")).items():
            if name.startswith("check_"):
                yield value


CHECKS: tuple[Check, ...] = tuple(_found())

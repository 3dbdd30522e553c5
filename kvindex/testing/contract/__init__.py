"""The contract of the protocol (`kvindex.core.protocol`), one check for each invariant.

A check is a function in one of these modules whose name begins with `check_`. The first line of its
docstring says what it requires of an index. It takes `make`, which creates an index for `case`, and
raises AssertionError if the index violates the requirement. If a check compares two indexes, both
begin with the same first append, because an index may learn from it. There is no list of checks;
they are found by scanning the modules.
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

"""The invariants of the protocol (`kvindex.core.protocol`), one check each.

A check is a function of a module here whose name begins with `check_`; its docstring is what it
holds an index to. It takes `make`, which gives a new index for `case`, and raises AssertionError
where the index breaks the invariant. References share the tested index's first append, from which
an index may learn. Nothing lists the checks: they are found by scanning.
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

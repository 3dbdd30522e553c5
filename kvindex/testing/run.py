"""Hold an index to the whole contract: every check in every case, with words for what fails."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvindex.bases.index import BaseIndex
from kvindex.testing.cases import CASES, Case
from kvindex.testing.contract import CHECKS, Check


class ContractError(AssertionError):
    """An index breaks an invariant: which check says so, in which case, and what it expected."""


@dataclass(frozen=True)
class Outcome:
    """Of one check: its name, what it holds an index to, its error (None: kept), its seconds."""

    name: str
    promise: str
    error: ContractError | None
    seconds: float


def check_index(index: Callable[..., BaseIndex], *, stateful: bool = False, **options: Any) -> None:
    """Hold an index to every check of the contract, in every case.

    index: a class on `BaseIndex`, or a function that takes the same keywords and gives an index.
    stateful: whether random interleavings of calls are tried, too (needs Hypothesis); to reduce one
    that fails may take minutes.
    options: further keywords for it, as `preset`.

    Raises ContractError at the first check that fails, ImportError where Hypothesis is missing.
    """
    for outcome in outcomes(index, stateful=stateful, **options):
        if outcome.error is not None:
            raise outcome.error


def outcomes(
    index: Callable[..., BaseIndex],
    *,
    stateful: bool = False,
    checks: Sequence[Check] | None = None,
    cases: Sequence[Case] | None = None,
    **options: Any,
) -> Iterator[Outcome]:
    """One outcome for each check, as it is run; a check stops at the first case that fails.

    Raises as `check_index`, but for ContractError; TypeError for what is no index, RuntimeError
    where Python drops assertions.
    """
    if not __debug__:
        raise RuntimeError("assertions: got python -O, which drops them; allowed is without -O")
    if not callable(index):
        raise TypeError(f"index: got {index!r}, allowed is a class or a function that makes one")
    cases = CASES if cases is None else cases
    runs = [(check, cases) for check in (CHECKS if checks is None else checks)]
    if stateful:
        from kvindex.testing.stateful import check_any_interleaving

        runs.append((check_any_interleaving, cases[:1]))  # it has cases of its own
    for check, cases_of_check in runs:
        start = time.perf_counter()
        errors = (
            _error_of(check, functools.partial(case.made, index, **options), case)
            for case in cases_of_check
        )
        error = next((error for error in errors if error is not None), None)
        yield Outcome(check.__name__, _promise(check), error, time.perf_counter() - start)


def _error_of(check: Check, make: Callable[..., Any], case: Case) -> ContractError | None:
    """What a check found in a case."""
    try:
        check(make, case)
    except Exception as error:
        failed = ContractError(
            f"{check.__name__} fails in the case {case}\n"
            f"  expected: {_promise(check)}\n"
            f"  found: {_found(error)}"
        )
        failed.__cause__ = error
        return failed
    return None


def _found(error: Exception) -> str:
    """An error's type and words, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{said} ({frame.filename}:{frame.lineno}: {frame.line})"


def _promise(check: Check) -> str:
    return (check.__doc__ or check.__name__).partition("\n")[0]

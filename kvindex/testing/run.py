"""Run all checks of an index, each with several shapes, and describe the failures."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvindex.bases.index import BaseIndex
from kvindex.testing import compare
from kvindex.testing.cases import CASES, Case
from kvindex.testing.contract import CHECKS, Check


class ContractError(AssertionError):
    """Raised if an index fails a check.

    The message contains the check, the shape of the attention layer, and what was expected.
    """


@dataclass(frozen=True)
class Outcome:
    """Result of one check.

    Attributes:
        name: Name of the check.
        promise: What the check requires of an index.
        error: The error, or None if the check passed.
        seconds: Run time of the check.
    """

    name: str
    promise: str
    error: ContractError | None
    seconds: float


def check_index(index: Callable[..., BaseIndex], *, stateful: bool = False, **options: Any) -> None:
    """Check that an index behaves as the protocol (`kvindex.core.protocol`) requires.

    Args:
        index: A subclass of `BaseIndex`, or a function that takes the same arguments and returns an
            index.
        stateful: Also try random sequences of calls, which needs Hypothesis. If a sequence of calls
            fails, Hypothesis may need minutes to find a short sequence that fails.
        **options: Further arguments of the index, such as `preset`.

    Raises:
        ContractError: A check failed. Later checks are not run.
        ImportError: `stateful` is set and Hypothesis is not installed.
        TypeError: `index` is not callable.
        RuntimeError: Python runs without assertions.
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
    """Run the checks that `check_index` runs, and yield one outcome for each.

    Each check runs with several shapes (`Case`), and stops at the first that fails.

    Args:
        index: A subclass of `BaseIndex`, or a function that takes the same arguments and returns an
            index.
        stateful: Also try random sequences of calls, which needs Hypothesis.
        checks: Checks to run; None for all checks.
        cases: Shapes of attention layers to run them with; None for `CASES`.
        **options: Further arguments of the index, such as `preset`.

    Raises:
        ImportError: `stateful` is set and Hypothesis is not installed.
        TypeError: `index` is not callable.
        RuntimeError: Python runs without assertions.
    """
    if not __debug__:
        raise RuntimeError("python: got the option -O, which removes assertions; run without -O")
    if not callable(index):
        raise TypeError(
            f"index: got {index!r}, allowed is a class, or a function returning an index"
        )
    cases = CASES if cases is None else cases
    runs = [(check, cases) for check in (CHECKS if checks is None else checks)]
    if stateful:
        from kvindex.testing.stateful import check_any_interleaving

        # this check chooses the shapes of its layers itself, so run it only once
        runs.append((check_any_interleaving, cases[:1]))
    for check, cases_of_check in runs:
        start = time.perf_counter()
        errors = (
            _error_of(check, functools.partial(case.made, index, **options), case)
            for case in cases_of_check
        )
        error = next((error for error in errors if error is not None), None)
        yield Outcome(check.__name__, _promise(check), error, time.perf_counter() - start)


def _error_of(check: Check, make: Callable[..., Any], case: Case) -> ContractError | None:
    """Run a check with one shape, and return the error, or None if the check passed."""
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
    """Return the type and message of an error, and the line that raised it.

    If a function of `kvindex.testing.compare` raised the error, return the line that called it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if frame.filename != compare.__file__][-1]
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{said} ({frame.filename}:{frame.lineno}: {frame.line})"


def _promise(check: Check) -> str:
    return (check.__doc__ or check.__name__).partition("\n")[0]

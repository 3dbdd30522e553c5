"""Check that an index behaves as the protocol requires, and print one line for each check."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from kvindex.registry import create
from kvindex.testing.cases import CASES
from kvindex.testing.run import Outcome, outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, and return the exit status.

    The status is 0 if all checks pass, 1 if a check fails, and 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m kvindex.testing", description=__doc__)
    parser.add_argument(
        "index",
        help="Index to check: a name or module:Class, and options (see kvindex.create)",
    )
    parser.add_argument(
        "--stateful",
        action="store_true",
        help="Also check random sequences of calls (needs the package Hypothesis)",
    )
    given = parser.parse_args(arguments)
    try:
        make: Any = functools.partial(create, given.index)
        CASES[0].made(make)  # a wrong name or option raises an error before any check runs
        passed = [_printed(one) for one in outcomes(make, stateful=given.stateful)]
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.index}: {sum(passed)} of {len(passed)} checks passed")
    return 0 if all(passed) else 1


def _printed(outcome: Outcome) -> bool:
    """Print the outcome of a check, and return True if the check passed."""
    ok = outcome.error is None
    print(f"{'ok  ' if ok else 'FAIL'} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.promise}")
    if not ok:
        print(f"     {outcome.error}".replace("\n", "\n     "))
    return ok


if __name__ == "__main__":
    sys.exit(main())

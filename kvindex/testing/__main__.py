"""Check that an index behaves as the protocol requires, and print one line for each check."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from kvindex.registry import create, get
from kvindex.testing.run import Outcome, outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, and return the exit status.

    The status is 0 if all checks pass, 1 if a check fails, and 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m kvindex.testing", description=__doc__)
    parser.add_argument(
        "index",
        help="Index to check: package.module:Class, or a name with options as for kvindex.create",
    )
    parser.add_argument(
        "--stateful",
        action="store_true",
        help="Also check random sequences of calls, which needs Hypothesis",
    )
    given = parser.parse_args(arguments)
    try:
        make = found(given.index)
        passed = [_printed(one) for one in outcomes(make, stateful=given.stateful)]
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.index}: {sum(passed)} of {len(passed)} checks passed")
    return 0 if all(passed) else 1


def found(index: str) -> Callable[..., Any]:
    """Return the class or function that creates the index to check.

    Args:
        index: `package.module:Class`, or a name with options as for `kvindex.create`.

    Raises:
        ImportError: The module cannot be imported.
        TypeError: `index` is not a string.
        ValueError: The module has no such class, or no index has this name.
    """
    module, colon, name = index.partition(":")
    if not colon or "=" in name:
        # raise an error for an unknown name before any check runs
        get(index.partition("+")[0].partition(":")[0])
        return functools.partial(create, index)
    known: dict[str, Any] = vars(importlib.import_module(module))
    if name not in known:
        raise ValueError(f"index: got {index!r}, allowed is a class in the module {module}")
    made: Callable[..., Any] = known[name]
    return made


def _printed(outcome: Outcome) -> bool:
    """Print the outcome of a check, and return True if the check passed."""
    ok = outcome.error is None
    print(f"{'ok  ' if ok else 'FAIL'} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.promise}")
    if not ok:
        print(f"     {outcome.error}".replace("\n", "\n     "))
    return ok


if __name__ == "__main__":
    sys.exit(main())

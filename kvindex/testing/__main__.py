"""`python -m kvindex.testing package.module:Class`: a line for each check of an index."""

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
    """Exit status: 0 where the index keeps the contract, 1 where not, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m kvindex.testing", description=__doc__)
    parser.add_argument("index", help="package.module:Class, or a name with options as of create")
    parser.add_argument("--stateful", action="store_true", help="random interleavings of calls too")
    given = parser.parse_args(arguments)
    try:
        make = found(given.index)
        passed = [_printed(one) for one in outcomes(make, stateful=given.stateful)]
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.index}: {sum(passed)} of {len(passed)} checks kept")
    return 0 if all(passed) else 1


def found(index: str) -> Callable[..., Any]:
    """What makes an index, from `package.module:Class` or from a name with options.

    Raises ImportError, TypeError or ValueError.
    """
    module, colon, name = index.partition(":")
    if not colon or "=" in name:
        get(index.partition("+")[0].partition(":")[0])  # or each check would say that it is unknown
        return functools.partial(create, index)
    known: dict[str, Any] = vars(importlib.import_module(module))
    if name not in known:
        raise ValueError(f"index: got {index!r}, allowed is a class that {module} has")
    made: Callable[..., Any] = known[name]
    return made


def _printed(outcome: Outcome) -> bool:
    """Print an outcome; whether the index kept the promise."""
    ok = outcome.error is None
    print(f"{'ok  ' if ok else 'FAIL'} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.promise}")
    if not ok:
        print(f"     {outcome.error}".replace("\n", "\n     "))
    return ok


if __name__ == "__main__":
    sys.exit(main())

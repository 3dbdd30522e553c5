"""Python in a process of its own, for what would end or change the process of the tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

HANGS_S = 600
"""Seconds after which a process hangs: two minutes are what compiling takes on a busy machine."""


def printed(code: str) -> str:
    """What a program prints, whose process must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

"""Run Python in a separate process, for code that would end or change the tests' process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

HANGS_S = 600
"""Seconds after which a process counts as hanging. Compiling takes two minutes on a busy
machine."""


def printed(code: str) -> str:
    """Return what a program prints, and check that its process ends without an error."""
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

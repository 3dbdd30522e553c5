"""The kernels' tests under Triton's interpreter.

They run in a process of their own, because the interpreter must be chosen before a kernel is
imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import slow, slow_as

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


FILES = [
    "tests/cuda/triton/test_kernels.py",
    "tests/cuda/triton/test_block_sparse.py",
    "tests/adapters/decoder/test_fused.py",
    "tests/adapters/hf/graph/test_fused_token_interpreted.py",
]


SAMPLE = "norm_linear or project_heads or attend_token or most_likely or rotate_heads"
"""Tests of one kernel of each file of `kvindex_cuda/triton/kernels/`."""


@pytest.mark.parametrize(
    ("tests", "which", "names"),
    [
        (FILES[0], "not gpu and not slow", SAMPLE),
        *(slow(file, "not gpu and not slow", "") for file in FILES),
        *(pytest.param(file, "not gpu and slow", "", marks=slow_as(True)) for file in FILES),
    ],
)
def test_kernels_equal_their_twins_under_the_interpreter(tests, which, names):
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    asked += ["-k", names]
    found = subprocess.run(
        [*asked, "--no-header", tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout, found.stdout

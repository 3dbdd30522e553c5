"""Arrays that a kernel uses by address stay alive as long as they are used."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvindex.cpu import kernels
from kvindex.cpu.kernels.compile import keep, kernel

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))
MAKERS = {"empty", "zeros", "ones", "full"}


def named(node):
    """Return the name that an expression begins with: `rows` for `rows[i].ctypes.data`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def made(function):
    """Return the names of the arrays that a function creates."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    call = value.func if isinstance(value, ast.Call) else None
                    if isinstance(call, ast.Attribute) and call.attr in MAKERS:
                        yield name.id


def addressed(function):
    """Return the names whose address is taken."""
    nodes = ast.walk(function)
    return {named(n) for n in nodes if isinstance(n, ast.Attribute) and n.attr == "ctypes"}


def kept(function):
    """Return the names that a function passes to `keep` at its end."""
    last = [node for node in function.body if not isinstance(node, ast.Return)][-1:]
    last = last[0] if last else None
    call = last.value if isinstance(last, ast.Expr) else None
    if isinstance(call, ast.Call) and named(call.func) == "keep":
        return {named(argument) for argument in call.args}
    return set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_kernel_makes_and_uses_by_address_is_kept(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            lost = addressed(node) & set(made(node)) - kept(node)
            assert not lost, f"{file.name}, {node.name}: keep({', '.join(sorted(lost))})"


@kernel
def shares_memory(n: int) -> bool:
    """Return True if one of two later arrays has the address of the first array.

    The address is taken in a loop, as in the kernels. After the loop, Numba frees arrays that are
    not used any more.
    """
    first, places = np.empty((4, n), np.float32), np.empty(4, np.int64)
    for i in range(4):
        places[i] = first[i].ctypes.data
    one, two = np.empty((4, n), np.float32), np.empty((4, n), np.float32)
    found = one.ctypes.data == places[0] or two.ctypes.data == places[0]
    keep(first, one, two)
    return found


@pytest.mark.parametrize("n", [16, 64, 1000])
def test_memory_that_is_kept_is_nobody_elses(n):
    assert not shares_memory(n)


@pytest.mark.slow
def test_searches_need_no_memory_that_was_given_back():
    """With glibc, arrays of 4 KB and more get their own pages here, which are unmapped when
    freed."""
    code = """
import torch, kvindex
for line in "pariskv", "pariskv:preset=paper":
    index = kvindex.create(line, q_heads=2, kv_heads=1, head_dim=256, backend="cpu")
    keys = torch.randn(1, 1, 3000, 256)
    index.append(keys, keys)
    print(len(index.search(torch.randn(1, 2, 256), k=50).ids))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "4096"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "1"]), done.stderr

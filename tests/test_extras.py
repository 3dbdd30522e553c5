"""Without an optional package, imports and commands name the extra that installs it, in one line.

A package is made missing by `sys.modules[name] = None`, in a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import slow

ROOT = Path(__file__).parents[1]
INDEX = "import kvindex; kvindex.create({!r}, q_heads=2, kv_heads=1, head_dim=8, backend={!r})"
COMMAND = "sys.argv = ['kvindex', {!r}]; from kvindex_adapters.cli import main; main()"


def process(missing, code):
    """Run code in a process in which the packages, separated by spaces, cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({missing.split()!r})); {code}"
    folders = {"PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}", "OMP_NUM_THREADS": "1"}
    given = dict(capture_output=True, text=True, check=False, env=folders)
    return subprocess.run([sys.executable, "-c", code], **given)


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("transformers", "import kvindex_adapters.hf", "hf"),
        slow("transformers", "from kvindex_adapters.decoder import Decoder", "hf"),
        slow("vllm", "from kvindex_adapters.vllm import register; register()", "vllm"),
        slow("lm_eval", "from kvindex_adapters.lm_eval import register; register()", "hf,lm-eval"),
        slow("numba", INDEX.format("exact", "cpu"), "cpu"),
        slow("faiss", INDEX.format("faiss-flat", "torch"), "faiss"),
    ],
)
def test_an_import_error_names_the_extra(missing, code, extra):
    done = process(missing, code)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: "), done.stderr
    assert "not installed" in error
    assert f'pip install -e ".[{extra}]" in a checkout' in error
    assert f'pip install "FILE.whl[{extra}]"' in error


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("typer", "--help", "hf,cli"),
        slow("rich", "indexes", "cli"),
        slow("transformers", "demo", "hf"),
    ],
)
def test_a_command_prints_one_line_and_status_2(missing, command, extra):
    done = process(missing, COMMAND.format(command))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert f'pip install -e ".[{extra}]" in a checkout' in error


def test_the_library_itself_needs_no_extra():
    missing = "transformers safetensors numba faiss vllm lm_eval cupy typer rich"
    modules = "kvindex, kvindex_adapters.vllm, kvindex_adapters.lm_eval, kvindex_cuda"
    done = process(missing, f"import {modules}")
    assert done.returncode == 0, done.stderr

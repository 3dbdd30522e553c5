"""Settings of every test: Hypothesis profile, skipped marks, torch's threads."""

import gc
import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

import kvindex

pytest.register_assert_rewrite("tests.support.helpers", "tests.support.exactly", "kvindex.testing")

# If colorama is installed, Numba colors its errors. A thread that compiles then resets sys.stdout
# and sys.stderr to their original values, in the middle of any test.
os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"

# derandomized: the same examples in every run, so failures are reproducible
settings.register_profile("kvindex", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kvindex")


LONG = ("test_contract.py", "test_interpreter.py", "test_parallel.py", "test_sharded.py")
"""Files that take a minute or more, among the slow tests or in the suite."""


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if torch.cuda.device_count() < 2:
        for item in items:
            if item.get_closest_marker("gpu2"):
                item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
    # a long file that begins last keeps one worker busy while the others have nothing to do
    items.sort(key=lambda item: item.path.name not in LONG)
    needs = {name: getattr(kvindex.get(name), "needs", None) for name in kvindex.names()}
    missing = {
        name: package for name, package in needs.items() if package and not find_spec(package)
    }
    for item in items:
        given = getattr(item, "callspec", None)
        name = str(given.params.get("name", "")).partition(":")[0] if given else ""
        if name in missing:
            item.add_marker(pytest.mark.skip(reason=f"needs the package {missing[name]}"))


def pytest_collection_finish():
    """Exclude objects of imports and collection from garbage collection, as they live to the
    end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _one_thread(request):
    """Use one thread, because the core's tensors are tiny.

    Threads cost more than they save, above all on a busy machine. The adapters' tests run a model,
    and use all threads that other workers leave.
    """
    threads, workers = torch.get_num_threads(), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    alone = "adapters" not in request.path.parts
    torch.set_num_threads(1 if alone else max(1, threads // workers))
    yield
    torch.set_num_threads(threads)

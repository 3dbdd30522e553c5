"""Doors: what one file knows of another's objects, and how many files a decoded token crosses."""

import ast
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvindex.layer import AttentionLayer
from tests.cuda import emulator
from tests.cuda.graphs import kept
from tests.support.helpers import Case
from tests.support.sequences import Sequence

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("kvindex", "kvindex_cuda", "adapters", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)

OF_TORCH = "torch has no public name for it"
OF_TRANSFORMERS = "transformers has no public name for it"
FOREIGN = {
    "adapters/kvindex_adapters/hf/attach.py": ({"_attn_implementation"}, OF_TRANSFORMERS),
    "adapters/kvindex_adapters/hf/graph/run_ahead.py": (
        {"_prefill", "_optimize_model_for_decode", "_update_model_kwargs_for_generation"},
        OF_TRANSFORMERS,
    ),
    "kvindex/core/transaction.py": ({"_C", "_len_torch_function_stack"}, OF_TORCH),
    "kvindex/core/one_shot.py": ({"_symmetric_memory"}, OF_TORCH),
    "kvindex/core/streams.py": ({"_C", "_cuda_getCurrentRawStream", "_cuda_getDevice"}, OF_TORCH),
    "kvindex/cpu/kernels/compile.py": ({"_cache"}, "Numba lets a function's cache be of no kind"),
    "kvindex/ops/attention.py": ({"_scaled_dot_product_flash_attention_for_cpu"}, OF_TORCH),
    "kvindex/testing/elsewhere.py": ({"_to_copy", "_make_wrapper_subclass", "_schema"}, OF_TORCH),
    "tools/foreign_suite.py": ({"_check_generate_outputs"}, OF_TRANSFORMERS),
}
"""File -> private names of others' objects that it reads, and why. May only shrink."""

INDEX = {"index", "indexes", "inner"}
"""Names that are an index, wherever they stand."""

OF_A_TUPLE = {"_replace", "_asdict", "_fields"}
"""Public names of `typing.NamedTuple`."""


def indexes_of_any_type(source):
    """Parameters, variables and functions named as an index, and annotated as `Any`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            name, hint = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, hint = ast.unparse(node.target).rpartition(".")[2], node.annotation
        elif isinstance(node, ast.FunctionDef):
            name, hint = node.name, node.returns
        else:
            continue
        names = {part.id for part in ast.walk(hint) if isinstance(part, ast.Name)} if hint else ()
        if name in INDEX and "Any" in names:
            yield name


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in OF_A_TUPLE


def private_names_of_others(source):
    """Private attributes that a file reads of an object whose class is not its own.

    Of `self`, `cls` and `super()` all are its own, of other objects those that it defines, or reads
    of `self`: then they are of the same class.
    """
    tree, own, read = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            (own if is_own else read).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            read |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.AnnAssign):
            own.add(ast.unparse(node.target))
    return read - own


def test_an_index_has_a_type():
    found = {str(path): [*indexes_of_any_type(path.read_text())] for path in CODE}
    assert {path: some for path, some in found.items() if some} == {}


def test_the_search_for_types_can_find_one():
    source = "def f(index: Any | None, k: Any): inner: list[Any] = []\nself.index: Any = g()"
    assert [*indexes_of_any_type(source)] == ["index", "inner", "index"]
    assert [*indexes_of_any_type("def index(name) -> Any: pass")] == ["index"]
    assert [*indexes_of_any_type("def f(index: KVIndex, options: Any): pass")] == []


def test_private_attributes_are_read_in_their_own_file():
    found = {
        str(path.relative_to(ROOT)): private_names_of_others(path.read_text()) for path in CODE
    }
    allowed = {path: allowed for path, (allowed, _) in FOREIGN.items()}
    assert {path: some for path, some in found.items() if some} == allowed


def test_the_search_for_private_attributes_can_find_one():
    source = """
from kvindex.core.config import _literal
class A:
    _state: int
    def f(self, other, index):
        return self._own, other._own, other._state, other._f(), index._learned, index.__len__()
    def _f(self): return run._replace(a=1)
"""
    assert private_names_of_others(source) == {"_literal", "_learned"}


# A decoded token


CASE = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
SIZES = dict(k=20, sink=4, local_window=8, update_every=40, dense_below=40)
PROMPT, WARM = 60, 15

ABOVE = 8
"""Files between the call of a step and a kernel, or an op of torch, at most."""

KERNELS = {
    "torch": ("kvindex/ops/", "kvindex/pariskv/"),
    "cuda": ("kvindex_cuda/runtime/", "tests/cuda/"),
}
"""Where what runs on tensors begins; `kvindex/pariskv` has a file for each stage, functions that
keep nothing, and `tests/cuda` what stands for a graph and for kernels."""

INDEX_FILES = {"torch": "kvindex/pariskv/index.py", "cuda": "kvindex/bases/executed.py"}
"""What a layer calls as its index."""


def files_crossed(call, kernels):
    """The files that a call enters, and those on the way from it to the kernels."""
    entered, above = set(), set()

    def entering(frame, event, argument):
        file = file_of(frame)
        if event == "call" and file:
            entered.add(file)
            while file.startswith(kernels) and (frame := frame.f_back) is not None:
                above.add(file_of(frame))

    before = sys.getprofile()
    sys.setprofile(entering)
    try:
        call()
    finally:
        sys.setprofile(before)
    ours = {file for file in entered if not file.startswith("tests/")}
    return ours, {file for file in above & ours if not file.startswith(kernels)}


def file_of(frame):
    """A frame's file below the root, or "" for one of others (.venv may lie there)."""
    name = frame.f_code.co_filename
    below = name.removeprefix(f"{ROOT}/")
    return "" if below == name or below.startswith(".") else below


def crossed(backend, graphs):
    """`files_crossed` of a token's step, once kernels are compiled and a graph is captured."""
    cuda = backend == "cuda"
    with emulator.emulated() if cuda else nullcontext(), kept() if cuda else nullcontext():
        layer = AttentionLayer(CASE.index("pariskv", backend=backend), graphs=graphs, **SIZES)
        sequence = Sequence.of(CASE, PROMPT + WARM + 1, None)
        sequence.feed(layer, 0, PROMPT)
        for token in range(PROMPT, PROMPT + WARM):
            sequence.feed(layer, token, token + 1)
        last = sequence.parts(PROMPT + WARM, PROMPT + WARM + 1)
        return files_crossed(lambda: layer.step(*last), KERNELS[backend])


ON_KERNELS = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")


@pytest.mark.parametrize(
    ("backend", "graphs", "most"),
    [
        ("torch", False, 34),
        pytest.param("cuda", False, 24, marks=ON_KERNELS),
        pytest.param("cuda", True, 22, marks=ON_KERNELS),
    ],
)
def test_a_decoded_token_crosses_few_files(backend, graphs, most):
    """most: files that are entered in all, helpers, ops and launches, too. It may only shrink."""
    entered, above = crossed(backend, graphs)
    assert len(above) <= ABOVE, sorted(above)
    assert {"kvindex/layer/attention_layer.py", INDEX_FILES[backend]} < above
    assert len(entered) <= most, sorted(entered)


def test_files_are_counted():
    layer = AttentionLayer(CASE.index("exact"))
    parts = Sequence.of(CASE, 2, None).parts(0, 2)
    entered, above = files_crossed(lambda: layer.step(*parts), "kvindex/layer/dense.py")
    assert {"kvindex/core/check.py", "kvindex/layer/dense.py"} < entered
    assert above == {"kvindex/core/transaction.py", "kvindex/layer/attention_layer.py"}

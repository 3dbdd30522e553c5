"""Interfaces between files: no file reads private names of other classes, and indexes have
types."""

import ast
from pathlib import Path

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
    "adapters/kvindex_adapters/vllm/__init__.py": (
        {"_member_map_", "_member_names_", "_name_", "_value_", "_value2member_map_"},
        "a new member of vLLM's enum, which vLLM 0.26 has no method for",
    ),
    "kvindex/core/transaction.py": ({"_C", "_len_torch_function_stack"}, OF_TORCH),
    "kvindex/core/one_shot.py": ({"_symmetric_memory"}, OF_TORCH),
    "kvindex/core/streams.py": ({"_C", "_cuda_getCurrentRawStream", "_cuda_getDevice"}, OF_TORCH),
    "kvindex/cpu/kernels/compile.py": ({"_cache"}, "Numba lets a function's cache be of no kind"),
    "kvindex/ops/attention.py": (
        {
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        },
        OF_TORCH,
    ),
    "kvindex/testing/elsewhere.py": ({"_to_copy", "_make_wrapper_subclass", "_schema"}, OF_TORCH),
    "tools/foreign_suite.py": ({"_check_generate_outputs"}, OF_TRANSFORMERS),
}
"""File -> private names of other classes that it reads, and why. Remove entries, but add none."""

INDEX = {"index", "indexes", "inner"}
"""Names that always denote an index."""

PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
"""Public names of `typing.NamedTuple` and `os`."""


def indexes_of_any_type(source):
    """Return parameters, variables and functions that are named as an index but annotated as
    `Any`."""
    if "Any" not in source:
        return
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
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def private_names_of_others(source):
    """Return the private attributes that a file reads of objects of classes in other files.

    Attributes of `self`, `cls` and `super()` are always allowed. Of other objects, the file may
    read those that it defines or that it reads of `self`, because the object is then of the same
    class.
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

"""Layout of the tree: import order of packages, copies of `kvindex.ops`, files found by
scanning."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvindex
from kvindex.core import protocol

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "kvindex").rglob("*.py"))
INDEXES = sorted(
    path.stem for path in (ROOT / "kvindex/indexes").glob("*.py") if path.stem != "__init__"
)
KERNELS = ROOT / "kvindex_cuda/kernels"
CUDA = {"cupy", "triton", "kvindex_cuda", "pycuda", "numba"}

ROOMS = {
    "kvindex": (
        *("core", "ops", "storage", "selectors", "bases", "layer", "pariskv", "indexes"),
        *("cpu", "wrappers", "registry", "saving", "pool", "__init__", "testing"),
    ),
    "kvindex_cuda": ("runtime", "ops", "triton", "memory", "pariskv", "__init__"),
    "adapters/kvindex_adapters": (
        *("__init__", "common", "llama", "hf", "decoder", "vllm", "evaluate", "lm_eval", "cli"),
        "__main__",
    ),
}
"""Package -> its rooms: folders and top-level files. A room imports only rooms before it."""

FILES = {
    "kvindex": {"__init__.py", "registry.py", "py.typed"},
    "kvindex_cuda": {"__init__.py", "py.typed"},
    "adapters/kvindex_adapters": {"__init__.py", "__main__.py", "py.typed"},
}
"""Package -> its top-level files."""

LACKS = {
    "group": {"*"},
    "units": {"*"},
    "coverage": {"*"},
    "kmeans": {"*"},
    "attention": {"cap", "merge", "with_sink_logits"},
    "coarse": {"ceil_fraction", "rounded"},
    "codes": {
        "centers",
        "centroids",
        "decode",
        "factors",
        "levels",
        "lloyd_max",
        "log_factors",
        "pack",
        "tangent",
        "unpack",
        "weight_scale",
    },
    "messages": {"empty_message", "message_parts"},
    "sampling": {"inclusion", "systematic"},
    "transform": {"rotation"},
}
"""Module of `kvindex.ops` -> its functions that `kvindex_cuda.ops` lacks; "*" means all."""


@cache
def import_statements(source):
    """Return the nodes of a file's import statements, anywhere in it."""
    kinds = ast.Import | ast.ImportFrom
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imported(source):
    """Return the top-level packages that a file imports, anywhere in it."""
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def rooms_imported(package, source):
    """Return the rooms of a package that a file imports, anywhere in it."""
    name, folder = package.rpartition("/")[2], ROOT / package
    for node in import_statements(source):
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            modules = [alias.name for alias in node.names]
        for module in modules:
            top, _, rest = module.partition(".")
            room = rest.partition(".")[0]
            if top == name:
                exists = (folder / room).is_dir() or (folder / f"{room}.py").is_file()
                yield room if room and exists else "__init__"


def import_cycle(sources):
    """Return the modules of one import cycle, or [] if there is none.

    Imports inside functions and under TYPE_CHECKING count, too.

    Args:
        sources: Dotted name of a module -> its source.
    """
    graph = {}
    for name, source in sources.items():
        targets = set()
        for node in import_statements(source):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            else:
                paths = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {path if path in sources else node.module for path in paths}
        graph[name] = targets & sources.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def functions(module):
    """Return the public functions that a module defines, without decorators -> signature."""
    found = {name: inspect.unwrap(value) for name, value in vars(module).items() if name[0] != "_"}
    return {
        name: inspect.signature(value)
        for name, value in found.items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }


def mentions(source, names):
    """Return those of the names that occur in the file's code: as imports, variables or strings."""
    tree = ast.parse(source)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {name for name in names if name in strings}


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_below_it(package):
    order = ROOMS[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        above = set(order[order.index(room) + 1 :]) & set(rooms_imported(package, path.read_text()))
        assert above == set(), path


def test_the_search_for_rooms_can_find_one():
    source = "import kvindex\ndef f():\n    from kvindex import ops\n    import kvindex.layer.sink"
    assert set(rooms_imported("kvindex", source)) == {"__init__", "ops", "layer"}


def test_no_imports_form_a_cycle():
    sources = {}
    for folder in ("kvindex", "kvindex_cuda", "adapters/kvindex_adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to((ROOT / folder).parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            sources[name] = path.read_text(encoding="utf-8")
    assert {"kvindex.core.check", "kvindex_cuda", "kvindex_adapters.hf"} <= sources.keys()
    assert import_cycle(sources) == []


def test_the_search_for_cycles_can_find_one():
    sources = {
        "p": "",
        "p.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B",
        "p.b": "def f():\n    import p.c",
        "p.c": "from p import a",
    }
    assert set(import_cycle(sources)) == {"p.a", "p.b", "p.c"}
    assert import_cycle({**sources, "p.c": "from p import other\nimport torch"}) == []


@pytest.mark.parametrize("package", FILES)
def test_a_package_shows_folders_and_little_else(package):
    shown = [path for path in (ROOT / package).iterdir() if path.name != "__pycache__"]
    assert {path.name for path in shown if path.is_file()} == FILES[package]


def test_the_package_exports_what_callers_need():
    named = "AttentionLayer BaseIndex Codes Geometry Hits KVIndex LayerPool Pool Rows"
    assert set(kvindex.__all__) == {*named.split(), "create", "get", "load", "names"}
    assert all(hasattr(kvindex, name) for name in kvindex.__all__)


def test_ops_are_listed_in_the_order_of_the_flow():
    flow = (
        "transform codes coarse select rerank group units coverage sampling fetch attention "
        "messages kmeans"
    )
    assert kvindex.ops.__all__ == flow.split()
    assert {path.stem for path in (ROOT / "kvindex/ops").glob("[!_]*.py")} >= set(flow.split())


@pytest.mark.parametrize("name", kvindex.ops.__all__)
def test_the_mirror_has_the_reference_signatures_or_says_what_it_lacks(name):
    reference, lacks = functions(getattr(kvindex.ops, name)), LACKS.get(name, set())
    assert lacks == {"*"} or lacks <= reference.keys()
    if not (ROOT / f"kvindex_cuda/ops/{name}.py").is_file():
        assert lacks == {"*"}
        return
    mirror = functions(importlib.import_module(f"kvindex_cuda.ops.{name}"))
    assert reference.keys() - mirror.keys() == lacks
    for function in reference.keys() & mirror.keys():
        assert mirror[function] == reference[function], function


@pytest.mark.parametrize("name", INDEXES)
def test_each_index_has_its_test_and_its_page(name):
    assert (ROOT / f"tests/indexes/test_{name}.py").is_file()
    assert (ROOT / f"docs/indexes/{name}.md").is_file()


def test_no_test_or_page_is_left_over():
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/indexes").glob("test_*.py")}
    pages = {path.stem for path in (ROOT / "docs/indexes").glob("*.md")} - {"README"}
    assert set(INDEXES) <= tests
    assert all(test.startswith(tuple(INDEXES)) for test in tests)  # test_<name>_<topic>.py
    assert pages <= set(INDEXES)


def test_names_are_the_files_found_by_scanning():
    assert kvindex.names() == sorted(name.replace("_", "-") for name in INDEXES)
    for name in kvindex.names():
        found = kvindex.get(name).__module__
        assert found in (f"kvindex.indexes.{name.replace('-', '_')}", f"kvindex.{name}.index")


def test_a_new_file_is_a_new_index(tmp_path, monkeypatch):
    source = "from kvindex.indexes import exact\n\nclass Other(exact.Exact):\n    pass\n"
    (tmp_path / "just_written.py").write_text(source)
    monkeypatch.setattr(kvindex.indexes, "__path__", [*kvindex.indexes.__path__, str(tmp_path)])
    assert "just-written" in kvindex.names()
    index = kvindex.create("just-written:group=union", q_heads=2, kv_heads=1, head_dim=8)
    assert type(index).__name__ == "Other"
    (tmp_path / "written_later.py").write_text(source)
    assert type(kvindex.create("written-later", q_heads=2, kv_heads=1, head_dim=8)) is not None
    assert "written-later" in kvindex.names()
    assert index.config.group == "union"
    monkeypatch.delitem(sys.modules, "kvindex.indexes.just_written")


def test_no_list_names_the_indexes():
    names = kvindex.names()
    for path in CORE:
        if path.parent.name != "indexes":
            assert len(mentions(path.read_text(), names)) == 0, path
    assert mentions("NAMES = ['exact', 'pariskv']", names)


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_no_cuda_and_nothing_but_torch_and_numpy(path):
    compiler = {"numba", "llvmlite"} if "cpu" in path.parts else set()
    packages = set(imported(path.read_text())) - compiler
    assert not packages & CUDA
    if path.parent.name != "indexes" and path.stem != "stateful":  # these may need a library
        assert packages - set(sys.stdlib_module_names) <= {"kvindex", "torch", "numpy"}


def test_the_search_for_imports_can_find_one():
    source = "import torch\ndef f():\n    from cupy.cuda import Stream\n    import triton.language"
    assert set(imported(source)) & CUDA == {"cupy", "triton"}


@pytest.mark.slow
def test_importing_the_core_loads_no_model_library():
    heavy = ["transformers", "scipy", "faiss", "cupy", "triton", "kvindex_adapters", "matplotlib"]
    code = f"import torch, sys; before = set(sys.modules); import kvindex; \
print([name for name in {heavy} if name in set(sys.modules) - before])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_adapters_is_no_package():
    assert not (ROOT / "adapters/__init__.py").exists()
    assert (ROOT / "adapters/kvindex_adapters/__init__.py").is_file()


def test_typed_packages_say_so():
    assert (ROOT / "kvindex/py.typed").is_file()
    assert (ROOT / "adapters/kvindex_adapters/py.typed").is_file()


def reached(name="kvindex_cuda"):
    """Return the files that are read when this package is imported, from each file's imports."""
    found, left = {}, [name]
    while left:
        path = ROOT / left[-1].replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        module = left.pop()
        if module in found or not path.is_file():
            continue
        found[module] = path.read_text()
        for node in import_statements(found[module]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvindex_cuda"):
                left += [
                    node.module,
                    node.module.rpartition(".")[0],
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                ]
    return found


DOORS = (
    *("kvindex_cuda", "kvindex_cuda.triton", "kvindex_cuda.triton.block_sparse"),
    *("kvindex_cuda.pariskv.steps.paged", "kvindex_cuda.pariskv.steps.host_rows"),
)
"""Files of the CUDA backend that other packages import; all but the first serve an adapter."""


@cache
def behind_doors():
    """Return the files of the CUDA backend that `DOORS` import."""
    return {module: text for door in DOORS for module, text in reached(door).items()}


def test_every_kernel_is_reached_from_a_public_import():
    strings = [
        {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
        for source in behind_doors().values()
    ]
    head = r"__global__ void (?:__launch_bounds__\(.*\)\s)?(\w+)\("
    unreached = set()
    for path in KERNELS.rglob("*.cu"):
        kernels = re.findall(head, path.read_text())
        assert len(kernels) == path.read_text().count("__global__"), path
        if not all(
            any({str(path.relative_to(KERNELS)), kernel} <= some for some in strings)
            for kernel in kernels
        ):
            unreached.add(str(path.relative_to(KERNELS)))
    assert unreached == set()


def test_every_part_of_a_kernel_is_included():
    sources = "".join(path.read_text() for path in KERNELS.rglob("*.cu*"))
    parts = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cuh")}
    assert parts
    assert {name for name in parts if f'#include "{name}"' not in sources} == set()


def test_no_module_of_the_cuda_backend_is_for_tests_alone():
    modules = (ROOT / "kvindex_cuda").rglob("*.py")
    assert len(behind_doors()) == len([*modules])


OF_TRANSFORMERS = "what a model, a configuration or a cache of transformers has"
OF_A_CONFIG = "fields of a configuration, by a loop over their names"
LOOKUPS = {
    "adapters/kvindex_adapters/cli/list.py": OF_A_CONFIG,
    "adapters/kvindex_adapters/hf/attach.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/cache/cache.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/cache/layer.py": "a size of the geometry, a function's name",
    "adapters/kvindex_adapters/hf/generation/conversation.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/generation/speculate.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/model/load_model.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/model/info.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/model/rotary.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/graph/run_ahead.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/cache/takeover.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/chat.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/hf/unsupported.py": OF_TRANSFORMERS,
    "adapters/kvindex_adapters/vllm/__init__.py": "what a version of vLLM has",
    "kvindex/bases/faiss_library.py": "what a build of FAISS has",
    "kvindex/core/geometry.py": "fields of a dataclass",
    "kvindex/indexes/ctkvr.py": OF_A_CONFIG,
    "kvindex/indexes/infllm.py": OF_A_CONFIG,
    "kvindex/indexes/louiskv.py": OF_A_CONFIG,
    "kvindex/pariskv/config.py": OF_A_CONFIG,
    "kvindex/indexes/retroinfer.py": OF_A_CONFIG,
    "kvindex/indexes/squeezed.py": OF_A_CONFIG,
    "kvindex/layer/stats.py": "fields of a step's counts",
    "kvindex/storage/state.py": "fields of a dataclass",
    "kvindex/testing/contract/failures.py": "methods by a loop over their names",
    "kvindex/wrappers/recall.py": "`group` of a configuration, which an index may not have",
    "kvindex/wrappers/sample.py": "`group` of a configuration, which an index may not have",
    "kvindex_cuda/pariskv/dispatch.py": OF_A_CONFIG,
}
"""File -> attributes that it looks up by name, never a capability. Remove entries, but add none."""


def looked_up(source):
    """Return the names that a file passes to `getattr` and `hasattr`, as written there."""
    if "getattr" not in source and "hasattr" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield ast.unparse(node.args[1]).strip("'")


def test_a_capability_is_asked_for_and_not_looked_up():
    asked = {
        name
        for found in vars(protocol).values()
        if getattr(found, "_is_runtime_protocol", False) and found is not protocol.KVIndex
        for name in vars(found)
        if not name.startswith("_")
    }
    assert {"attend", "decode_step", "start_append", "row_bytes"} <= asked
    for folder in ("kvindex", "kvindex_cuda", "adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            names = set(looked_up(path.read_text()))
            assert not names or str(path.relative_to(ROOT)) in LOOKUPS, path
            assert not names & asked, path
    assert list(looked_up("if hasattr(index, 'attend'): getattr(index, by, None)")) == [
        "attend",
        "by",
    ]


def test_files_are_read_and_written_in_utf_8_whatever_the_machine_says():
    """Comments of kernels have characters that Python cannot decode by default without a locale."""
    folders = ("kvindex", "kvindex_cuda", "adapters", "benchmarks", "tools")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "read_text" not in source and "write_text" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            told = len(node.args) + any(word.arg == "encoding" for word in node.keywords)
            least = {"read_text": 1, "write_text": 2}.get(node.func.attr, 0)
            assert told >= least, f"{path}:{node.lineno}"

"""What the driver gets, tested without a driver; and what `launch` rejects."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from kvindex_cuda.runtime import launch as launching
from kvindex_cuda.runtime.constants import FILES, constants
from kvindex_cuda.runtime.signature import BOUNDS, signature

KERNEL = re.compile(rf"__global__\s+void\s+{BOUNDS}(\w+)\(")

PLAIN = """
extern "C" __global__ void __launch_bounds__(256, D > 128 ? 1 : 2)
some(const i64* ids,  // of rows
     float scale, i64 k, int few, float softcap, void* out) {}
"""
BY_VALUE = """
struct Other { int none; };
struct Arguments {
    const i64* ids;  // of rows; any
    float scale;
    i64 k;
    int few;
    float softcap;
    void* out;
    float octaves;
};
extern "C" __global__ void some(const __grid_constant__ Arguments args) {}
"""
NONE = "__global__ void some() {}"
GIVEN = dict(ids=2**47 + 8, scale=0.5, k=-(2**62), few=-3, softcap=float("inf"), out=2**63 + 16)


class Parameters(ctypes.Structure):
    """`BY_VALUE` in the layout of C."""

    _fields_ = (
        *(("ids", ctypes.c_void_p), ("scale", ctypes.c_float), ("k", ctypes.c_longlong)),
        *(("few", ctypes.c_int), ("softcap", ctypes.c_float), ("out", ctypes.c_void_p)),
        ("octaves", ctypes.c_float),
    )


@pytest.fixture
def driver(monkeypatch):
    """A driver that records launches, and reads arguments at the addresses that it gets."""
    noted = SimpleNamespace(launches=[], kinds=(), fails=0)

    def run(config, function, places, extra):
        config = config._obj
        assert len(places) == len(noted.kinds)
        passed = [kind.from_address(place) for kind, place in zip(noted.kinds, places, strict=True)]
        fields = [getattr(part, "_fields_", [("value",)]) for part in passed]
        values = [getattr(p, f[0]) for p, names in zip(passed, fields, strict=True) for f in names]
        sizes = [getattr(config, name) for name, _ in config._fields_[:7]]
        noted.launches.append((sizes, config.stream, config.count, function.value, values))
        return noted.fails

    monkeypatch.setattr(launching, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=run))
    monkeypatch.setattr(launching, "raw_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return noted


def kernel(text=PLAIN, static=0):
    function = SimpleNamespace(shared_size_bytes=static, kernel=SimpleNamespace(ptr=4321))
    return launching._Kernel(signature(text, "some"), function, 0), function


def test_arguments_lie_where_the_driver_is_told(driver):
    run = kernel()[0]
    driver.kinds = [kind for _, kind in Parameters._fields_[:-1]]
    given = [*GIVEN.values()]
    run((3, 2), (256,), given, 64, True)
    run((9,), (32, 2, 1), [*given[:1], 2.0, *given[2:]], 0, False)
    first, second = driver.launches
    assert first == ([3, 2, 1, 256, 1, 1, 64], 77, 1, 4321, given)
    assert second == ([9, 1, 1, 32, 2, 1, 0], 77, 0, 4321, [*given[:1], 2.0, *given[2:]])


def test_a_struct_is_one_parameter_laid_out_as_in_c(driver):
    takes, driver.kinds = signature(BY_VALUE, "some"), [Parameters]
    assert takes.packing.size == ctypes.sizeof(Parameters)
    names = [name for name, _ in takes.fields]
    assert list(takes.places) == [getattr(Parameters, name).offset for name in names]
    given = [*GIVEN.values(), 12.0]
    kernel(BY_VALUE)[0]((1,), (1,), given, 0, False)
    assert driver.launches[0][-1] == given


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Launch `BY_VALUE` on a CPU, and return the arguments that its kernel gets."""
    (tmp_path / "some.cu").write_text(BY_VALUE)
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    passed = []
    monkeypatch.setitem(
        launching.LOADERS, "cpu", lambda *_: lambda grid, block, given, *__: passed.append(given)
    )

    def run(**arguments):
        launching.launch("some.cu", "some", (1,), (1,), arguments=arguments)
        return passed[-1]

    return run


def usual():
    sizes = dict(octaves=1.0, softcap=0.0, scale=2.0, few=3, k=4)
    return dict(out=torch.zeros(1), ids=None, **sizes)


def test_arguments_are_given_by_name_in_any_order(launched):
    given = usual()
    assert launched(**given) == [0, 2.0, 4, 3, 0.0, given["out"].data_ptr(), 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(more=1), r"some: got unknown \['more'\], allowed are \['ids', 'scale'"),
        (dict(k=None, more=1), r"some: got unknown \['more'\] and no \['k'\], allowed are"),
        (dict(octaves=None), r"some: got no \['octaves'\], allowed are"),
        (dict(k=4.0), "some.k: got 4.0, allowed is int"),
        (dict(k=True), "some.k: got True, allowed is int"),
        (dict(scale=4), "some.scale: got 4, allowed is float"),
        (dict(few=torch.ones(1)), "some.few: got a tensor, allowed is int"),
        (dict(ids=12345678), "some.ids: got 12345678, allowed is a tensor or None"),
        (dict(ids=torch.zeros(1, device="meta")), "some: got tensors on meta and cpu, allowed is"),
        (dict(out=0.5), "some.out: got 0.5, allowed is a tensor or None"),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_other_names_and_types_are_refused(launched, change, message):
    given = usual() | change
    for name in [name for name, part in change.items() if part is None]:
        del given[name]
    with pytest.raises(ValueError, match=message):
        launched(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void other(int* p) {}", "some: got no such kernel"),
        (
            "__global__ void some(short few) {}",
            "some: got a parameter 'short few', allowed is a pointer or",
        ),
        (
            "__global__ void some(const __grid_constant__ Lost args) {}",
            "some: got a parameter of type Lost",
        ),
    ],
)
def test_a_source_that_says_nothing_of_a_kernel_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        signature(text, "some")


def test_of_more_than_six_arguments_a_kernel_takes_a_struct():
    sources = [path.read_text() for path in launching.SOURCES.rglob("*.cu")]
    found = [signature(text, name) for text in sources for name in KERNEL.findall(text)]
    assert len(found) > 30
    assert all(takes.by_value or len(takes.fields) <= 6 for takes in found)


def test_constants_are_written_once():
    """No source defines a constant that its file is compiled with, and each file uses all that it
    gets.
    """
    for path in launching.SOURCES.rglob("*.cu"):
        file = str(path.relative_to(launching.SOURCES))
        text = whole(file)
        defined = re.findall(r"constexpr \w+ (\w+) =|#define (\w+)", text)
        assert not constants(file).keys() & {name for pair in defined for name in pair}, file
        assert FILES.get(file, {}).keys() <= {*re.findall(r"\w+", text)}, file
        assert "#ifndef" not in text.replace("#ifndef EMULATED", ""), file
    assert all((launching.SOURCES / file).exists() for file in FILES)


def whole(file):
    """Return a source together with what it includes."""
    text = launching.source(file)
    return text + "".join(map(whole, re.findall(r'#include "([\w/.]+)"', text)))


def test_shared_memory_beyond_48_kb_is_asked_for_once(driver):
    run, function = kernel(NONE, static=1024)
    run((1,), (1,), [], 47 * 1024, False)
    assert not hasattr(function, "max_dynamic_shared_size_bytes")
    run((1,), (1,), [], 100_000, False)
    assert function.max_dynamic_shared_size_bytes == 100_000
    function.max_dynamic_shared_size_bytes = None
    run((1,), (1,), [], 90_000, False)
    assert function.max_dynamic_shared_size_bytes is None


def test_a_driver_that_refuses_is_an_error(driver):
    run, driver.fails = kernel(NONE)[0], 209
    with pytest.raises(
        RuntimeError, match="some: the driver could not launch this kernel, CUDA error 209"
    ):
        run((1,), (1,), [], 0, False)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A kernel that includes a header, which includes another header."""
    (tmp_path / "common").mkdir()
    for name, text in {"a.cu": "common/b", "common/b.cuh": "common/c", "common/c.cuh": ""}.items():
        (tmp_path / name).write_text(f'#include "{text}.cuh"\n' if text else "// 1\n")
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    return tmp_path


def test_another_header_is_another_text(sources):
    before = launching.keyed("a.cu")
    assert before.startswith(launching.source("a.cu"))
    assert launching.keyed("a.cu") == before
    (sources / "common/c.cuh").write_text("// 2\n")
    assert launching.keyed("a.cu") != before


def test_machine_code_is_kept_until_text_options_or_compiler_change(sources, monkeypatch):
    kept, made = sources / "kept", []
    monkeypatch.setenv("CUPY_CACHE_DIR", str(kept))
    monkeypatch.setattr(
        launching, "_assembled", lambda *_: made.append(1) or b"code %d" % len(made)
    )
    old, new = (SimpleNamespace(getVersion=lambda v=v: (13, v)) for v in (0, 1))
    for number, (nvrtc, given) in enumerate([(old, ()), (old, ("-DD=8",)), (new, ())], start=1):
        assert [launching._kept(nvrtc, "a.cu", given) for _ in "ab"] == [b"code %d" % number] * 2
    (sources / "common/c.cuh").write_text("// 2\n")
    assert launching._kept(old, "a.cu", ()) == b"code 4"
    assert len(list(kept.iterdir())) == 4
    monkeypatch.setenv("CUPY_CACHE_DIR", str(sources / "a.cu"))  # nothing can be cached
    assert [launching._kept(old, "a.cu", ()) for _ in "ab"] == [b"code 5", b"code 6"]

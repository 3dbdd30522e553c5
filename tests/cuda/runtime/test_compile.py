"""Kernels compile for sm_90 without spilling, and `launch` reports why none can run. No GPU needed.

If a change to a kernel needs more registers on purpose, record them:

    python tests/cuda/runtime/test_compile.py --write

This file is longer than most: it lists what is compiled for which kernels, and tests the messages.
"""

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

# a script finds the project only after the line above, hence imports that are not at the top (E402)
from kvindex_cuda.runtime import launch as launching  # noqa: E402
from kvindex_cuda.runtime.signature import BOUNDS  # noqa: E402

RECORDED = Path(__file__).with_name("registers.json")
ARCHITECTURE = "sm_90"
MORE = 8
"""Registers that a kernel may take beyond the recorded ones: the unit in which a warp gets them."""

KERNEL = re.compile(rf"__global__\s+void\s+{BOUNDS}(\w+)\(")

STEP = dict(D=128, GROUP=4, DTYPE=2)
VOTES = STEP | dict(CENTERED=1, PLANES=6, SAMPLING=0, RAGGED=0)
PREPARE = VOTES | dict(REGRESSION=0, LIMITED=0, PAGED=0, FP8_PAGES=0)
PAGED = dict(SAMPLING=1, LIMITED=1, RAGGED=1)
RERANK = VOTES | dict(BITS=3, SOFTCAP=0)
AGREE = dict(GROUP=4, SOFTCAP=0, POLICY=0, SAMPLING=0, COUNTS=0)
COARSE = dict(D=128, WIDE=0, FACTORS=0, TABLES=1)
ESTIMATE = dict(D=128, BITS=3, HEADS=4, BLOCK=128, DTYPE=0)
ATTENTION = dict(D=128, DV=128, HEADS=4, DTYPE=2, SOFTCAP=0, WIDTH=8, LANES=16)
ENCODE = dict(D=128, BITS=3, DTYPE=2, WIDE=1, RESIDENT=3, CENTERED=1, PAGED=0)
ENCODE |= dict(FP8_KEYS=0)
ATTEND = STEP | dict(DV=128, PARTS=1, SOFTCAP=0, CODEC=0, GIVEN=0, MIXED_ROWS=0, PAGED=0)
ATTEND |= dict(RAGGED=0, ONE_SEQUENCE=0, FP8_PAGES=0, MEASURED=0)
FP8_PAGES = dict(RAGGED=1, PAGED=1, CODEC=2, FP8_PAGES=1)
NEW_ROWS = [dict(FP8_PAGES=0, DTYPE=0), *(dict(FP8_PAGES=1, DTYPE=one) for one in (2, 0, 1))]
LATENTS = dict(D=576, DV=512, GROUP=128, PART=32, DTYPE=2, SOFTCAP=0, CODEC=0, RAGGED=0)
LATENTS |= dict(PAGED=0)
TILED = dict(D=576, GROUP=8, TILES=16, CENTERED=1, SAMPLING=0, RAGGED=0)
ALONE = TILED | dict(GROUP=2, TILES=1, SAMPLING=1, RAGGED=1)
PREPARES = dict(DTYPE=2, PLANES=6, REGRESSION=1, SIXTEENS=3)
COUNT = dict(D=128, GROUP=4)
WEIGH = COUNT | dict(BITS=3, SOFTCAP=0)
DEFINES = {
    "step/select_rows.cu": [
        AGREE,
        AGREE | dict(GROUP=8, POLICY=1),
        AGREE | dict(GROUP=1, SOFTCAP=1),
        AGREE | dict(SAMPLING=1),
        AGREE | dict(SAMPLING=1, GROUP=8),
        AGREE | dict(SAMPLING=1, COUNTS=13),
        AGREE | dict(SAMPLING=1, COUNTS=13, GROUP=8, SOFTCAP=1),
        AGREE | dict(SAMPLING=1, COUNTS=1, GROUP=16),
    ],
    "step/prepare_query.cu": [
        PREPARE,
        PREPARE | dict(GROUP=8),
        PREPARE | dict(D=64, DTYPE=1, PLANES=8),
        PREPARE | dict(D=256, GROUP=16),
        PREPARE | dict(SAMPLING=1, REGRESSION=1),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, D=64, GROUP=8, DTYPE=0),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, D=256, GROUP=16),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, RAGGED=1),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, D=576, GROUP=8),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, LIMITED=1),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, LIMITED=1, RAGGED=1),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, LIMITED=1, D=64, GROUP=8, DTYPE=0),
        PREPARE | dict(SAMPLING=1, REGRESSION=1, LIMITED=1, D=256, GROUP=16),
        PREPARE | dict(SAMPLING=1, LIMITED=1, D=120, GROUP=3, DTYPE=1),
        PREPARE | PAGED | dict(PAGED=1),
        PREPARE | PAGED | dict(PAGED=1, FP8_PAGES=1),
        PREPARE | PAGED | dict(PAGED=2),
        PREPARE | PAGED | dict(PAGED=2, FP8_PAGES=1, GROUP=8),
        PREPARE | PAGED | dict(PAGED=1, D=64, GROUP=8, DTYPE=0),
        PREPARE | PAGED | dict(PAGED=2, D=256, GROUP=16),
    ],
    "step/attend.cu": [
        ATTEND,
        ATTEND | dict(GROUP=8),
        ATTEND | dict(SOFTCAP=1, DTYPE=1),
        ATTEND | dict(D=64, DV=64, GROUP=3),
        ATTEND | dict(D=256, DV=256, GROUP=2),
        ATTEND | dict(CODEC=1),
        ATTEND | dict(CODEC=2, GROUP=8),
        ATTEND | dict(GIVEN=1),
        ATTEND | dict(GIVEN=2),
        ATTEND | dict(GIVEN=2, PARTS=4),
        ATTEND | dict(GIVEN=2, MIXED_ROWS=1),
        ATTEND | dict(RAGGED=1, GIVEN=2),
        ATTEND | dict(RAGGED=1, GIVEN=2, ONE_SEQUENCE=1),
        ATTEND | dict(RAGGED=1, GIVEN=2, ONE_SEQUENCE=1, GROUP=2, PARTS=2, MIXED_ROWS=1),
        ATTEND | dict(RAGGED=1, PAGED=1),
        ATTEND | dict(RAGGED=1, PAGED=1, GIVEN=2),
        ATTEND | FP8_PAGES,
        ATTEND | FP8_PAGES | dict(GIVEN=2),
        ATTEND | dict(RAGGED=1, PAGED=2),
        ATTEND | dict(RAGGED=1, PAGED=2, GIVEN=2),
        ATTEND | FP8_PAGES | dict(PAGED=2),
        ATTEND | FP8_PAGES | dict(PAGED=2, GIVEN=2),
        ATTEND | dict(RAGGED=1, PAGED=1, GIVEN=2, MEASURED=1),
        ATTEND | dict(RAGGED=1, PAGED=1, GIVEN=2, MEASURED=1, GROUP=2, PARTS=2),
        ATTEND | FP8_PAGES | dict(GIVEN=2, MEASURED=1),
        ATTEND | dict(RAGGED=1, PAGED=2, GIVEN=2, MEASURED=1),
        ATTEND | FP8_PAGES | dict(PAGED=2, GIVEN=2, MEASURED=1, GROUP=8),
        ATTEND | dict(CODEC=1, GIVEN=1, MIXED_ROWS=1),
        ATTEND | dict(CODEC=1, GIVEN=1, D=256, DV=256, GROUP=2),
    ],
    "step/prepare_latents.cu": [
        TILED | PREPARES,
        TILED | PREPARES | dict(TILES=2, SIXTEENS=1, SAMPLING=1),
        TILED | PREPARES | dict(SAMPLING=1),
        TILED
        | PREPARES
        | dict(D=128, DTYPE=0, PLANES=8, GROUP=5, TILES=4, CENTERED=0, REGRESSION=0, RAGGED=1),
        ALONE | PREPARES | dict(SIXTEENS=1, REGRESSION=0),
    ],
    "step/sample_latents.cu": [
        ALONE | dict(DTYPE=2, PLANES=6),
        TILED | dict(DTYPE=2, PLANES=6, SAMPLING=1),
        TILED | dict(DTYPE=2, PLANES=6, TILES=2, SAMPLING=1),
        TILED | dict(D=128, DTYPE=0, PLANES=8, GROUP=5, TILES=4, CENTERED=0, RAGGED=1),
    ],
    "step/vote_latents.cu": [
        ALONE | dict(DTYPE=2, PLANES=6, WARPGROUPS=1),
        TILED | dict(DTYPE=2, PLANES=6, WARPGROUPS=1),
        TILED | dict(DTYPE=2, PLANES=6, WARPGROUPS=1, SAMPLING=1),
        TILED | dict(DTYPE=2, PLANES=6, TILES=2, SAMPLING=1, WARPGROUPS=1),
        TILED | dict(DTYPE=2, PLANES=6, TILES=2, SAMPLING=1, WARPGROUPS=0),
        TILED
        | dict(D=128, DTYPE=0, PLANES=8, GROUP=5, TILES=4, CENTERED=0, RAGGED=1, WARPGROUPS=0),
        TILED
        | dict(D=128, DTYPE=0, PLANES=8, GROUP=5, TILES=4, CENTERED=0, RAGGED=1, WARPGROUPS=1),
    ],
    "step/estimate_latents.cu": [
        ALONE | dict(BITS=3, SOFTCAP=0),
        TILED | dict(BITS=3, SOFTCAP=0),
        TILED | dict(BITS=3, SOFTCAP=0, TILES=2, SAMPLING=1),
        TILED | dict(D=128, BITS=5, SOFTCAP=1, GROUP=4, TILES=5, RAGGED=1),
    ],
    "step/select_latents.cu": [
        dict(HEADS=128, SOFTCAP=0, POLICY=0, SAMPLING=0, COUNTS=0),
        dict(HEADS=20, SOFTCAP=1, POLICY=1, SAMPLING=0, COUNTS=0),
        dict(HEADS=2, SOFTCAP=0, POLICY=0, SAMPLING=1, COUNTS=0),
        dict(HEADS=128, SOFTCAP=0, POLICY=0, SAMPLING=1, COUNTS=0),
        dict(HEADS=128, SOFTCAP=0, POLICY=0, SAMPLING=1, COUNTS=13),
    ],
    "step/resident_latents.cu": [
        dict(D=576, DTYPE=2, GROUP=8, TILES=16, RAGGED=0),
        dict(D=128, DTYPE=0, GROUP=5, TILES=4, RAGGED=1),
    ],
    "step/attend_latents.cu": [
        LATENTS,
        LATENTS | dict(GROUP=16, PART=16),
        LATENTS | dict(GROUP=20, CODEC=1, SOFTCAP=1, RAGGED=1),
        LATENTS | dict(CODEC=2, DTYPE=1, PART=128),
        LATENTS | dict(D=128, DV=96, DTYPE=0),
        LATENTS | dict(RAGGED=1, PAGED=1),
        LATENTS | dict(RAGGED=1, PAGED=1, GROUP=16, PART=16),
    ],
    "ops/attention.cu": [
        ATTENTION,
        ATTENTION | dict(HEADS=8, SOFTCAP=1),
        ATTENTION | dict(DTYPE=0, WIDTH=4, LANES=32),
        ATTENTION | dict(D=256, DV=256, HEADS=1, LANES=32),
    ],
    "ops/coarse.cu": [
        COARSE,
        COARSE | dict(D=64),
        COARSE | dict(WIDE=1, FACTORS=1, TABLES=2),
        COARSE | dict(WIDE=1, FACTORS=2, TABLES=2),
        COARSE | dict(D=256, WIDE=1, FACTORS=1, TABLES=2),
    ],
    "step/candidates.cu": [dict(GROUP=4, RAGGED=0), dict(GROUP=16, RAGGED=1)],
    "ops/codes.cu": [{}],
    "step/vote.cu": [
        COUNT | dict(RAGGED=0),
        dict(D=256, GROUP=12, RAGGED=0),
        dict(D=64, GROUP=3, RAGGED=1),
    ],
    "ops/sampling.cu": [{}],
    "append/encode.cu": [
        ENCODE,
        ENCODE | dict(DTYPE=1),
        ENCODE | dict(DTYPE=0, RESIDENT=2),
        ENCODE | dict(D=64, RESIDENT=4),
        ENCODE | dict(D=64, BITS=0, DTYPE=1, WIDE=0, RESIDENT=2),
        ENCODE | dict(D=96, BITS=5),
        ENCODE | dict(D=120, RESIDENT=2),
        ENCODE | dict(D=256, RESIDENT=1),
        ENCODE | dict(D=576, RESIDENT=1),
        ENCODE | dict(CENTERED=0),
        ENCODE | dict(PAGED=1),
        ENCODE | dict(PAGED=1, FP8_KEYS=1),
        ENCODE | dict(PAGED=1, FP8_KEYS=1, D=256, RESIDENT=1),
    ],
    "ops/rerank.cu": [
        ESTIMATE,
        ESTIMATE | dict(HEADS=8, BLOCK=8, DTYPE=2),
        ESTIMATE | dict(D=64, BLOCK=64, HEADS=1),
        ESTIMATE | dict(D=256, BLOCK=256, BITS=5),
    ],
    "ops/fetch.cu": [dict(PIECE=1), dict(PIECE=16)],
    "ops/messages.cu": [
        dict(DV=128, GROUP=4, DTYPE=2, WIDE=1),
        dict(DV=24, GROUP=3, DTYPE=0, WIDE=0),
    ],
    "append/update_state.cu": [{}],
    "append/read_pages.cu": [{}],
    "append/measure_outputs.cu": [dict(DTYPE=dtype) for dtype in (2, 0, 1)],
    "append/write_pages.cu": NEW_ROWS,
    "append/gather_pages.cu": NEW_ROWS,
    "step/stage_token.cu": [STEP | dict(DV=128), dict(D=80, DV=24, DTYPE=0, GROUP=3)],
    "append/write_rows.cu": [{}],
    "step/rerank.cu": [
        RERANK,
        RERANK | dict(GROUP=8),
        RERANK | dict(BITS=5, SOFTCAP=1),
        RERANK | dict(D=64, GROUP=3),
        RERANK | dict(D=256, GROUP=1),
        RERANK | dict(SAMPLING=1),
        RERANK | dict(SAMPLING=1, D=256, GROUP=8),
        RERANK | dict(SAMPLING=1, RAGGED=1),
    ],
    "step/scan.cu": [
        VOTES,
        VOTES | dict(GROUP=8, PLANES=8),
        VOTES | dict(GROUP=16, PLANES=4),
        VOTES | dict(CENTERED=0, D=64, DTYPE=1),
        VOTES | dict(D=256),
        VOTES | dict(SAMPLING=1),
        VOTES | dict(SAMPLING=1, GROUP=16, PLANES=4),
        VOTES | dict(RAGGED=1),
        VOTES | dict(SAMPLING=1, RAGGED=1),
    ],
    "ops/select.cu": [dict(VOTES=0), dict(VOTES=1)],
    "step/query_table.cu": [STEP, STEP | dict(GROUP=8, DTYPE=1), dict(D=256, GROUP=12, DTYPE=0)],
    "step/rerank_blocks.cu": [
        WEIGH,
        WEIGH | dict(GROUP=8, SOFTCAP=1),
        WEIGH | dict(D=64, GROUP=3, BITS=5),
        WEIGH | dict(D=256, GROUP=12),
    ],
    "ops/transform.cu": [dict(DTYPE=dtype) for dtype in range(3)],
}
"""For each file, values of the compile-time constants that its header lists: the usual ones first,
then extreme ones.
"""

ROWS = [(file, defines) for file, rows in DEFINES.items() for defines in rows]


def few(files=DEFINES):
    """Return the rows as parameters of a test. All but the usual values of these files are slow."""
    usual = [(file, DEFINES[file][0]) for file in files]
    return [pytest.param(*row, marks=() if row in usual else pytest.mark.slow) for row in ROWS]


def named(file, defines):
    return " ".join([file, *(f"{name}={value}" for name, value in sorted(defines.items()))])


def compiled(file, defines):
    """Return registers, bytes of stack and spilled bytes of each kernel, by its name."""
    options = [*launching.options(file, tuple(defines.items())), "-ftz=true"]  # which CuPy adds
    path = launching.SOURCES / file
    architecture = f"{ARCHITECTURE}a" if defines.get("WARPGROUPS") else ARCHITECTURE
    target = ["-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", "/dev/null"]
    done = subprocess.run(["nvcc", *target, *options, path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{named(file, defines)} does not compile:\n{done.stderr[:4000]}")
    return usage(done.stderr)


def usage(log):
    """Return what `-Xptxas -v` prints for each kernel, including the functions that it calls."""
    found = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            mine = found[entry[1]] = dict(registers=0, stack_bytes=0, spill_bytes=0)
        elif "bytes stack frame" in line:
            stack, *spills = map(int, re.findall(r"(\d+) bytes", line))
            mine["stack_bytes"] += stack
            mine["spill_bytes"] += sum(spills)
        elif used := re.search(r"Used (\d+) registers", line):
            mine["registers"] = int(used[1])
    return found


@lru_cache
def compiler():
    """Return nvcc's release, for example "13.0", or None."""
    if shutil.which("nvcc") is None:
        return None
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    return re.search(r"release ([\d.]+)", said.stdout)[1]


def exceeded(found, recorded):
    """Return a message that lists the kernels which take more than is recorded."""
    wrong = [f"{name}: not recorded" for name in found.keys() - recorded.keys()]
    wrong += [f"{name}: recorded, but gone" for name in recorded.keys() - found.keys()]
    for name in found.keys() & recorded.keys():
        for part, most in recorded[name].items():
            allowed = most + MORE if part == "registers" else most
            if found[name][part] > allowed:
                wrong.append(f"{name}: got {found[name][part]} {part}, allowed are {allowed}")
    return sorted(wrong)


def write():
    """Compile everything and record what it takes."""
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda row: compiled(*row), ROWS)
        kernels = {named(*row): found for row, found in zip(ROWS, taken, strict=True)}
    result = {"nvcc": compiler(), "architecture": ARCHITECTURE, "kernels": kernels}
    RECORDED.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{RECORDED}: {len(kernels)} compilations with nvcc {result['nvcc']}")


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


def test_every_kernel_is_compiled_here():
    """If this fails, give the file a row in `DEFINES`, then run this file with `--write`."""
    assert {str(p.relative_to(launching.SOURCES)) for p in launching.SOURCES.rglob("*.cu")} == set(
        DEFINES
    )


@pytest.mark.parametrize("file", DEFINES)
def test_the_definitions_are_those_that_the_file_leaves_open(file):
    header = launching.source(file).split("#include")[0].replace("\n//", "")
    _, found, line = header.partition("Compile-time constants:")
    assert found
    wanted = set(re.findall(r"\b[A-Z][A-Z_0-9]+\b|\bD\b", re.sub(r"\(.*?\)", "", line)))
    for defines in DEFINES[file]:
        assert set(defines) == wanted


def test_what_is_recorded_is_what_is_compiled(recorded):
    """If this fails, run `python tests/cuda/runtime/test_compile.py --write`."""
    assert set(recorded["kernels"]) == {named(*row) for row in ROWS}
    for file, rows in DEFINES.items():
        found = [set(recorded["kernels"][named(file, defines)]) for defines in rows]
        assert set.union(*found) == set(KERNEL.findall(launching.source(file)))


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no nvcc on the PATH (CUDA toolkit) to compile with")
@pytest.mark.parametrize(
    ("file", "defines"),
    few(["step/prepare_query.cu", "step/attend.cu"]),
    ids=[named(*row) for row in ROWS],
)
def test_kernels_take_no_more_than_is_recorded(file, defines, recorded):
    found = compiled(file, defines)
    if compiler() != recorded["nvcc"]:
        # another compiler allocates registers in another way
        pytest.skip(f"compiles, but {RECORDED.name} is of nvcc {recorded['nvcc']}: {compiler()}")
    assert exceeded(found, recorded["kernels"][named(file, defines)]) == []


def test_what_the_compiler_says_is_read():
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16 bytes cumulative stack size
ptxas info    : Function properties for called
    8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    assert usage(log) == {
        "one": dict(registers=128, stack_bytes=24, spill_bytes=24),
        "two": dict(registers=40, stack_bytes=0, spill_bytes=0),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(registers=48), None),
        (dict(registers=49), "a: got 49 registers, allowed are 48"),
        (dict(spill_bytes=4), "a: got 4 spill_bytes, allowed are 0"),
        (dict(stack_bytes=17), "a: got 17 stack_bytes, allowed are 16"),
        (None, "a: recorded, but gone"),
    ],
)
def test_more_than_is_recorded_is_seen(change, message):
    before = {"a": dict(registers=40, stack_bytes=16, spill_bytes=0)}
    found = {} if change is None else {"a": before["a"] | change}
    assert exceeded(found, before) == ([message] if message else [])


@pytest.mark.skipif(compiler() is None, reason="no nvcc on the PATH (CUDA toolkit) to compile with")
def test_what_does_not_compile_is_told(tmp_path, monkeypatch):
    (tmp_path / "wrong.cu").write_text("__global__ void kernel(int* p) { *p = UNKNOWN; }")
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match=r"wrong.cu D=8 does not compile:\n(?s:.*)UNKNOWN"):
        compiled("wrong.cu", dict(D=8))


# Messages of `launch`


class FakeRuntime:
    """Versions of the CUDA runtime that CuPy was built for, and of the driver."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, runtime, driver):
        self.runtimeGetVersion = lambda: runtime
        self.driverGetVersion = driver if callable(driver) else lambda: driver


def fake_machine(monkeypatch, *, capability=(9, 0), runtime=13000, driver=13000, gpu=True):
    """CuPy, a GPU and a driver, as far as `checked` looks at them."""
    fake = FakeRuntime(runtime, driver)
    cupy = type("cupy", (), {"cuda": type("cuda", (), {"runtime": fake})})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return cupy


checked = launching.checked.__wrapped__  # without its cache


@pytest.mark.parametrize(
    "machine", [{}, dict(capability=(8, 0)), dict(driver=13020), dict(runtime=12090)], ids=str
)
def test_a_machine_that_can_is_taken(machine, monkeypatch):
    cupy = fake_machine(monkeypatch, **machine)
    assert checked(0) is cupy


def test_without_cupy_the_extra_to_install_is_named(monkeypatch):
    fake_machine(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'needs CuPy, .* install -e "\.\[cuda13\]"'):
        checked(0)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            dict(gpu=False),
            "needs an NVIDIA GPU, but torch finds none .* install a driver",
        ),
        (
            dict(capability=(7, 5)),
            r"got a GPU of compute capability 7\.5, allowed is 8\.0 or newer",
        ),
        (
            dict(driver=12080),
            r"got a driver for CUDA 12, but this CuPy is built for CUDA 13: update the driver, "
            r".*pip install cupy-cuda12x",
        ),
    ],
    ids=["no GPU", "old GPU", "old driver"],
)
def test_a_machine_that_cannot_is_told_what_to_do(machine, message, monkeypatch):
    fake_machine(monkeypatch, **machine)
    with pytest.raises(RuntimeError, match=f'backend="cuda".*{message}'):
        checked(0)


def test_a_driver_that_does_not_answer_is_an_error_of_its_own(monkeypatch):
    def silent():
        raise FakeRuntime.CUDARuntimeError("cudaErrorInsufficientDriver")

    fake_machine(monkeypatch, driver=silent)
    with pytest.raises(RuntimeError, match="CuPy cannot reach the driver: cudaErrorInsufficient"):
        checked(0)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("cpu",), "total: got tensors on cpu, allowed is a CUDA device"),
        (("meta", "cpu"), "total: got tensors on meta and cpu, allowed is one"),
    ],
)
def test_tensors_elsewhere_are_refused(devices, message, tmp_path, monkeypatch):
    names = [f"part{i}" for i in range(len(devices))]
    parameters = ", ".join(f"int* {name}" for name in names)
    (tmp_path / "any.cu").write_text(f'extern "C" __global__ void total({parameters}) {{}}')
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    tensors = [torch.zeros(4, dtype=torch.int32, device=device) for device in devices]
    arguments = dict(zip(names, tensors, strict=True))
    with pytest.raises(ValueError, match=message):
        launching.launch("any.cu", "total", (1,), (32,), arguments=arguments)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()

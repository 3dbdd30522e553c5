"""NVRTC accepts every kernel, with the options used on a machine with a GPU. No GPU needed.

NVRTC rejects some code that nvcc accepts, and has no CUDA headers. The test stops at PTX, in which
inline assembler is not checked; `test_compile.py` goes on to machine code if there is an nvcc.
"""

import ctypes
import re
from functools import lru_cache
from importlib import metadata

import pytest

from kvindex_cuda.runtime import launch as launching
from tests.cuda.runtime.test_compile import DEFINES, KERNEL, few, named

WHEEL = "nvidia-cuda-nvrtc"

NEWER, OLDER = (
    f"compute_{major}{minor}" for major, minor in (launching.OVERLAPS, launching.OLDEST)
)
LONG = {"ops/coarse.cu", "step/rerank.cu", "step/scan.cu", "step/select_rows.cu"}
LONG |= {file for file in DEFINES if file.endswith("_latents.cu")}
"""Files that take long to compile. The emulator compiles them, too, with another compiler."""
CASES = [
    pytest.param(
        *row.values,
        NEWER,
        marks=pytest.mark.slow if row.values[0] in LONG else row.marks,
    )
    for row in few()
]
CASES += [
    pytest.param(
        file,
        next(row for row in rows if not row.get("WARPGROUPS")),
        OLDER,
        marks=() if file == "ops/codes.cu" else pytest.mark.slow,
    )
    for file, rows in DEFINES.items()
]
"""The older architecture is compiled once per file, because only common.cuh depends on it."""


def paths():
    """Load the library. Its second half has to be loaded first, because it is looked up by name."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return []
    names = "libnvrtc-builtins.so.", "libnvrtc.so."
    return [str(file.locate()) for name in names for file in files if file.name.startswith(name)]


@lru_cache
def nvrtc():
    return [ctypes.CDLL(path) for path in paths()][-1]


needs_nvrtc = pytest.mark.skipif(
    not paths(), reason=f"needs the package {WHEEL} (in the extra `test` on Linux, x86-64)"
)


def text(program, what):
    """Return a part of NVRTC's result for a program: its `ProgramLog` or its `PTX`."""
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode()


def compiled(file, defines, architecture=NEWER):
    """Return the names of the kernels in a file's PTX, by which `launch` finds them.

    Kernels with warpgroup products are compiled to machine code, because their PTX is for one
    architecture only.
    """
    architecture = "sm_90a" if defines.get("WARPGROUPS") else architecture
    given = (
        *launching.options(file, tuple(defines.items())),
        *launching.ADDED,
        f"-arch={architecture}",
    )
    options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
    source, name = launching.source(file).encode(), file.encode()
    program = ctypes.c_void_p()
    nvrtc().nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    try:
        if nvrtc().nvrtcCompileProgram(program, len(given), options):
            log = text(program, "ProgramLog")[:4000]
            raise RuntimeError(f"{named(file, defines)} does not compile:\n{log}")
        return set(re.findall(r"\.entry (\w+)", text(program, "PTX")))
    finally:
        nvrtc().nvrtcDestroyProgram(ctypes.byref(program))


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "defines", "architecture"),
    CASES,
    ids=[f"{case.values[2]} {named(*case.values[:2])}" for case in CASES],
)
def test_every_kernel_compiles(file, defines, architecture):
    found = compiled(file, defines, architecture)
    assert found
    assert found <= set(KERNEL.findall(launching.source(file)))


WRONG = {
    "a member of a reference as a constant, which nvcc takes": (
        """
        struct Bins { static constexpr int EACH = 4; };
        template <class B> __device__ int each(const B& bins) {
            constexpr int EACH = bins.EACH;
            return EACH;
        }
        extern "C" __global__ void kernel(int* p) { *p = each(Bins()); }
        """,
        "cannot be used as a constant",
    ),
    "a header of CUDA": ("#include <cuda_fp16.h>", 'cannot open source file "cuda_fp16.h"'),
    "an unknown name": ("__global__ void kernel(int* p) { *p = UNKNOWN; }", "UNKNOWN"),
}


@needs_nvrtc
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_compile_is_told(what, tmp_path, monkeypatch):
    source, message = WRONG[what]
    (tmp_path / "wrong.cu").write_text(source)
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match=rf"wrong.cu D=8 does not compile:\n(?s:.*){message}"):
        compiled("wrong.cu", dict(D=8))

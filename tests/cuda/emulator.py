"""Run CUDA kernels on a CPU:

while `emulated()` is active, `runtime.launch` loads them for CPU tensors.

`emulator.h` says what a kernel may use, and which mistakes raise RuntimeError.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from kvindex_cuda.runtime import launch as launching
from kvindex_cuda.runtime.constants import constants
from kvindex_cuda.runtime.launch import Grid, Launch
from kvindex_cuda.runtime.signature import Signature, signature

HEADER = Path(__file__).with_name("emulator.h")
ORDERS = ("forward", "backward", "random")
CHECKS = "bounds,alignment,shift-exponent,integer-divide-by-zero,signed-integer-overflow"
FLAGS = (
    *("-std=c++17", "-Og", "-fPIC", "-w", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-fdata-sections", "-U_FORTIFY_SOURCE"),
    *(f"-fsanitize={CHECKS}", "-fno-sanitize-recover=all"),
)
LIMITS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024, 227 * 1024
"""Largest grid, largest block, threads per block, and bytes of dynamic shared memory (compute
capability 9.0).
"""

ENTRY = """
#line 1 "entry"
{fields}
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char* emulated_signature() {{ return emulator::Entry<{name}>::signature; }}
EXPORTED char* emulated_stacks() {{ return emulator::make_stacks(); }}
EXPORTED int emulated_launch(char* stacks, void** arguments, const unsigned* grid,
                             const unsigned* block, size_t shared_bytes, int order,
                             unsigned long long seed, char* message, size_t message_bytes) {{
    emulator::flushed = {flushed}, emulator::stacks = stacks;
    return emulator::Entry<{name}>::launch(arguments, grid, block, shared_bytes, order, seed,
                                           message, message_bytes);
}}
"""

SCRIPT = """
SECTIONS { shared : { __start_shared = .; *(.bss._ZZ*) __stop_shared = .; } } INSERT BEFORE .bss;
"""
"""For the linker: put static variables of functions, which is what `__shared__` becomes, next to
each other.
"""

_one_at_a_time = Lock()
_stacks: list[int] = []
"""Address of the stacks for the fibers of all launches, allocated with the first library."""


def available() -> bool:
    """Return True if there is a g++ to compile kernels with."""
    return shutil.which("g++") is not None


@contextmanager
def emulated(*, order: str = "forward", seed: int = 0) -> Iterator[None]:
    """Let `kvindex_cuda.runtime.launch.launch` accept CPU tensors.

    order: the order in which thread blocks, warps and lanes run: "forward", "backward" or "random",
    which depends on the seed.
    """
    before = launching.LOADERS.get("cpu")
    launching.LOADERS["cpu"] = partial(load, order=order, seed=seed)
    try:
        yield
    finally:
        del launching.LOADERS["cpu"]
        if before is not None:
            launching.LOADERS["cpu"] = before


def load(
    file: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    *,
    order: str = "forward",
    seed: int = 0,
) -> Launch:
    """Load kernel `name` of `kernels/<file>`: a `kvindex_cuda.runtime.launch.Loader`."""
    text, given = launching.source(file), constants(file) | dict(defines)
    return compile_text(text, name, tuple(given.items()), file=file, order=order, seed=seed)


def compile_text(
    text: str,
    name: str,
    defines: tuple[tuple[str, int], ...] = (),
    *,
    file: str = "text.cu",
    order: str = "forward",
    seed: int = 0,
) -> Launch:
    """Compile kernel `name` of a source text. file: its name in messages."""
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, allowed are {ORDERS}")
    # not with -D: the header must not see macros that are meant for the kernel
    opened = "".join(f"#define {key} {value}\n" for key, value in defines)
    head = f'#include "{HEADER.name}"\n{opened}#line 1 "{file}"\n'
    takes = signature(text, name)
    entry = ENTRY.format(
        name=name, flushed=int("double" not in text), fields="\n".join(_fields(takes))
    )
    library = _opened(_built(f"{head}{text}\n{entry}"))
    return partial(_run, library, takes, ORDERS.index(order), seed)


def _fields(takes: Signature) -> Iterator[str]:
    """Yield statements that compile only if a kernel's struct is laid out as its signature says."""
    if takes.by_value is None:
        return
    for (name, _), kind, place in zip(takes.fields, takes.formats, takes.places, strict=True):
        yield f"FIELD({takes.by_value}, {name}, {place}, '{kind}')"
    yield f'static_assert(sizeof({takes.by_value}) == {takes.packing.size}, "its size");'


@cache
def _built(program: str) -> Path:
    """Return the shared library of a program, compiled unless it has been before."""
    key = _key(program, SCRIPT, *launching.included(program))
    library = _folder() / f"{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
        source, unit, shared = (Path(scratch) / part for part in ("a.cpp", "a.o", "a.so"))
        source.write_text(program)
        (script := Path(scratch) / "a.ld").write_text(SCRIPT)
        where = f"-I{_header()}", f"-I{HEADER.parent}", f"-I{launching.SOURCES}"
        _checked("g++", *FLAGS, *where, "-c", source, "-o", unit)
        # without -fsanitize, because emulator.h has the handlers
        _checked("g++", "-shared", "-fuse-ld=bfd", unit, f"-Wl,-T,{script}", "-o", shared)
        shared.replace(library)
    return library


@cache
def _header() -> Path:
    """Return a folder with `emulator.h` as a precompiled header, which saves half of the compile
    time.
    """
    folder = _folder() / _key()
    folder.mkdir(exist_ok=True)
    compiled = folder / f"{HEADER.name}.gch"
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "made"
            _checked("g++", *FLAGS, "-x", "c++-header", HEADER, "-o", made)
            made.replace(compiled)
    return folder


def _key(*parts: str) -> str:
    """Return a name that depends on all that determines the compiler's output."""
    whole = "\0".join([*parts, *FLAGS, _compiler(), HEADER.read_text()])
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"kvindex-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _compiler() -> str:
    return _checked("g++", "--version")


def _checked(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile it:\n{done.stderr[:4000]}")
    return done.stdout


@cache
def _opened(library: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(library))
    opened.emulated_signature.restype = ctypes.c_char_p
    opened.emulated_launch.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_size_t),
    )
    opened.emulated_stacks.restype = ctypes.c_void_p
    if not _stacks:
        _stacks.append(opened.emulated_stacks())
    return opened


def _run(
    library: ctypes.CDLL,
    takes: Signature,
    order: int,
    seed: int,
    grid: Grid,
    block: Grid,
    arguments: list[Any],
    shared_bytes: int,
    overlap: bool = False,
) -> None:
    kinds, name = library.emulated_signature().decode(), takes.kernel
    if kinds != ("s" if takes.by_value else takes.formats):
        raise TypeError(f"{name}: got parameters {kinds}, allowed are {takes.formats}")
    if len(arguments) != len(takes.formats):
        raise TypeError(f"{name}: got {len(arguments)} arguments, allowed are {len(takes.formats)}")
    for (field, _), kind, value in zip(takes.fields, takes.formats, arguments, strict=True):
        _check(f"{name}.{field}", kind, value)
    values = ctypes.create_string_buffer(max(takes.packing.size, 1))
    takes.packing.pack_into(values, 0, *arguments)
    sizes = [(*dims, 1, 1, 1)[:3] for dims in (grid, block)]
    for dims, limit in zip(sizes, LIMITS[:2], strict=True):
        if any(not 0 < size <= most for size, most in zip(dims, limit, strict=True)):
            raise RuntimeError(f"{name}: got dimensions {dims}, allowed are {limit}")
    if (threads := sizes[1][0] * sizes[1][1] * sizes[1][2]) > LIMITS[2]:
        raise RuntimeError(f"{name}: got {threads} threads in a block, allowed are {LIMITS[2]}")
    if not 0 <= shared_bytes <= LIMITS[3]:
        raise RuntimeError(f"{name}: got {shared_bytes} bytes of shared memory, of {LIMITS[3]}")
    places = (0,) if takes.by_value else takes.places
    start = ctypes.addressof(values)
    passed = (ctypes.c_void_p * len(places))(*(start + place for place in places))
    message = ctypes.create_string_buffer(1024)
    with _one_at_a_time:
        failed = library.emulated_launch(
            _stacks[0],
            passed,
            *((ctypes.c_uint * 3)(*dims) for dims in sizes),
            *(shared_bytes, order, seed, message, len(message)),
        )
    if failed:
        raise RuntimeError(f"{name}: {message.value.decode()}")


def _check(which: str, kind: str, value: Any) -> None:
    """Raise TypeError for values that `kvindex_cuda.runtime.launch` never passes."""
    wanted = float if kind in "fd" else int
    if type(value) is not wanted:
        raise TypeError(f"{which}: got {value!r}, allowed is {wanted.__name__}")
    if kind == "P" and value != 0 and not 65536 <= value < 2**63:
        raise TypeError(f"{which}: got {value}, allowed is an address")

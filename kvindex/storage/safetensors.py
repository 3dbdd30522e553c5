"""Reading and writing of safetensors files, with torch and numpy only.

A file consists of the length of the header (8 bytes, little-endian), the header, and the bytes of
all tensors. The header is JSON: name of each tensor -> dtype, shape, and the positions of its first
byte and after its last byte. A file contains no code, and other libraries can read it. This reader
also checks the SHA-256 digest of the file, and raises ValueError if there are unused bytes between
tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from kvindex.storage.state import State

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's name of each dtype that a state may have -> the torch dtype."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_HEADER_BYTES = 10**8
"""Largest header that the format allows."""

PIECE = 2**22
"""Bytes to read at a time, so few that they are still in the CPU cache for the digest."""


SMALL_BYTES, MOST_OUTLINE_BYTES = 2**20, 2**24
"""Largest size in bytes of a tensor that `outline` reads, and of all these tensors together."""


class Written(NamedTuple):
    """Size and SHA-256 digest of a file."""

    nbytes: int
    digest: str


class _Place(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: list[int]
    nbytes: int


def write(path: Path, state: State) -> Written:
    """Write tensors from any device to a new file. Only one tensor at a time is copied to the CPU.

    Args:
        path: A path that does not exist yet.
        state: The tensors by name.

    Returns:
        Size and SHA-256 digest of the file.

    Raises:
        OSError: The file exists or cannot be written.
        TypeError: The dtype of a tensor is not in `DTYPES`.
    """
    names = sorted(
        state, key=lambda name: (-state[name].element_size(), name)
    )  # in descending order of element size, so that every tensor is aligned
    header, at = {}, 0
    for name in names:
        tensor = state[name]
        if tensor.dtype not in NAMES:
            raise TypeError(f"state[{name!r}]: got {tensor.dtype}, allowed is one of {[*NAMES]}")
        end = at + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in _pieces(text, (state[name] for name in names)):
            file.write(piece)
            digest.update(piece)
        to_disk(file)
        return Written(file.tell(), digest.hexdigest())


def outline(path: Path, written: Written) -> State:
    """Read only the small tensors of a file, to check a state before all of it is read.

    Large tensors get their shape and dtype from the header. The digest is not checked.

    Args:
        path: The file.
        written: Size and digest of the file.

    Returns:
        All tensors of the file; large tensors are on the meta device.

    Raises:
        ValueError: The file has another size, or its header is not valid.
        OSError: The file cannot be read.
    """
    state: State = {}
    with _opened(path, written) as file:
        places = [*_header(file, path, written.nbytes, hashlib.sha256())]
        at, left = file.tell(), MOST_OUTLINE_BYTES
        for place in places:
            if place.nbytes <= min(SMALL_BYTES, left):
                left -= place.nbytes
                file.seek(at)
                state[place.name] = _read_tensor(file, path, place, hashlib.sha256())
            else:
                like = torch.empty(place.shape, dtype=place.dtype, device="meta")
                state[place.name] = like
            at += place.nbytes
    return state


def read(path: Path, written: Written) -> State:
    """Read all tensors of a file to the CPU.

    Args:
        path: The file.
        written: Size and digest of the file.

    Returns:
        The tensors by name. They share no memory.

    Raises:
        ValueError: The file was changed after it was written.
        OSError: The file cannot be read.
    """
    with _opened(path, written) as file:
        digest = hashlib.sha256()
        state: State = {}
        for place in _header(file, path, written.nbytes, digest):
            state[place.name] = _read_tensor(file, path, place, digest)
        if digest.hexdigest() != written.digest:
            raise ValueError(
                f"{path}: got bytes with SHA-256 {digest.hexdigest()}, allowed is "
                f"{written.digest}, the digest of the saved file"
            )
    return state


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raise ValueError for a pipe, a device or a folder."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_NONBLOCK if os.name == "posix" else 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: got a pipe, a device or a folder, allowed is a regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def _opened(path: Path, written: Written) -> Iterator[BinaryIO]:
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != written.nbytes:
            raise ValueError(
                f"{path}: got a file of {nbytes} bytes, but {written.nbytes} were saved"
            )
        yield file


def _read_tensor(file: BinaryIO, path: Path, place: _Place, digest: Any) -> Tensor:
    raw = torch.empty(place.nbytes, dtype=torch.uint8, device="cpu")
    view = _view(raw)
    for start in range(0, place.nbytes, PIECE):
        piece = view[start : start + PIECE]
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]  # of a buffered file
            raise ValueError(f"{path}: got a file that became shorter while it was read")
        digest.update(piece)
    return raw.view(place.dtype).view(place.shape)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def to_disk(file: BinaryIO) -> None:
    """Write the buffers of a file to disk, so that errors are raised here and not later."""
    file.flush()
    os.fsync(file.fileno())


def _pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in order: length of the header, header, and each tensor."""
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        yield _view(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))


def _view(raw: Tensor) -> memoryview:
    """Return the memory of a uint8 tensor `[n]` on the CPU."""
    array: Any = raw.numpy()
    return memoryview(array)


def _header(file: BinaryIO, path: Path, nbytes: int, digest: Any) -> Iterator[_Place]:
    """Read and check the header, and yield the name, dtype, shape and size of each tensor.

    The tensors are in the order in which they are stored.
    """
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(nbytes - 8, MOST_HEADER_BYTES):
        raise ValueError(f"{path}: got no header, allowed is a file in safetensors format")
    text = file.read(length)
    digest.update(first)
    digest.update(text)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        places = sorted((part["data_offsets"], name) for name, part in header.items())
        found, at = [], 0
        for (begin, end), name in places:
            dtype, shape = DTYPES[header[name]["dtype"]], header[name]["shape"]
            size = prod(shape) * torch.empty(0, dtype=dtype).element_size()
            if begin != at or end - begin != size or not all(_is_size(n) for n in (at, *shape)):
                raise ValueError(name)
            found.append(_Place(name, dtype, shape, size))
            at = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: got a header that does not describe all tensors ({error!r}), allowed is a "
            "file in safetensors format"
        ) from error
    if at != nbytes - 8 - length:
        raise ValueError(
            f"{path}: got {nbytes - 8 - length} bytes of tensors, but the header describes {at} "
            "bytes"
        )
    yield from found

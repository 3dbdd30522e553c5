"""Files of tensors: what is written is read, also by the library of the format's authors."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvindex.storage import safetensors as files
from kvindex.storage.safetensors import DTYPES, Written, read, write


def tensors():
    """Return a tensor of each dtype, of odd sizes, and some without dimensions, entries or
    order."""
    torch.manual_seed(0)
    some = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    some |= {"scalar": torch.tensor(7), "none": torch.empty(2, 0, 3), "": torch.ones(1)}
    return some | {"turned": torch.randn(4, 6).T, "long é": torch.randn(1000)}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("piece", [7, files.PIECE])
def test_what_is_written_is_read(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(files, "PIECE", piece)
    state, path = tensors(), tmp_path / "state"
    written = write(path, state)
    assert written.nbytes == path.stat().st_size
    assert_same(read(path, written), state)
    with torch.device("meta"):
        assert_same(read(path, written), state)


def test_the_formats_own_library_reads_it_and_writes_what_is_read(tmp_path):
    state = {name: tensor.contiguous() for name, tensor in tensors().items()}
    write(tmp_path / "ours", state)
    assert_same(load_file(tmp_path / "ours"), state)
    save_file(state, tmp_path / "theirs", metadata={"a": "b"})
    content = (tmp_path / "theirs").read_bytes()
    written = Written(len(content), hashlib.sha256(content).hexdigest())
    assert_same(read(tmp_path / "theirs", written), state)


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"state\['a'\]: got torch.complex128, allowed is one of"):
        write(tmp_path / "state", {"a": torch.zeros(1, dtype=torch.complex128)})
    assert not (tmp_path / "state").exists()


def one(**changes):
    return {"a": {"dtype": "U8", "shape": [2, 4], "data_offsets": [0, 8], **changes}}


HEADERS = {
    "a gap": one(data_offsets=[1, 9]),
    "more bytes": one(shape=[2, 5]),
    "other bytes": one(dtype="F32"),
    "unknown dtype": one(dtype="object"),
    "negative": one(shape=[-2, -4]),
    "no offsets": {"a": {"dtype": "U8", "shape": [8]}},
    "overlap": one() | {"b": one()["a"]},
    "no tensors": [1],
    "no mapping": {"a": 3},
    "floats": one(shape=[2.0, 4.0]),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_tell_where_tensors_lie_is_refused(tmp_path, header):
    refuse(tmp_path, json.dumps(header).encode())


@pytest.mark.parametrize("text", [b"", b"[" * 10**5, b"\xff" * 8, b"{}"])
def test_what_is_no_header_is_refused(tmp_path, text):
    refuse(tmp_path, text)
    refuse(tmp_path, text, length=2**63)


def refuse(tmp_path, text, length=None):
    path = tmp_path / "state"
    length = len(text) if length is None else length
    content = length.to_bytes(8, "little") + text + bytes(8)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"got (a|no) header|bytes of tensors"):
        read(path, Written(len(content), hashlib.sha256(content).hexdigest()))

"""For forged folders, `load` quickly returns an index or raises an error with a clear message.

All digests are right, because whoever changes a file can also write its digest.
"""

import contextlib
import copy
import os
import time

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from kvindex.storage.safetensors import Written, outline, read
from kvindex.storage.state import ABOUT
from tests.contract.test_forged_state import changes
from tests.contract.test_state import CASE, made
from tests.support.forged import (
    MANIFEST,
    TENSORS,
    describe,
    manifest_of,
    number,
    put,
    resigned,
    sign,
    tensors_of,
)
from tests.support.helpers import mostly_slow
from tests.support.sequences import SIZES, Sequence

SECONDS = 10
"""Time limit. A load takes milliseconds, and an error takes no longer."""


@pytest.fixture
def folder(tmp_path):
    index = kvindex.create("pariskv", q_heads=4, kv_heads=2, head_dim=32, backend="torch")
    keys = torch.randn(1, 2, 600, 32)
    index.append(keys, keys)
    index.save(tmp_path / "saved")
    return tmp_path / "saved"


def refused(folder, match, backend="torch"):
    start = time.perf_counter()
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        kvindex.load(folder, backend=backend)
    assert time.perf_counter() - start < SECONDS


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("length", [-1, 0, 599, 601, 10**6, 10**9, 2**62])
def test_another_length_than_that_of_the_rows_is_refused(folder, length, backend):
    if backend == "cpu":
        pytest.importorskip("numba")
    put(folder, tensors_of(folder) | {"length": number(length)})
    refused(folder, r"state\['", backend)


@pytest.mark.parametrize("name", ["head_dim", "value_dim", "q_heads", "kv_heads"])
@pytest.mark.parametrize("size", [2**20, 2**12, 64, 0, -8, None, "32", 32.0, True, [32]])
def test_a_geometry_is_compared_before_an_index_is_made(folder, name, size):
    manifest = manifest_of(folder)
    manifest["about"]["geometry"][name] = size
    sign(folder, manifest)
    refused(folder, rf"{name}|state\['rows'\]|index")


def test_a_sparse_file_of_8_gib_is_not_read(folder, monkeypatch):
    state = tensors_of(folder)
    put(folder, state | {"rows": torch.zeros(1, 2, 700, 256, dtype=torch.uint8)})
    path = folder / TENSORS
    with path.open("r+b") as file:
        file.truncate(8 * 2**30)
    refused(folder, r"got a file of 8589934592 bytes, but \d+ were saved")
    describe(folder, TENSORS, Written(8 * 2**30, "0" * 64))
    refused(folder, "bytes of tensors, but the header describes")


def test_a_tensor_of_8_gib_is_not_read_where_none_is_wanted(folder):
    # "zeros" is the last tensor
    put(folder, tensors_of(folder) | {"zeros": torch.empty(0, dtype=torch.uint8)})
    path = folder / TENSORS
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    end = len(content) - 8 - length
    old, new = (f'"shape": [{n}], "data_offsets": [{end}, {end + n}]'.encode() for n in (0, 2**33))
    header = content[8 : 8 + length]
    assert old in header
    header = header.replace(old, new)
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + content[8 + length :])
        file.truncate(file.tell() + 2**33)
    describe(folder, TENSORS, Written(path.stat().st_size, "0" * 64))
    refused(folder, "zeros")


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name == TENSORS:
        describe(folder, TENSORS, Written(0, "0" * 64))
        with pytest.raises(ValueError, match="a pipe, a device or a folder"):
            read(folder / name, Written(0, "0" * 64))
        with pytest.raises(ValueError, match="a pipe, a device or a folder"):
            outline(folder / name, Written(0, "0" * 64))
    refused(folder, "a pipe, a device or a folder|has no manifest.json")


def test_a_link_is_followed_to_a_file_and_refused_to_anything_else(folder, tmp_path):
    before = kvindex.load(folder, backend="torch").state_dict()
    (folder / TENSORS).rename(tmp_path / "elsewhere")
    (folder / TENSORS).symlink_to(tmp_path / "elsewhere")
    after = kvindex.load(folder, backend="torch").state_dict()
    assert torch.equal(before["rows"], after["rows"])
    for target in ("/dev/zero", tmp_path / "nowhere", tmp_path):
        (folder / TENSORS).unlink()
        (folder / TENSORS).symlink_to(target)
        refused(folder, "a pipe, a device or a folder|has no|No such file|got a file of 0 bytes")


@pytest.mark.parametrize("row_codec", ["plain", "int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("spec", ["exact", "pariskv"])
def test_rows_that_are_not_numbers_are_refused(spec, row_codec):
    index, other = (made(spec, row_codec=row_codec) for _ in range(2))
    index.append(*CASE.tokens(30))
    state = index.state_dict()
    rows = state["rows"].clone()
    rows[1, 0, 7] = 255
    with pytest.raises(
        ValueError, match=r"state\['rows'\]: got a key .*sequence 1, KV head 0, token 7"
    ):
        other.load_state_dict({**state, "rows": rows})
    assert len(other) == 0
    other = made(spec, row_codec=row_codec, check=False)  # check=False looks for no NaN here either
    other.load_state_dict({**state, "rows": rows})


def leaves(value, path=()):
    """Return the paths of all fields of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def changed(manifest, path, new):
    manifest = copy.deepcopy(manifest)
    inside = manifest
    for key in path[:-1]:
        inside = inside[key]
    if new is leaves:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return manifest


WRONG = (leaves, None, [], {}, "x", -1, 1.5, True, 10**9)
"""Values that replace a field. `leaves` removes it."""


def assert_each_field_is_checked(folder, load, *, wrong=WRONG, but=()):
    """Load a folder with each field of its manifest wrong, except below the path `but`."""
    manifest = manifest_of(folder)
    del manifest["digest"]
    for path in leaves(manifest):
        left_out = not path or (but and path[: len(but)] == but)
        for new in () if left_out else wrong:
            sign(folder, changed(manifest, path, new))
            try:
                start = time.perf_counter()
                with contextlib.suppress(ValueError, FileNotFoundError):
                    load()
                late = time.perf_counter() - start > SECONDS
            except Exception as error:
                raise AssertionError(f"{path}, {new}: {error!r}") from error
            assert not late, (path, new)
    sign(folder, manifest)
    load()


SAVED = ["exact+reuse", "h2o+recall", "pariskv", "socket", "magicpig", "triattention", "quest"]


@pytest.mark.parametrize("spec", mostly_slow(SAVED, "socket", "quest"))
def test_each_field_of_a_manifest_is_checked(tmp_path, spec):
    index = made(spec)
    index.append(*CASE.tokens(20))
    index.save(tmp_path / "saved")
    assert_each_field_is_checked(
        tmp_path / "saved", lambda: kvindex.load(tmp_path / "saved", backend="torch")
    )


def test_each_field_of_the_manifest_of_a_layer_is_checked(tmp_path):
    layer = AttentionLayer(made("exact"), **SIZES)
    Sequence.of(CASE, 20).feed(layer, 0, 20)
    layer.save(tmp_path / "saved")
    assert_each_field_is_checked(
        tmp_path / "saved", lambda: kvindex.load(tmp_path / "saved", backend="torch")
    )


def layer():
    return AttentionLayer(made("pariskv"), **{**SIZES, "dense_below": 0})


def test_each_tensor_of_a_layer_is_checked():
    full = layer()
    Sequence.of(CASE, 40, [3, 0]).feed(full, 0, 40)
    state = full.state_dict()
    for name, part in state.items():
        for what, new in changes(name, part) if not name.endswith(ABOUT) else ():
            forged = {other: state[other] for other in state if other != name}
            forged |= {} if new is None else {name: new}
            empty, message = layer(), "served"
            try:
                empty.load_state_dict(resigned(forged))
            except ValueError as error:
                message = str(error)
            harmless = (name.rpartition(".")[2], what) == ("valid", "dropped")
            assert harmless or message.startswith("state["), (name, what, message)
            assert harmless or len(empty) == 0


@pytest.mark.parametrize("name", ["x\0y", "x\ud800y", 5, None])
def test_a_folder_whose_name_is_none_is_refused_by_name(tmp_path, name):
    target = os.path.join(tmp_path, name) if isinstance(name, str) else name
    with pytest.raises((ValueError, TypeError), match=r"folder: got .*, allowed is a path"):
        made("exact").save(target)
    assert list(tmp_path.iterdir()) == []

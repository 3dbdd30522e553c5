"""Saved folders are complete or absent, and a changed folder raises an error."""

import hashlib
import json
import pickle
import shutil

import pytest
import torch

import kvindex
from kvindex.storage import saved as folders
from kvindex.storage.saved import VERSION, SavedFolder, check_new, save_folder
from tests.support.helpers import Case, slow

STATE = {"a": torch.arange(100), "b": torch.zeros(3)}
CASE = Case()


class NoSpaceError(Exception):
    """An error of a part that fails."""


def test_a_folder_is_whole_or_not_there(tmp_path):
    def fail():
        raise NoSpaceError

    with pytest.raises(NoSpaceError):
        save_folder(tmp_path / "new", "index", {}, {"one": lambda: STATE, "two": fail})
    assert list(tmp_path.iterdir()) == []
    save_folder(tmp_path / "new", "index", {"x": 1}, {"one": lambda: STATE, "two": dict})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    there = SavedFolder.open(tmp_path / "new", ["index"])
    assert (there.kind, there.about) == ("index", {"x": 1})
    assert torch.equal(there.part("one")["a"], STATE["a"])
    assert there.part("two") == {}


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, state):
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write", full)
    with pytest.raises(OSError, match=r"folder: got .*new', which could not be written \(No space"):
        save_folder(tmp_path / "new", "index", {}, {"one": lambda: STATE})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_anew_and_nothing_is_asked_for_before(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link", "no/such/folder", "there/.."):
        with pytest.raises(OSError, match=r"folder: got .*; allowed is a new path"):
            save_folder(tmp_path / name, "index", {}, {"one": pytest.fail})
    assert check_new(tmp_path / "there/../new/") == tmp_path / "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


# What was changed


class Loaded:
    """An object whose pickle reports when it is loaded."""

    happened = False

    def __reduce__(self):
        return setattr, (Loaded, "happened", True)


def flipped(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edited(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path, by):
    path.write_bytes(path.read_bytes()[:-by])


def described(folder, text):
    """Return a manifest with the size and digest of another file."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / TENSORS).write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    manifest["files"][TENSORS] = {"nbytes": len(text), "digest": digest}
    manifest.pop("digest")
    whole = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**manifest, "digest": whole}))


MANIFEST, TENSORS = "manifest.json", "state.safetensors"
DAMAGE = {
    "no folder": (shutil.rmtree, "which has no 'manifest.json'|has no manifest.json"),
    "no manifest": (
        lambda f: (f / MANIFEST).unlink(),
        "has no manifest.json; only folders that save",
    ),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "lacks the saved file 'state.safetensors'"),
    "one more": (lambda f: (f / "x").touch(), "has the additional file 'x'"),
    "cut": (
        lambda f: cut(f / TENSORS, 1),
        r"safetensors: got a file of \d+ bytes, but \d+ were saved",
    ),
    "longer": (lambda f: (f / TENSORS).open("ab").write(b"x"), r"got a file of \d+ bytes, but"),
    "manifest cut": (lambda f: cut(f / MANIFEST, 20), "json: got no manifest of kvindex"),
    "flipped in the header": (lambda f: flipped(f / TENSORS, 40), "got a header|got bytes with"),
    "flipped in a tensor": (lambda f: flipped(f / TENSORS, -9), "got bytes with SHA-256 .*, allow"),
    "flipped at the end": (lambda f: flipped(f / TENSORS, -1), "got bytes with SHA-256 .*, allow"),
    "an older version": (
        lambda f: edited(f / MANIFEST, version=VERSION - 1),
        f"of version {VERSION - 1}, allowed is 'kvindex' of version {VERSION}; create the object",
    ),
    "a newer version": (
        lambda f: edited(f / MANIFEST, version=VERSION + 1),
        f"of version {VERSION + 1}, allowed is 'kvindex' of version {VERSION}",
    ),
    "another format": (lambda f: edited(f / MANIFEST, format="x"), "got format 'x' of version"),
    "another index": (
        lambda f: edited(f / MANIFEST, about={"index": "os:system"}),
        "got a manifest that was changed after it was saved",
    ),
    "another list": (lambda f: (f / MANIFEST).write_text("[]"), "got no manifest of kvindex"),
    "a pickle for a manifest": (
        lambda f: (f / MANIFEST).write_bytes(pickle.dumps(Loaded())),
        "got no manifest of kvindex",
    ),
    "a pickle for tensors": (
        lambda f: described(f, pickle.dumps(Loaded())),
        "got no header, allowed is a file in safetensors",
    ),
    "torch.save for tensors": (
        lambda f: torch.save(Loaded(), f / TENSORS),
        r"got a file of \d+ bytes, but",
    ),
}


@pytest.mark.parametrize(("damage", "match"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_as_it_was_saved_is_refused_in_words(tmp_path, damage, match):
    index, folder = CASE.index("pariskv"), tmp_path / "saved"
    index.append(*CASE.tokens(30))
    index.save(folder)
    damage(folder)
    empty = CASE.index("pariskv")
    for into in ({}, {"into": empty}):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            kvindex.load(folder, **into)
    assert len(empty) == 0
    assert not Loaded.happened
    empty.append(*CASE.tokens(3))  # the index still works


@pytest.mark.parametrize("step", [9, slow(1)])
def test_a_flipped_bit_is_seen_anywhere(tmp_path, step):
    index = CASE.index("exact")
    index.append(*CASE.tokens(2))
    index.save(tmp_path / "saved")
    for name in (MANIFEST, TENSORS):
        path = tmp_path / "saved" / name
        content = path.read_bytes()
        blank = {at for at, byte in enumerate(content) if name == MANIFEST and byte in b" \n"}
        for at in set(range(0, len(content), step)) - blank:
            flipped(path, at)
            with pytest.raises((ValueError, FileNotFoundError)):
                kvindex.load(tmp_path / "saved")
            path.write_bytes(content)
    assert len(kvindex.load(tmp_path / "saved")) == 2


def test_the_pickle_of_these_tests_would_say_so():
    pickle.loads(pickle.dumps(Loaded()))
    assert Loaded.happened
    Loaded.happened = False


def test_a_cache_is_no_index(tmp_path):
    save_folder(tmp_path / "saved", "cache", {}, {})
    with pytest.raises(ValueError, match="a saved cache, allowed is index or layer"):
        kvindex.load(tmp_path / "saved")


def test_a_folder_that_contains_a_saved_one_names_it(tmp_path):
    save_folder(tmp_path / "cache", "cache", {}, {})
    with pytest.raises(FileNotFoundError, match=r"did you mean '.*cache'\?$"):
        SavedFolder.open(tmp_path, ["cache"])

"""Saved folders: a manifest and safetensors files.

`manifest.json` contains the name and version of the format, the kind of object (index, layer or
cache), a recipe (the class and options with which an empty object is created), and the size and
SHA-256 digest of every file and of the manifest itself. A folder is written under a temporary name
and then renamed.

If a folder was changed after it was saved, reading raises ValueError before an object is created.
Nothing is unpickled, and no module is imported because a file names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvindex.storage.recipe import field
from kvindex.storage.safetensors import (
    MOST_HEADER_BYTES,
    MOST_OUTLINE_BYTES,
    Written,
    open_regular,
    outline,
    read,
    to_disk,
    write,
)
from kvindex.storage.state import State

FORMAT, VERSION = "kvindex", 4
"""Format and version in a manifest. Only folders of this version can be read. The version increases
with every change after which older folders would be read incorrectly."""

MANIFEST, ENDING = "manifest.json", ".safetensors"


def save_folder(
    folder: str | os.PathLike[str],
    kind: str,
    about: Mapping[str, Any],
    parts: Mapping[str, Callable[[], State]],
) -> None:
    """Write a new folder. If this fails, no incomplete folder is left.

    Args:
        folder: A path that does not exist yet.
        kind: What is saved: "index", "layer" or "cache".
        about: The class and options with which an empty object is created, as JSON (a recipe).
        parts: Name of each file -> a function that returns its tensors. The functions are called
            one after the other, so that only the tensors of one file are in memory at a time.

    Raises:
        OSError: The folder exists, or cannot be written.
        ValueError: The path is not valid, or a function of `parts` raises ValueError.
        TypeError: `folder` is not a path.
    """
    with new_folder(folder) as new:
        files: dict[str, Any] = {}
        for name, state in parts.items():
            files[name + ENDING] = write(new / (name + ENDING), state())._asdict()
        manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "about": about}
        manifest["files"] = files
        manifest["digest"] = _digest(manifest)
        with (new / MANIFEST).open("xb") as file:
            file.write(json.dumps(manifest, indent=1).encode() + b"\n")
            to_disk(file)


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields an empty folder to write to, and renames it to `folder` at the
    end.

    So the folder is either complete or absent, even if the process is killed. If the `with` block
    raises an exception, nothing remains.

    Args:
        folder: A path that does not exist yet.

    Raises:
        OSError: The folder exists, or cannot be written.
        ValueError: The path is not valid.
        TypeError: `folder` is not a path.
    """
    path = check_new(folder)
    new = _beside(path)
    try:
        new.mkdir()
        yield new
        new.rename(path)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(
                f"folder: got {str(folder)!r}, which could not be written "
                f"({error.strerror or error}); the incomplete folder was removed"
            ) from error
        raise


def check_new(folder: str | os.PathLike[str]) -> Path:
    """Check that a new folder can be created at this path, and return the absolute path.

    Args:
        folder: A path that does not exist yet.

    Raises:
        OSError: The folder exists, or cannot be created.
        ValueError: The path is not valid text.
        TypeError: `folder` is not a path.
    """
    try:
        path = Path(os.path.abspath(folder))
        os.fsencode(path)
    except (TypeError, UnicodeEncodeError) as error:
        kind = type(error) if isinstance(error, TypeError) else ValueError
        raise kind(f"folder: got {folder!r}, allowed is a path as text ({error})") from error
    if "\0" in str(path):
        raise ValueError(f"folder: got {str(folder)!r}, allowed is a path without a NUL character")
    reason = None
    if os.path.lexists(path):
        reason = "already exists"
    elif not path.parent.is_dir():
        reason = "has no existing parent folder"
    else:
        try:
            (trial := _beside(path)).mkdir()
            trial.rmdir()
        except OSError as error:
            reason = f"cannot be created ({error.strerror or error})"
    if reason:
        raise OSError(f"folder: got {str(folder)!r}, which {reason}; allowed is a new path")
    return path


@dataclass(frozen=True)
class SavedFolder:
    """A saved folder whose manifest and file sizes have been checked.

    Args:
        path: The folder.
        kind: What was saved: "index", "layer" or "cache".
        about: The class and options with which an empty object is created, as JSON (a recipe).
        files: Name of each file -> its size and SHA-256 digest.
    """

    path: Path
    kind: str
    about: dict[str, Any]
    files: dict[str, Written]

    @staticmethod
    def open(folder: str | os.PathLike[str], kinds: Collection[str]) -> SavedFolder:
        """Open a folder and check its manifest, without reading tensors.

        Args:
            folder: Path of the folder.
            kinds: The kinds of saved objects that are allowed.

        Raises:
            FileNotFoundError: The folder has no manifest.
            ValueError: The folder contains another kind of object, or was changed after it was
                saved.
        """
        path = Path(folder)
        if not (path / MANIFEST).is_file():
            inner = sorted(path.glob(f"*/{MANIFEST}"))  # such as the cache of a saved chat
            hint = f"; did you mean {str(inner[0].parent)!r}?" if inner else ""
            raise FileNotFoundError(
                f"folder: got {str(folder)!r}, which has no {MANIFEST}; only folders that save() "
                f"wrote can be loaded{hint}"
            )
        kind, about, files = _manifest(path / MANIFEST)
        if kind not in kinds:
            raise ValueError(
                f"folder: got {str(folder)!r}, which contains a saved {kind}, allowed is "
                f"{' or '.join(kinds)}"
            )
        for name in files:
            if (path / name).exists() and not (path / name).is_file():
                raise ValueError(
                    f"{path / name}: got a pipe, a device or a folder, allowed is a regular file"
                )
        there = {entry.name for entry in path.iterdir()} - {MANIFEST}
        for name in sorted(there ^ files.keys()):
            change = "lacks the saved file" if name in files else "has the additional file"
            raise ValueError(f"folder: got {str(folder)!r}, which {change} {name!r}")
        for name, file in files.items():
            if (size := (path / name).stat().st_size) != file.nbytes:
                raise ValueError(
                    f"{path / name}: got a file of {size} bytes, but {file.nbytes} were saved"
                )
        return SavedFolder(path, kind, about, files)

    def outline(self, name: str) -> State:
        """Read the small tensors of a file, so that they can be checked before `part` reads all
        tensors.

        Args:
            name: Name of the file, without its ending.

        Returns:
            All tensors of the file. If the file is large, its large tensors are on the meta device.

        Raises:
            ValueError: The file was changed after it was saved. For a large file, only its size and
                header are checked.
        """
        file = self._named(name)
        small = self.files[file].nbytes <= MOST_OUTLINE_BYTES
        return (read if small else outline)(self.path / file, self.files[file])

    def part(self, name: str) -> State:
        """Read all tensors of a file.

        Args:
            name: Name of the file, without its ending.

        Raises:
            ValueError: The file was changed after it was saved.
        """
        file = self._named(name)
        return read(self.path / file, self.files[file])

    def _named(self, name: str) -> str:
        file = name + ENDING
        if file not in self.files:
            raise ValueError(f"folder: got {str(self.path)!r}, which has no file {file!r}")
        return file


def _manifest(path: Path) -> tuple[str, dict[str, Any], dict[str, Written]]:
    """Read a manifest: the kind of object, its recipe, and the size and digest of each file.

    Raise ValueError if the manifest was changed.
    """
    try:
        with open_regular(path) as file:
            text = file.read(MOST_HEADER_BYTES + 1)
        if len(text) > MOST_HEADER_BYTES:
            raise ValueError(f"more than {MOST_HEADER_BYTES} bytes")
        manifest = json.loads(text)
        got = manifest["format"], manifest["version"]
        digest = manifest.pop("digest", None)
        found = _digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: got no manifest of {FORMAT}; only folders that save() wrote can be loaded"
        ) from error
    if got != (FORMAT, VERSION):
        raise ValueError(
            f"{path}: got format {got[0]!r} of version {got[1]!r}, allowed is {FORMAT!r} of "
            f"version {VERSION}; create the object again and save it with this version of kvindex"
        )
    if digest != found:
        raise ValueError(f"{path}: got a manifest that was changed after it was saved")
    where = f"{path}: manifest"
    kind = field(manifest, "kind", str, where=where)
    about = field(manifest, "about", dict, where=where)
    files = {}
    for name in field(manifest, "files", dict, where=where):
        parts = f"{where}.files[{name!r}]"
        nbytes = field(manifest["files"][name], "nbytes", int, where=parts)
        files[name] = Written(nbytes, field(manifest["files"][name], "digest", str, where=parts))
    return kind, about, files


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")

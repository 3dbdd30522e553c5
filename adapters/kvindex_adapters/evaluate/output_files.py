"""Check output files before a long computation, and write them completely or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PICTURES = (".png", ".pdf", ".svg")
"""File extensions that the option `--plot` accepts. Matplotlib chooses the format by extension."""


def check_output(name: str, path: Path | None, *, endings: tuple[str, ...] = ()) -> None:
    """Check that a file can be written. Commands call this function before a long computation.

    The check creates a temporary file in the folder of `path`, and removes it.

    Args:
        name: Name of the option, for the error message.
        path: The file to write. With None, nothing is checked.
        endings: Allowed file extensions. With an empty tuple, all extensions are allowed.

    Raises:
        OSError: The file cannot be written. The message gives the reason.
    """
    if path is None:
        return
    try:
        reason = _hindrance(path, endings)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise OSError(
            f"{name}: got {str(path)!r}, which cannot be written: {reason}; pass a file in a "
            "folder that exists and can be written"
        )


def _hindrance(path: Path, endings: tuple[str, ...]) -> str | None:
    """Return the reason why a file cannot be written, or None if it can be written.

    Raise OSError if the operating system reports an error.
    """
    if path.is_symlink() and not path.exists():
        return "it is a link to a file that does not exist"
    if not path.parent.is_dir():
        return "its folder does not exist"
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is a device, a pipe or a socket"
    if endings and path.suffix.lower() not in endings:
        return f"its name does not end in {' or '.join(endings)}"
    if path.exists() and not os.access(path, os.W_OK):
        return "it is a file without write permission"
    trial = _temporary(path)
    trial.touch()
    trial.unlink()
    return None


@contextmanager
def replacing(path: Path, name: str = "json") -> Iterator[Path]:
    """Replace a file only after its new content is complete.

    The `with` block writes the temporary file that this function yields. At the end of the block,
    the temporary file replaces `path`. If anything fails, `path` remains unchanged, and the
    temporary file is removed.

    Args:
        path: The file to replace.
        name: Name of the option, for the error message.

    Raises:
        OSError: The file system reports an error, for example that no space is left.
    """
    new = _temporary(path)
    try:
        yield new
        if path.exists():
            shutil.copymode(path, new)
        with new.open("rb") as whole:
            os.fsync(whole.fileno())  # some file systems only report here that no space is left
        new.replace(path.resolve())  # if `path` is a link, replace its target
    except OSError as error:
        raise OSError(
            f"{name}: got {str(path)!r}, which could not be written ({error.strerror or error}); "
            "its earlier content is unchanged"
        ) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def write_text(path: Path, text: str, name: str = "json") -> None:
    """Write a text file completely, or raise OSError and leave the file unchanged."""
    with replacing(path, name) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, result: Any, *, indent: int = 1) -> None:
    """Write a JSON file completely, or raise OSError and leave the file unchanged."""
    write_text(path, json.dumps(result, indent=indent) + "\n")


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Save a matplotlib figure to a file. If this fails, raise OSError and keep the old file."""
    with replacing(path, "plot") as new:
        figure.savefig(new, dpi=dpi)


def output(*endings: str) -> Callable[[str], Path]:
    """Return a function for `type=` of argparse, which checks that an output file can be written.

    Args:
        endings: Allowed file extensions. Without any, all extensions are allowed.
    """

    def parsed(text: str) -> Path:
        try:
            check_output("", Path(text), endings=endings)
        except OSError as error:
            raise ArgumentTypeError(str(error).removeprefix(": ")) from error
        return Path(text)

    return parsed


def _temporary(path: Path) -> Path:
    """Return the path of a temporary file in the folder of `path`, with the same extension.

    If `path` is a link, the folder is that of the link's target.
    """
    real = path.resolve()
    return real.with_name(f".kvindex-{secrets.token_hex(4)}{real.suffix}")

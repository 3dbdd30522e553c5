"""Check output files before the work starts, and write them completely or not at all."""

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
"""Allowed endings of `--plot`. Matplotlib derives the format from the ending."""


def check_output(name: str, path: Path | None, *, endings: tuple[str, ...] = ()) -> None:
    """Raise OSError with the reason if a file could not be written after the work.

    The check creates a file next to `path` and removes it.

    Args:
        name: Name of the option, for the message.
        path: The file, or None for no check.
        endings: Allowed ends of the name, or empty for all.
    """
    if path is None:
        return
    try:
        reason = _hindrance(path, endings)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise OSError(
            f"{name}: got {str(path)!r}, allowed is a file in a folder that exists and can be "
            f"written; here {reason}"
        )


def _hindrance(path: Path, endings: tuple[str, ...]) -> str | None:
    """Return why the file cannot be written, or None. Raise OSError if the operating system reports
    an error."""
    if path.is_symlink() and not path.exists():
        return "is a link to a file that does not exist"
    if not path.parent.is_dir():
        return "is no such folder"
    if path.is_dir():
        return "is a folder"
    if path.exists() and not path.is_file():
        return "is a device, a pipe or a socket"
    if endings and path.suffix.lower() not in endings:
        return f"is a name that does not end in {' or '.join(endings)}"
    if path.exists() and not os.access(path, os.W_OK):
        return "is a file without write permission"
    trial = _temporary(path)
    trial.touch()
    trial.unlink()
    return None


@contextmanager
def replacing(path: Path, name: str = "json") -> Iterator[Path]:
    """Open a context that writes a temporary file, which then replaces `path`.

    If anything fails, `path` is unchanged and the temporary file is removed.

    Args:
        path: The file to replace.
        name: Name of the option, for the message.

    Raises:
        OSError: The file system reports an error, for example no space or no permission.
    """
    new = _temporary(path)
    try:
        yield new
        if path.exists():
            shutil.copymode(path, new)
        with new.open("rb") as whole:
            os.fsync(whole.fileno())  # some file systems only report here that no space is left
        new.replace(path.resolve())  # replaces a link's target, not the link
    except OSError as error:
        raise OSError(
            f"{name}: got {str(path)!r}, which could not be written ({error.strerror or error}); "
            "its earlier content is unchanged"
        ) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def write_text(path: Path, text: str, name: str = "json") -> None:
    """Write a file completely or not at all. Raise OSError if that fails."""
    with replacing(path, name) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, result: Any, *, indent: int = 1) -> None:
    """Write a result as JSON, for `--json`. Raise OSError if that fails."""
    write_text(path, json.dumps(result, indent=indent) + "\n")


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure of matplotlib, for `--plot`. Raise OSError if that fails."""
    with replacing(path, "plot") as new:
        figure.savefig(new, dpi=dpi)


def output(*endings: str) -> Callable[[str], Path]:
    """Return a parser for argparse's `type=` that checks the path of an output file immediately."""

    def parsed(text: str) -> Path:
        try:
            check_output("", Path(text), endings=endings)
        except OSError as error:
            raise ArgumentTypeError(str(error).removeprefix(": ")) from error
        return Path(text)

    return parsed


def _temporary(path: Path) -> Path:
    """Return a temporary name with the same ending, in the folder of the file that `path` links
    to."""
    real = path.resolve()
    return real.with_name(f".kvindex-{secrets.token_hex(4)}{real.suffix}")

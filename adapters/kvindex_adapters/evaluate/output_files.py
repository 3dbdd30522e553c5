"""Output files: checked before the work starts, written whole or not at all."""

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
"""Allowed endings of `--plot`: matplotlib takes the format from them."""


def check_output(name: str, path: Path | None, *, endings: tuple[str, ...] = ()) -> None:
    """Raises OSError for a file that could not be written at the end, with the reason.

    A file is made beside `path` and removed again, which is what the end of the work will do.
    endings: allowed ends of the name; empty for all. A path of None is not checked.
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
    """The reason why the file cannot be written, if any. Raises OSError where the system does."""
    if path.is_symlink() and not path.exists():
        return "is a link to what is not there"
    if not path.parent.is_dir():
        return "is no such folder"
    if path.is_dir():
        return "is a folder"
    if path.exists() and not path.is_file():
        return "is a device, a pipe or a socket"
    if endings and path.suffix.lower() not in endings:
        return f"is a name that does not end in {' or '.join(endings)}"
    if path.exists() and not os.access(path, os.W_OK):
        return "is a file that must not be written"
    beside = _beside(path)
    beside.touch()
    beside.unlink()
    return None


@contextmanager
def replacing(path: Path, name: str = "json") -> Iterator[Path]:
    """A new file beside `path` to write to, which then becomes `path`; name: of the option.

    Where anything fails, `path` is what it was and the new file is gone. Raises OSError where the
    file system refuses (no space, no permission).
    """
    new = _beside(path)
    try:
        yield new
        if path.exists():
            shutil.copymode(path, new)
        with new.open("rb") as whole:
            os.fsync(whole.fileno())  # some file systems report only now that there is no space
        new.replace(path.resolve())  # a link stays a link
    except OSError as error:
        raise OSError(
            f"{name}: got {str(path)!r}, which could not be written ({error.strerror or error}); "
            "what it held before is as it was"
        ) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def write_text(path: Path, text: str, name: str = "json") -> None:
    """Write a whole file or nothing. Raises OSError."""
    with replacing(path, name) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, result: Any, *, indent: int = 1) -> None:
    """Write a result, for `--json`. Raises OSError."""
    write_text(path, json.dumps(result, indent=indent) + "\n")


def save_figure(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure of matplotlib, for `--plot`. Raises OSError."""
    with replacing(path, "plot") as new:
        figure.savefig(new, dpi=dpi)


def output(*endings: str) -> Callable[[str], Path]:
    """For argparse's `type=`: the path of an output file, checked while arguments are read."""

    def parsed(text: str) -> Path:
        try:
            check_output("", Path(text), endings=endings)
        except OSError as error:
            raise ArgumentTypeError(str(error).removeprefix(": ")) from error
        return Path(text)

    return parsed


def _beside(path: Path) -> Path:
    """A name in the folder of the file that `path` is or links to; it keeps the ending."""
    real = path.resolve()
    return real.with_name(f".kvindex-{secrets.token_hex(4)}{real.suffix}")

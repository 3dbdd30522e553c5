"""Checks of command-line arguments that run before torch and transformers are imported.

These imports take seconds, and more than a minute on a busy machine. So a wrong file name or a
misspelled option is reported first.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

DTYPES = ("bfloat16", "float16", "float32", "int8")
"""Names of the dtypes that `kvindex_adapters.hf.model.load_model` knows."""

ENGINES = ("decoder", "transformers")
"""Values of `--engine`."""

VERIFIERS = ("index", "full")
"""Values of `--verify`."""


def check_name(name: str, value: str | None, allowed: Collection[str]) -> None:
    """Raise ValueError if the value of an option is neither None nor one of the allowed names."""
    if value is not None and value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed is one of {sorted(allowed)}")


def check_model(model: str, name: str = "model") -> None:
    """Raise FileNotFoundError if a model is a path, and not a hub id, and does not exist.

    `name` is the option, for the message.
    """
    path = Path(model)
    if (path.is_absolute() or model.startswith((".", "~"))) and not path.exists():
        raise FileNotFoundError(f"{name}: got {model!r}, which does not exist")


def check_lora(lora: Path | None) -> None:
    """Raise FileNotFoundError if the file of `--lora` does not exist."""
    if lora is not None and not lora.is_file():
        raise FileNotFoundError(f"lora: got {str(lora)!r}, which is not a file")


def prompt_of(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the text of `--prompt` or of the file `--prompt-file`.

    Raises:
        ValueError: Both options or neither is given, or the text is blank.
        FileNotFoundError: There is no such file.
    """
    if (prompt is None) == (prompt_file is None):
        given = "neither" if prompt is None else "both"
        raise ValueError(f"prompt, prompt-file: got {given}; pass one of the two options")
    if prompt_file is not None:
        return read_text(prompt_file)
    assert prompt is not None
    return _not_blank("prompt", prompt)


def check_questions(questions: Sequence[str] | None) -> list[str]:
    """Return the questions as a list. Raise ValueError if a question is blank."""
    return [_not_blank("ask", question) for question in questions or ()]


def read_text(path: Path, name: str = "prompt-file") -> str:
    """Read a text file, or standard input if the path is `-`.

    A UTF-8 byte order mark at the beginning is removed.

    Args:
        path: The file, or `-`.
        name: Name of the option, for error messages.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: The path is a folder.
        ValueError: The text is empty or not UTF-8.
    """
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise ValueError(
                f"{name}: got '-', which reads standard input, but standard input is closed; pass "
                "the name of a file"
            )
        content = sys.stdin.buffer.read()
    elif path.is_dir():
        raise IsADirectoryError(
            f"{name}: got the folder {str(path)!r}, allowed is a text file, or - for standard "
            f"input; pass the files in it one by one"
        )
    elif path.exists():
        content = path.read_bytes()
    else:
        raise FileNotFoundError(
            f"{name}: got {str(path)!r}, allowed is a file that exists, or - for standard input"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: got {str(path)!r}, allowed is UTF-8 text") from error
    if not text.strip():
        raise ValueError(f"{name}: got {str(path)!r}, which is empty; pass a file with text")
    return text


def _not_blank(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: got {text!r}, allowed is a text that is not blank")
    return text

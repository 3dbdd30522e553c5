"""Checks that need no model, so that a mistake shows before one is loaded."""

from __future__ import annotations

from pathlib import Path

import kvindex
from kvindex import check


def check_search(index: str, k: int) -> None:
    """Raises ValueError for an index that cannot be made, or a `k` below 1."""
    check.at_least("k", k, 1)
    kvindex.create(index, q_heads=1, kv_heads=1, head_dim=8)


def read_text(path: Path) -> str:
    """The text of a file. Raises FileNotFoundError or ValueError naming `--prompt-file`."""
    if not path.is_file():
        raise FileNotFoundError(f"prompt-file: got {str(path)!r}, allowed is a file that exists")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt-file: got {str(path)!r}, allowed is UTF-8 text") from error
    if not text.strip():
        raise ValueError(f"prompt-file: got {str(path)!r}, which is empty; allowed is some text")
    return text

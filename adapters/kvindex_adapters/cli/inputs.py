"""Checks that need no model, so that a mistake shows before one is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

import kvindex
from kvindex import check
from kvindex.geometry import Geometry
from kvindex_adapters.hf.attach import check_index

INDEX = "Index, as name:option=value:…; pariskv unless given"
"""Of an option's help."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_dtype(dtype: str) -> torch.dtype:
    """The type of that name. Raises ValueError for another."""
    return DTYPES[check.one_of("dtype", dtype, sorted(DTYPES))]


def check_device(device: str) -> None:
    """Raises ValueError for a device that this torch does not have."""
    Geometry.of(q_heads=1, kv_heads=1, head_dim=8, device=device)


def check_search(index: str, k: int, device: str) -> None:
    """Raises ValueError for an index that cannot be made, or a `k` below 1."""
    check.at_least("k", k, 1)
    check_index(index)
    rope = torch.ones(4, device=device)  # the model's own comes later
    kvindex.create(index, q_heads=1, kv_heads=1, head_dim=8, device=device, rope=rope)


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

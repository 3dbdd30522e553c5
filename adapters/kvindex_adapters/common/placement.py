"""Default backend and store of an index: CUDA kernels, with rows in pinned host memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import torch

from kvindex.core import backend
from kvindex.core.capability import capability
from kvindex.core.config import parse_spec
from kvindex.core.protocol import KVIndex, Reserves, ReservesAhead


def default_placement(
    device: torch.device | str | None, index: str, options: Collection[str] = ()
) -> dict[str, Any]:
    """Choose the backend and the store of an index, unless they are given.

    On a GPU these are `backend="cuda"` and `store="host"` (pinned memory that kernels read). If the
    kernels cannot run, a warning states why, and the result is empty. On a CPU, it is empty, too.

    Args:
        device: The device of the index; None means a CPU.
        index: A name of an index, possibly with options.
        options: Names of the other options that the caller has set.

    Returns:
        Keyword arguments of the index.
    """
    named = {*parse_spec(index.partition("+")[0])[1], *options}
    if device is None or torch.device(device).type != "cuda" or "backend" in named:
        return {}
    try:
        backend.resolve("cuda").ready(torch.device(device))
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"the index runs as plain torch on the GPU: {error}", stacklevel=2)
        return {}
    defaults = {"backend": "cuda", "store": "host"}
    return {name: value for name, value in defaults.items() if name not in named}


def expect(indexes: Iterable[KVIndex], tokens: int, batch: int) -> None:
    """Start reserving memory for `tokens` tokens of `batch` sequences in the background."""
    for index in indexes:
        reserves = capability(index, ReservesAhead)
        if reserves is not None:
            reserves.reserve_ahead(tokens, batch=batch)


def make_room(indexes: Iterable[KVIndex], tokens: int) -> None:
    """Reserve memory for `tokens` tokens in total, if there is enough memory."""
    for index in indexes:
        reserves = capability(index, Reserves)
        if reserves is not None:
            with suppress(MemoryError):  # if the answer ends early, it may fit
                reserves.reserve(tokens)

"""Default placement of an index: CUDA kernels with rows in pinned host memory, where they run."""

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
    """Backend and store of an index on this device, unless its line or `options` name them.

    None on a CPU. On a GPU `backend="cuda"` and `store="host"` (pinned memory that kernels read),
    or none where the kernels cannot run, with a warning that says why.
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
    """Memory for so many tokens of so many sequences is got while they are being read."""
    for index in indexes:
        reserves = capability(index, ReservesAhead)
        if reserves is not None:
            reserves.reserve_ahead(tokens, batch=batch)


def make_room(indexes: Iterable[KVIndex], tokens: int) -> None:
    """Memory for so many tokens in all, before they come, where there is as much."""
    for index in indexes:
        reserves = capability(index, Reserves)
        if reserves is not None:
            with suppress(MemoryError):  # there may be fewer tokens
                reserves.reserve(tokens)

"""Default values of the options `backend` and `store` of an index.

On a GPU, the index uses CUDA kernels by default, and stores keys and values in pinned host memory.
"""

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
    """Choose default values for the options `backend` and `store` of an index.

    On a GPU these are `backend="cuda"` and `store="host"` (pinned memory that kernels read). The
    result is empty on a CPU, and if the kernels cannot run on this GPU. In the latter case a
    warning states why.

    Args:
        device: The device of the index; None means a CPU.
        index: Name of an index, possibly followed by options (`name:option=value`).
        options: Names of the options that the caller sets in addition to those in `index`.

    Returns:
        Keyword arguments for `kvindex.create`, without those that the caller sets.
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
    """Start to reserve memory in each index, in the background, for `tokens` tokens per sequence.

    The memory of the first index is allocated first. A call replaces an earlier one; 0 tokens end
    the allocation.
    """
    for index in indexes:
        reserves = capability(index, ReservesAhead)
        if reserves is not None:
            reserves.reserve_ahead(tokens, batch=batch)


def make_room(indexes: Iterable[KVIndex], tokens: int) -> None:
    """Reserve memory in each index for `tokens` tokens per sequence, if there is enough memory."""
    for index in indexes:
        reserves = capability(index, Reserves)
        if reserves is not None:
            with suppress(MemoryError):  # continue, because a short answer may still fit
                reserves.reserve(tokens)

"""The backend for CPUs: compiled versions of the functions in `kvindex.ops`, and of ParisKV.

The backend needs Numba. Kernels are compiled when they first run, and the compiled code is stored
on disk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Executor
from kvindex.cpu import fetch, group, select, units
from kvindex.cpu.pariskv import precompile, supported
from kvindex.cpu.pariskv.executor import ParisKVExecutor
from kvindex.cpu.pariskv.tiered_votes import TieredVotesExecutor
from kvindex.cpu.store import CompiledStore
from kvindex.ops import attention, coarse, codes, messages, rerank, sampling, transform
from kvindex.pariskv.config import ParisKVConfig

__all__ = [
    "accelerate",
    "attention",
    "coarse",
    "codes",
    "fetch",
    "group",
    "messages",
    "ready",
    "refusal",
    "rerank",
    "sampling",
    "select",
    "store",
    "transform",
    "units",
]


def ready(device: torch.device) -> None:
    """Check that the backend can run on `device`.

    Raises:
        ValueError: The device is not a CPU.
    """
    if device.type != "cpu":
        raise ValueError(f"device: got {device} with backend='cpu', allowed is 'cpu'")


def store(
    geometry: Geometry, place: str, row_codec: str = "plain", device_fraction: float | None = None
) -> CompiledStore:
    """Create a store for rows (keys and values of tokens), which keeps them in tensors on the CPU.

    Args:
        geometry: Sizes of heads and vectors.
        place: Memory of the rows, "device" or "host"; both are the CPU's memory here.
        row_codec: Codec that compresses the rows, or "plain".
        device_fraction: Ignored, because all rows are in the CPU's memory.
    """
    return CompiledStore(geometry, place, row_codec)


def accelerate(
    geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """Create an executor, which runs an index with compiled kernels.

    Args:
        geometry: Sizes of heads and vectors.
        config: Configuration of the index; only ParisKV's is supported.
        constants: Rotation and magnitude levels of a ParisKV index.

    Returns:
        The executor, or None if the kernels do not support the index.
    """
    if not isinstance(config, ParisKVConfig) or supported.refusal(config, geometry):
        return None
    precompile.begin(config)
    kind = TieredVotesExecutor if config.coarse == "tiered_votes" else ParisKVExecutor
    return kind.of(geometry, config, **constants)


def refusal(geometry: Geometry, config: object) -> str:
    """Return why the kernels do not support an index, or "none" if they support it."""
    if not isinstance(config, ParisKVConfig):
        return f"config: got {type(config).__name__}, allowed is ParisKVConfig"
    return supported.refusal(config, geometry) or "none"

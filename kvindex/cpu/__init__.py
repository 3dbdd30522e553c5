"""The backend for CPUs: compiled versions of `kvindex.ops`, and executors for ParisKV.

It needs Numba. Kernels are compiled when they first run, and the compiled code is stored on disk.
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
    """Raise ValueError for a device that is not a CPU."""
    if device.type != "cpu":
        raise ValueError(f"device: got {device} with backend='cpu', allowed is 'cpu'")


def store(
    geometry: Geometry, place: str, row_codec: str = "plain", device_fraction: float | None = None
) -> CompiledStore:
    """Create a store for rows: tensors on the CPU, as in plain torch."""
    return CompiledStore(geometry, place, row_codec)


def accelerate(
    geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """Create the executor that runs an index with kernels; None if they do not support the index.

    Args:
        geometry: Sizes of heads and vectors.
        config: Configuration of the index; only ParisKV's is supported.
        constants: Rotation and magnitude levels of a ParisKV index.
    """
    if not isinstance(config, ParisKVConfig) or supported.refusal(config, geometry):
        return None
    precompile.begin(config)
    kind = TieredVotesExecutor if config.coarse == "tiered_votes" else ParisKVExecutor
    return kind.of(geometry, config, **constants)


def refusal(geometry: Geometry, config: object) -> str:
    """Return why `accelerate` returns None, or "none"."""
    if not isinstance(config, ParisKVConfig):
        return f"config: got {type(config).__name__}, allowed is ParisKVConfig"
    return supported.refusal(config, geometry) or "none"

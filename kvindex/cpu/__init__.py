"""The backend for CPUs: the ops of `kvindex.ops`, and an executor compiled by Numba.

Importing it needs Numba; kernels are compiled when they run first and kept on disk.
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
    """Raises ValueError for a device that is not a CPU."""
    if device.type != "cpu":
        raise ValueError(f"device: got {device} with backend='cpu', allowed is 'cpu'")


def store(
    geometry: Geometry, place: str, row_codec: str = "plain", device_share: float | None = None
) -> CompiledStore:
    """Where rows live: in tensors, as of plain torch, wherever that is to be."""
    return CompiledStore(geometry, place, row_codec)


def accelerate(
    geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """What runs an index of this configuration on kernels; None where ops run one by one.

    constants: of a ParisKV: its rotation and levels.
    """
    if not isinstance(config, ParisKVConfig) or supported.refusal(config, geometry):
        return None
    precompile.begin(config)
    kind = TieredVotesExecutor if config.coarse == "tiered_votes" else ParisKVExecutor
    return kind.of(geometry, config, **constants)


def refusal(geometry: Geometry, config: object) -> str:
    """Why `accelerate` gives None."""
    if not isinstance(config, ParisKVConfig):
        return f"config: got {type(config).__name__}, allowed is ParisKVConfig"
    return supported.refusal(config, geometry) or "none"

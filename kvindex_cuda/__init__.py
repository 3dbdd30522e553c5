"""The ops of `kvindex.ops` as CUDA kernels: same names, same signatures, on CUDA tensors.

Importing it needs neither CuPy nor a GPU: the first launch does (`launch.checked`).
"""

from __future__ import annotations

import torch

from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.device_store import DeviceStore
from kvindex_cuda.ops import (
    attention,
    coarse,
    codes,
    fetch,
    learn,
    rerank,
    sampling,
    select,
    transform,
)
from kvindex_cuda.pariskv.append import writer
from kvindex_cuda.pariskv.executor import fused
from kvindex_cuda.runtime import launch

__all__ = [
    "attention",
    "coarse",
    "codes",
    "fetch",
    "fused",
    "learn",
    "ready",
    "rerank",
    "sampling",
    "select",
    "store",
    "transform",
    "writer",
]


def ready(device: torch.device) -> None:
    """Raises ValueError for a device that is no CUDA device, and as `launch.checked`."""
    if device.type not in launch.LOADERS:
        raise ValueError(f"device: got {device} with backend='cuda', allowed is a CUDA device")
    if device.type == "cuda":
        launch.checked(torch.cuda.current_device() if device.index is None else device.index)


def store(geometry: Geometry, place: str, row_codec: str = "plain") -> HostStore:
    """Where rows live: in blocks that kernels read, pinned on a GPU's host or on the device.

    row_codec: "plain", "int8" or "fp8" (`kvindex.storage.codecs`).
    """
    pinned = place == "host" and geometry.device.type == "cuda"
    return (
        HostStore(geometry, row_codec=row_codec)
        if pinned
        else DeviceStore(geometry, row_codec=row_codec)
    )

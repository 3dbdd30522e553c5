"""The ops of `kvindex.ops` as CUDA kernels: same names, same signatures, on CUDA tensors.

Importing it needs neither CuPy nor a GPU: the first launch does (`launch.checked`).
"""

from __future__ import annotations

import torch

from kvindex.geometry import Geometry
from kvindex_cuda import (
    attention,
    coarse,
    codes,
    draw,
    fetch,
    launch,
    learn,
    rerank,
    select,
    transform,
)
from kvindex_cuda.append import writer
from kvindex_cuda.device_store import DeviceStore
from kvindex_cuda.fused import fused
from kvindex_cuda.host_store import HostStore

__all__ = [
    "attention",
    "coarse",
    "codes",
    "draw",
    "fetch",
    "fused",
    "learn",
    "ready",
    "rerank",
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


def store(geometry: Geometry, place: str, rows: str = "plain") -> HostStore:
    """Where rows live: in blocks that kernels read, pinned on a GPU's host or on the device.

    rows: "plain", "int8" or "fp8" (`kvindex.rows`).
    """
    pinned = place == "host" and geometry.device.type == "cuda"
    return HostStore(geometry, rows=rows) if pinned else DeviceStore(geometry, rows=rows)

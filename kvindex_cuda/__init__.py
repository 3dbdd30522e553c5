"""CUDA backend of `kvindex`: kernels for indexes, stores and attention. Users choose it with the
option `backend="cuda"` and rarely import this package.

It contains:

- `accelerate`: returns an executor, which runs the steps of a ParisKV index with fused kernels
  (about five launches per decode step; `pariskv/`), or None if no executor supports the index;
- `attention`, `coarse`, `codes` and so on: the operations of `kvindex.ops` with the same names and
  signatures, for CUDA tensors (`ops/`);
- `store`: a store of keys and values in blocks of device memory, pinned host memory, or both
  (`memory/`);
- `kvindex_cuda.triton`: attention for prompts, and layers of language models, in Triton. It is
  imported by its full name;
- `kernels/`: the CUDA sources, which NVRTC compiles at their first launch (`runtime/`).

This package can be imported without CuPy and without a GPU. The first launch needs both (`ready`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Executor
from kvindex.ops import group, units
from kvindex.pariskv.config import ParisKVConfig
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.device_budget import DeviceBudget
from kvindex_cuda.memory.slab_cache import pinned
from kvindex_cuda.memory.slab_pool import DeviceAllocator, Tier
from kvindex_cuda.ops import (
    attention,
    coarse,
    codes,
    fetch,
    messages,
    rerank,
    sampling,
    select,
    transform,
)
from kvindex_cuda.pariskv import dispatch, executor
from kvindex_cuda.runtime import launch

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
    """Raise an error unless kernels can run on a device.

    Raises:
        ValueError: The device is not a CUDA device.
        ImportError: CuPy is not installed.
        RuntimeError: The GPU or its driver cannot run the kernels.
    """
    if device.type not in launch.LOADERS:
        raise ValueError(f"device: got {device}, but backend='cuda' needs a CUDA device")
    if device.type == "cuda":
        launch.checked(torch.cuda.current_device() if device.index is None else device.index)


def store(
    geometry: Geometry, place: str, row_codec: str = "plain", device_fraction: float | None = None
) -> BlockStore:
    """Return a store of keys and values, in blocks of memory that kernels can read.

    Args:
        geometry: Geometry of the index.
        place: "host" for pinned host memory, "device", or "auto" to use the device while it has
            room, then the host. For a CPU device, all three mean the same memory.
        row_codec: Codec of a row, one of `kvindex.storage.codecs.NAMES`.
        device_fraction: Fraction of the device's free memory that rows may use (see
            `memory.device_budget.DeviceBudget`).
    """
    device = geometry.device
    on_device = DeviceAllocator(device)
    if place == "device" or device.type != "cuda":
        return BlockStore(geometry, on_device, row_codec=row_codec)
    preferred = Tier(on_device, DeviceBudget(device, device_fraction)) if place == "auto" else None
    return BlockStore(geometry, pinned(device), row_codec=row_codec, preferred=preferred)


def accelerate(
    geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """Return an executor that runs an index with fused kernels, or None if none supports the index.

    Args:
        geometry: Geometry of the index.
        config: Configuration of the index. Only a `ParisKVConfig` can have an executor.
        constants: The rotation and levels of a ParisKV index.
    """
    if not isinstance(config, ParisKVConfig):
        return None
    return executor.executor_of(geometry, config, **constants)


def refusal(geometry: Geometry, config: object) -> str:
    """Return the reason why the CUDA kernels do not support an index, or "none" if they do.

    If there is a reason, `accelerate` returns None for the index instead of an executor.
    """
    if not isinstance(config, ParisKVConfig):
        return f"config: got {type(config).__name__}, allowed is ParisKVConfig"
    return dispatch.refusal(config, geometry) or "none"

"""Backends ("torch", "cuda", "cpu"): implementations of the operations that indexes use.

A backend implements the functions of `kvindex.ops`. It may also provide executors, which run a
whole index with compiled kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Executor

BACKENDS = {"torch": "kvindex.ops", "cuda": "kvindex_cuda", "cpu": "kvindex.cpu"}


def resolve(backend: str) -> ModuleType:
    """Return the Python module of the backend "torch", "cuda" or "cpu".

    Raises ValueError for an unknown name, and ImportError if the backend is not installed.
    """
    module = BACKENDS[check.one_of("backend", backend, BACKENDS)]
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"backend: got {backend!r}, but the package {module} is not installed; pass "
            'backend="torch", which works with CPU and CUDA tensors'
        )
    return importlib.import_module(module)


def choose(device: torch.device) -> tuple[str, str]:
    """Return the default backend for a device, and the reason.

    The backend is "cuda" or "cpu" if its kernels can run on this machine and device, and "torch"
    otherwise.
    """
    name = device.type
    if name not in ("cuda", "cpu"):
        return "torch", f"tensors are on {name!r}"
    try:
        resolve(name).ready(device)
    except (ImportError, RuntimeError, ValueError) as error:
        return "torch", f"kernels cannot run: {error}"
    return name, f"kernels run on {str(device)!r}"


def accelerate(
    backend: str, geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """Create an executor, which is an object that runs an index with compiled kernels.

    constants: tensors that the index derives from its configuration, by name. The result is None if
    the backend has no executor for this geometry and configuration.
    """
    if backend == "torch":
        return None
    made: Executor | None = resolve(backend).accelerate(geometry, config, constants)
    return made


def prompt_kernels(device: torch.device) -> ModuleType | None:
    """Return the module with kernels for sparse attention of prompts, or None to use plain torch.

    The kernels need a CUDA device, `kvindex_cuda`, and a Triton with tensor descriptors (3.3 or
    newer).
    """
    return _block_sparse() if device.type == "cuda" else None


@cache
def _block_sparse() -> ModuleType | None:
    needed = "kvindex_cuda", "triton", "triton.tools.tensor_descriptor"  # each before its parts
    if not all(importlib.util.find_spec(name) for name in needed):
        return None
    return importlib.import_module("kvindex_cuda.triton.block_sparse")


def refusal(backend: str, geometry: Geometry, config: object) -> str:
    """Return the reason why the backend has no executor for this geometry and configuration."""
    if backend == "torch":
        return "plain torch has no executor"
    why: str = resolve(backend).refusal(geometry, config)
    return why

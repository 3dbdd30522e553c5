"""Which implementation of the ops an index runs on, and what runs it whole, if anything does."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Executor

BACKENDS = {"torch": "kvindex.ops", "cuda": "kvindex_cuda", "cpu": "kvindex.cpu"}


def resolve(backend: str) -> ModuleType:
    """The module of ops behind a backend's name.

    Raises ValueError for an unknown name, ImportError where the backend is not installed.
    """
    module = BACKENDS[check.one_of("backend", backend, BACKENDS)]
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"backend: got {backend!r}, but {module} is not part of this installation; "
            'allowed is "torch", which runs on CPU and CUDA tensors alike'
        )
    return importlib.import_module(module)


def choose(device: torch.device) -> tuple[str, str]:
    """The backend of an index that is told of none, and why.

    "cuda" or "cpu", whose kernels run on such a device, where this machine has what they need.
    """
    name = device.type
    if name not in ("cuda", "cpu"):
        return "torch", f"tensors lie on {name!r}"
    try:
        resolve(name).ready(device)
    except (ImportError, RuntimeError, ValueError) as error:
        return "torch", f"kernels cannot run: {error}"
    return name, f"kernels run on {str(device)!r}"


def accelerate(
    backend: str, geometry: Geometry, config: object, constants: Mapping[str, Tensor]
) -> Executor | None:
    """What runs an index of such a configuration whole; None where its ops run one by one.

    constants: what the index has made of its configuration, by name. Plain torch has none.
    """
    if backend == "torch":
        return None
    made: Executor | None = resolve(backend).accelerate(geometry, config, constants)
    return made


def refusal(backend: str, geometry: Geometry, config: object) -> str:
    """Why `accelerate` gives None."""
    if backend == "torch":
        return "plain torch has no executor"
    why: str = resolve(backend).refusal(geometry, config)
    return why

"""Which implementation of the ops an index runs on. Explicit: there is no silent fallback."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from kvindex.core import check

BACKENDS = {"torch": "kvindex.ops", "cuda": "kvindex_cuda"}


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

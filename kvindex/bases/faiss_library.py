"""The FAISS library: its import, its threads, and its shared resources on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

TEMPORARY_BYTES = 2**26
"""Device memory that FAISS reserves for searches on one GPU; beyond, it allocates."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let FAISS use `count` threads: one, where the order of its work changes the result."""
    faiss = library()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def in_threads(work: Callable[[Any], Any], items: Iterable[Any], at_once: int) -> list[Any]:
    """Results of `work` for all items, `at_once` at a time, one thread each: deterministic."""

    def single_threaded(item: Any) -> Any:
        with threads(1):  # FAISS sets them for each thread that calls it
            return work(item)

    if at_once == 1:
        return [single_threaded(item) for item in items]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(single_threaded, items))


def library() -> Any:
    """The module faiss. Raises ImportError that says what to install."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "faiss is not installed, which the faiss indexes need: "
            "pip install 'kvindex-torch[faiss]' (faiss-cpu), or faiss-gpu for where='gpu'"
        ) from error


def check_gpu(faiss: Any, device: torch.device) -> None:
    """Raises ValueError for a device that is no GPU, ImportError for faiss without a GPU part."""
    if device.type != "cuda":
        raise ValueError(
            f"where: got 'gpu' with device={device}, allowed is a CUDA device or 'cpu'"
        )
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise ImportError(
            "where: got 'gpu', but the faiss installed here has no GPU part: install faiss-gpu in "
            "place of faiss-cpu, or take where='cpu'"
        )


@lru_cache
def _shared_resources(device: int) -> Any:
    """Resources of all indexes of a GPU: bounded temporary memory, and cuBLAS's handle."""
    shared = library().StandardGpuResources()
    shared.setTempMemory(TEMPORARY_BYTES)
    return shared


def resources(device: int | None) -> Any:
    """The shared resources of a GPU, on torch's current stream."""
    shared, stream = _shared_resources(device or 0), torch.cuda.current_stream(device)
    pointer = library().cast_integer_to_cudastream_t(stream.cuda_stream)
    shared.setDefaultStream(device or 0, pointer)
    return shared

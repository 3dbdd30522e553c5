"""Access to the FAISS library: import, number of threads, and resources shared on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from kvindex.core.extras import how_to_install

TEMPORARY_BYTES = 2**26
"""Bytes that FAISS reserves for searches on one GPU. If a search needs more, FAISS allocates it."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let FAISS use `count` threads within this context.

    Use a single thread where the result depends on the order in which tokens are added.
    """
    faiss = library()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def in_threads(work: Callable[[Any], Any], items: Iterable[Any], at_once: int) -> list[Any]:
    """Call `work` for each item, on up to `at_once` threads, and return the results in order.

    FAISS uses a single thread for each item, so the results are deterministic.
    """

    def single_threaded(item: Any) -> Any:
        with threads(1):  # FAISS has a separate setting for each thread that calls it
            return work(item)

    if at_once == 1:
        return [single_threaded(item) for item in items]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(single_threaded, items))


def library() -> Any:
    """Import the module `faiss` and return it.

    Raises:
        ImportError: The module is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "the faiss indexes need the package faiss, which is not installed; install it with "
            f'{how_to_install("faiss")} (faiss-cpu); for where="gpu", use faiss-gpu instead'
        ) from error


def check_gpu(faiss: Any, device: torch.device) -> None:
    """Check that FAISS can use a GPU.

    Raises:
        ValueError: The device is not a GPU.
        ImportError: The installed FAISS does not support GPUs.
    """
    if device.type != "cuda":
        raise ValueError(
            f"where: got 'gpu', but the index is on device={device}; create the index on a CUDA "
            "device, or pass where='cpu'"
        )
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise ImportError(
            "where: got 'gpu', but the installed faiss does not support GPUs; install faiss-gpu "
            "instead of faiss-cpu, or pass where='cpu'"
        )


@lru_cache
def _shared_resources(device: int) -> Any:
    """Return temporary memory and cuBLAS handle of FAISS on a GPU, shared by all indexes."""
    shared = library().StandardGpuResources()
    shared.setTempMemory(TEMPORARY_BYTES)
    return shared


def resources(device: int | None) -> Any:
    """Return the shared FAISS resources of a GPU, and let them use torch's current stream."""
    shared, stream = _shared_resources(device or 0), torch.cuda.current_stream(device)
    pointer = library().cast_integer_to_cudastream_t(stream.cuda_stream)
    shared.setDefaultStream(device or 0, pointer)
    return shared

"""The FAISS library: its import, its number of threads, and its shared resources on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

TEMPORARY_BYTES = 2**26
"""Bytes that FAISS reserves for searches on one GPU. If a search needs more, FAISS allocates it."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the context, let FAISS use `count` threads.

    One thread is needed where the order of the work changes the result.
    """
    faiss = library()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def in_threads(work: Callable[[Any], Any], items: Iterable[Any], at_once: int) -> list[Any]:
    """Return the results of `work` for all items, `at_once` at a time, each on one thread.

    Results are deterministic, because FAISS uses a single thread for each item.
    """

    def single_threaded(item: Any) -> Any:
        with threads(1):  # FAISS has a separate setting for each thread that calls it
            return work(item)

    if at_once == 1:
        return [single_threaded(item) for item in items]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(single_threaded, items))


def library() -> Any:
    """Import faiss.

    Raises:
        ImportError: The module is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "faiss is not installed, which the faiss indexes need: "
            'pip install -e ".[faiss]" in a checkout (faiss-cpu), or faiss-gpu for where="gpu"'
        ) from error


def check_gpu(faiss: Any, device: torch.device) -> None:
    """Check that FAISS can use a GPU.

    Raises:
        ValueError: The device is not a GPU.
        ImportError: The installed FAISS does not support GPUs.
    """
    if device.type != "cuda":
        raise ValueError(
            f"where: got 'gpu' with device={device}, allowed is a CUDA device or 'cpu'"
        )
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise ImportError(
            "where: got 'gpu', but the faiss installed here has no GPU part: install faiss-gpu "
            "instead of faiss-cpu, or use where='cpu'"
        )


@lru_cache
def _shared_resources(device: int) -> Any:
    """Return the resources that all indexes of a GPU share: temporary memory, a cuBLAS handle."""
    shared = library().StandardGpuResources()
    shared.setTempMemory(TEMPORARY_BYTES)
    return shared


def resources(device: int | None) -> Any:
    """Return the shared resources of a GPU, set to torch's current stream."""
    shared, stream = _shared_resources(device or 0), torch.cuda.current_stream(device)
    pointer = library().cast_integer_to_cudastream_t(stream.cuda_stream)
    shared.setDefaultStream(device or 0, pointer)
    return shared

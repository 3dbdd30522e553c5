"""FAISS's GPU indexes in the place of a layer's search: flat, IVF, IVF-PQ.

FAISS has no batch of indexes: a layer is a search in each KV head's own, one after another on
torch's stream. Its calls are the host's and cannot be captured in a CUDA graph, so events around
them time what the device waits for, too. A search is of the group's queries, for k keys each; no
row is read and no output made.
"""

from __future__ import annotations

import gc
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode.setting import Setting, synthetic
from benchmarks.decode.timing import Clock, OutOfTimeError, Timed
from benchmarks.decode.workload import PIECE
from kvindex.bases.faiss_library import check_gpu
from kvindex.bases.faiss_library import resources as shared

NAMES = ("flat", "ivf", "ivfpq")
PROBES, SUBSPACES, BITS, PER_LIST = 64, 32, 8, 64
"""Lists that are scanned; bytes of a key's code at D = 128; keys that each list is trained with."""

SAME = 0.98
"""Least share of the true best that the flat index finds; the others say what they find."""


def gpu_library(folder: Path | None = None) -> Any:
    """The module faiss, with a GPU part; from a folder, if given. Raises ImportError that says why.

    A bundle whose CUDA libraries are missing raises RuntimeError when it is imported.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        faiss = importlib.import_module("faiss")
    except (RuntimeError, OSError) as error:
        raise ImportError(str(error)) from error
    check_gpu(faiss, torch.device("cuda"))
    return faiss


def lists_of(tokens: int) -> int:
    """IVF's lists: the power of two next to 4 √N."""
    return int(2 ** round(math.log2(4 * math.sqrt(tokens))))


def rivals(faiss: Any, setting: Setting, tokens: int, timed: Timed, clock: Clock) -> dict[str, Any]:
    """Microseconds per layer of each index at this length, batch 1, and the recall of its ids.

    Keys are those of one KV head, held anew for each of the others, so that each search reads
    memory of its own; centroids and codebooks are trained once.
    """
    g, metric, lists = setting.geometry, faiss.METRIC_INNER_PRODUCT, lists_of(tokens)
    pieces = range(0, tokens, PIECE)
    keys = torch.cat([synthetic(g, 0, at, min(PIECE, tokens - at))[0, 0] for at in pieces]).float()
    queries = setting.queries(1)[0].float().unflatten(0, (g.kv_heads, g.group_size)).contiguous()
    resources = shared(g.device.index)

    def flat() -> Any:
        config = faiss.GpuIndexFlatConfig()
        config.useFloat16 = True  # as many bytes as the keys of the other lines
        return faiss.GpuIndexFlatIP(resources, g.head_dim, config)

    def ivf() -> Any:
        return faiss.GpuIndexIVFFlat(resources, g.head_dim, lists, metric)

    def ivfpq() -> Any:
        parts = g.head_dim * SUBSPACES // 128
        return faiss.GpuIndexIVFPQ(resources, g.head_dim, lists, parts, BITS, metric)

    found: dict[str, Any] = {"tokens": tokens, "lists": lists, "probes": PROBES}
    for name, make in zip(NAMES, (flat, ivf, ivfpq), strict=True):
        clock.check()
        layer = None
        try:
            layer = _Layer(faiss, _filled(faiss, make, keys, g.kv_heads), queries, setting.k)
            layer()
            found[f"{name}_recall"] = recall = layer.recall(keys)
            if name == "flat" and not recall >= SAME:
                raise ValueError(f"{recall:.3f} of the keys found are the best, not {SAME}")
            found[name] = timed(layer, 1, graph=False)
        except OutOfTimeError:
            raise
        except Exception as error:  # what FAISS raises is its result
            found[f"{name}_error"] = str(error).strip().splitlines()[0]
        del layer
        gc.collect()
    return found


def _filled(faiss: Any, make: Callable[[], Any], keys: Tensor, heads: int) -> list[Any]:
    """An index for each head, trained together, of the same keys in memory of their own."""
    made, trained = [make()], None
    if not made[0].is_trained:
        order = torch.randperm(len(keys), device=keys.device)[: PER_LIST * made[0].nlist]
        some = keys[order].contiguous()
        made[0].train_c(len(some), _floats(faiss, some))
        trained = faiss.index_gpu_to_cpu(made[0])
    for _ in range(heads - 1):
        device, ours = keys.device.index or 0, shared(keys.device.index)
        copied = None if trained is None else faiss.index_cpu_to_gpu(ours, device, trained)
        made.append(copied or make())
    for index in made:
        if trained is not None:
            index.nprobe = min(PROBES, index.nlist)
        index.add_c(len(keys), _floats(faiss, keys))
    return made


class _Layer:
    """A search of queries float32 `[G, g, D]` in each head's index; ids int64 `[G, g, k]`."""

    def __init__(self, faiss: Any, indexes: list[Any], queries: Tensor, k: int) -> None:
        self._queries = queries
        self._scores = queries.new_empty((*queries.shape[:2], k))
        self.ids = torch.empty_like(self._scores, dtype=torch.int64)
        self._calls = [
            (
                index.search_c,
                (len(asked), _floats(faiss, asked), k, _floats(faiss, scores)),
                faiss.cast_integer_to_idx_t_ptr(ids.data_ptr()),
            )
            for index, asked, scores, ids in zip(
                indexes, queries, self._scores, self.ids, strict=True
            )
        ]

    def __call__(self) -> None:
        shared(self._queries.device.index)  # follow torch's current stream
        for search, given, ids in self._calls:
            search(*given, ids)

    def recall(self, keys: Tensor) -> float:
        """Share of the true best `k` of keys `[N, D]`, which all heads hold."""
        best = (self._queries @ keys.T).topk(self.ids.shape[-1]).indices
        return float((best[..., None] == self.ids[..., None, :]).any(-1).float().mean())


def _floats(faiss: Any, tensor: Tensor) -> Any:
    return faiss.cast_integer_to_float_ptr(tensor.data_ptr())

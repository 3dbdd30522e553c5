"""What the step is compared with: dense attention, exact scores with topk, FAISS."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.decode.setting import D, K, Setting, synthetic
from benchmarks.decode.timing import Clock, OutOfTimeError, Timed, Times, quartiles
from benchmarks.decode.workload import PIECE
from kvindex.geometry import Geometry

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
"""All but the one that writes the logits down, which would need several times the memory."""


def dense(setting: Setting, tokens: int, batch: int, layers: int, timed: Timed) -> dict[str, Any]:
    """Attention over all keys and values, and exact scores with the best k, in device memory.

    Attention is timed as SDPA with `enable_gqa`, and with a group's heads as so many queries of
    one KV head, which is the same; the faster one is `dense`.
    """
    g = setting.geometry
    shape = (layers, 2, batch, g.kv_heads, tokens, g.head_dim)
    both = torch.empty(shape, dtype=g.dtype, device=g.device)
    for part in both.view(-1, tokens, g.head_dim).split(64):
        part.normal_()
    keys, values = both.unbind(1)
    asked = setting.queries(layers, batch)
    wide = asked[..., None, :]  # [L, B, H, 1, D]
    folded = asked.unflatten(2, (g.kv_heads, g.group_size))  # [L, B, G, g, D]

    def gqa() -> Tensor:
        for q, k, v in zip(wide, keys, values, strict=True):
            out = sdpa(q, k, v, enable_gqa=True)
        return out

    def fold() -> Tensor:
        for q, k, v in zip(folded, keys, values, strict=True):
            out = sdpa(q, k, v)
        return out

    def best() -> Tensor:
        for q, k in zip(folded, keys, strict=True):
            out = torch.matmul(q, k.mT).amax(2).topk(setting.k, sorted=False).indices
        return out

    found: dict[str, Any] = {"dense_layers": layers}
    outputs = []
    for name, run in (("dense_gqa", gqa), ("dense_folded", fold), ("topk", best)):
        try:
            with sdpa_kernel(FUSED if g.device.type == "cuda" else [SDPBackend.MATH]):
                outputs.append(run().float().flatten())
                found[name] = timed(run, layers)
        except OutOfTimeError:
            raise
        except RuntimeError as error:
            found[f"{name}_error"] = str(error).splitlines()[0]
    if "dense_gqa" in found and "dense_folded" in found:
        one, other = outputs[:2]
        if not float((one - other).norm() / one.norm()) < 2e-2:
            raise SystemExit("the two ways of dense attention differ")
    ways = [found[name] for name in ("dense_gqa", "dense_folded") if name in found]
    if ways:
        found["dense"] = min(ways, key=lambda times: times["median_us"])
        found["dense_bytes"] = keys[0].nbytes + values[0].nbytes
    return found


def faiss_times(folder: Path, tokens: int, clock: Clock, replays: int) -> dict[str, Any]:
    """FAISS on the GPU for one KV head, microseconds on the host's clock with synchronisation.

    A layer has G of them. IVF-PQ: M = 32, 8 bits, nprobe = 64, 4 √N lists, inner product.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import faiss
    import faiss.contrib.torch_utils

    geometry = Geometry.of(q_heads=4, kv_heads=1, head_dim=D, device="cuda")
    pieces = range(0, tokens, PIECE)
    keys = torch.cat([synthetic(geometry, 0, at, min(PIECE, tokens - at))[0, 0] for at in pieces])
    queries = torch.randn(4, D, device="cuda")
    resources = faiss.StandardGpuResources()

    def timed(run: Callable[[], Any]) -> Times:
        clock.check()
        times = []
        for _ in range(replays + 3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return quartiles(times[3:])

    def flat() -> Times:
        base, asked = keys.bfloat16(), queries.bfloat16()
        metric = faiss.METRIC_INNER_PRODUCT
        return timed(lambda: faiss.knn_gpu(resources, asked, base, K, metric=metric))

    def ivfpq() -> Times:
        lists = 2 ** round(math.log2(4 * math.sqrt(tokens)))
        index = faiss.GpuIndexIVFPQ(resources, D, lists, 32, 8, faiss.METRIC_INNER_PRODUCT)
        index.train(keys[torch.randperm(tokens, device="cuda")[: 64 * lists]].contiguous())
        clock.check()
        index.add(keys)
        index.nprobe = 64
        return timed(lambda: index.search(queries, K))

    found: dict[str, Any] = {"tokens": tokens}
    for name, run in (("flat", flat), ("ivfpq", ivfpq)):
        try:
            found[name] = run()
        except OutOfTimeError:
            raise
        except Exception as error:
            found[f"{name}_error"] = str(error).strip().splitlines()[0]
    return found

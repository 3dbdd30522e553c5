"""What the plain torch reference costs on this machine: encode, search, exact attention.

    python benchmarks/reference.py [--tokens N] [--json OUT]

One layer of SmolLM2-135M's shape (H = 9, G = 3, D = 64, float32) with random keys. Each answer is
checked against a plain computation before it is timed. Medians with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex.layer import AttentionLayer, dense
from kvindex.ops.group import POLICIES
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe

SHAPE = dict(q_heads=9, kv_heads=3, head_dim=64)
K = 100


def timed(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and quartiles of `repeats` calls, milliseconds, after one call to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "low_ms": low, "high_ms": high}


def searches(keys: Tensor, values: Tensor, queries: Tensor) -> dict[str, dict[str, float]]:
    """Search and fetch through each index and policy; `pariskv`'s encode and append."""
    found = {}
    truth = (queries[0, 0] @ keys[0, 0].T).topk(K).indices
    for name in kvindex.names():
        for policy in POLICIES:
            index = kvindex.create(f"{name}:group={policy}", **SHAPE)
            index.append(keys, values)
            best = index.search(queries, k=K).ids[0, 0]
            if not torch.isin(truth[:1], best):
                raise SystemExit(f"{name}, {policy}: the best row of head 0 was not found")
            found[f"{name} {policy}"] = timed(lambda i=index: i.fetch(i.search(queries, k=K)), 15)
    index = kvindex.create("pariskv", **SHAPE)

    def fill() -> None:
        index.reset()
        index.append(keys, values)

    found["pariskv encode and append"] = timed(fill, 5)
    return found


def exact_attention(keys: Tensor, values: Tensor, queries: Tensor) -> dict[str, dict[str, float]]:
    """Causal attention of all tokens to all: fused, and block by block."""
    found, outputs = {}, []
    limit = dense.GATHERED_BYTES
    for name, bytes_ in (("fused", limit), ("block by block", -1)):
        dense.GATHERED_BYTES = bytes_

        def prefill() -> Tensor:
            layer = AttentionLayer(kvindex.create("exact", **SHAPE))
            return layer.step(queries, keys, values)

        outputs.append(prefill())
        found[name] = timed(prefill, 5)
    dense.GATHERED_BYTES = limit
    if not torch.allclose(*outputs, atol=1e-5):
        raise SystemExit("the two exact paths differ")
    return found


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--json", type=output())
    arguments = parser.parse_args()
    torch.manual_seed(0)
    n, heads = arguments.tokens, SHAPE["q_heads"]
    keys, values = torch.randn(2, 1, SHAPE["kv_heads"], n, SHAPE["head_dim"])
    queries = torch.randn(1, heads, n, SHAPE["head_dim"])
    with torch.no_grad():
        result = {
            "shape": {**SHAPE, "tokens": n, "k": K, "dtype": "float32"},
            "machine": describe(),
            "search_and_fetch": searches(keys, values, queries[:, :, -1]),
            "exact_attention": exact_attention(keys, values, queries),
        }
    for part in ("search_and_fetch", "exact_attention"):
        for name, times in result[part].items():
            spread = f"{times['low_ms']:.1f} to {times['high_ms']:.1f}"
            print(f"{part:<18} {name:<28} {times['median_ms']:8.1f} ms ({spread})")
    if arguments.json:
        write_json(arguments.json, result, indent=2)


if __name__ == "__main__":
    main()

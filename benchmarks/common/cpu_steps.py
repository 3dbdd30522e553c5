"""Time a decode step of one layer on a CPU, with indexes and dense attention in alternation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvindex
from benchmarks.common import workload
from benchmarks.common.correctness import check
from benchmarks.common.timing import spread
from kvindex.core.geometry import Geometry
from kvindex.layer import AttentionLayer

SHAPE = dict(q_heads=9, kv_heads=3, head_dim=64)
"""Shape of a layer of SmolLM2-135M."""

TOKENS = [2**n for n in range(11, 18)]

Step = Callable[[int], Tensor]
"""Function that runs a decode step of a layer. It takes the number of the layer, and returns the
attention output `[1, H, Dv]`."""


def geometry() -> Geometry:
    """Return the shapes of the measured layer."""
    return Geometry.of(**SHAPE, dtype=torch.float32)


def dense(g: Geometry, tokens: int, layers: int) -> dict[str, Step]:
    """Return two functions that compute dense attention of one token with SDPA.

    `dense` calls SDPA with `enable_gqa=True`, as models do. `dense_folded` passes the query heads
    that share a KV head as several queries of one head, which gives the same result and is faster.
    """
    rows = [next(workload.tokens_of(g, n, 1, tokens, tokens)) for n in range(layers)]
    queries = workload.queries_of(g, layers, 1)
    alone, folded = queries[..., None, :], queries.unflatten(2, (g.kv_heads, -1))
    return {
        "dense": lambda n: sdpa(alone[n], *rows[n], enable_gqa=True),
        "dense_folded": lambda n: sdpa(folded[n], *rows[n]),
    }


class Indexed:
    """Attention layers with an index. Each contains `tokens` tokens, including the local window."""

    def __init__(self, g: Geometry, spec: str, tokens: int, layers: int) -> None:
        self._queries = workload.queries_of(g, layers, 1)[..., None, :]
        self._layers, self._tokens = [], tokens - 1
        sizes: Any = dict(sink=0, local_window=workload.WINDOW, dense_below=0, k=workload.K)
        for number in range(layers):
            layer = AttentionLayer(kvindex.create(spec, **g.options()), **sizes)
            keys, values = next(workload.tokens_of(g, number, 1, tokens, tokens))
            self._last = keys[:, :, -1:].contiguous(), values[:, :, -1:].contiguous()
            first = tokens - 1 - workload.WINDOW
            layer.index.append(keys[:, :, :first], values[:, :, :first])
            window = keys[:, :, first:-1], values[:, :, first:-1]
            layer.step(window[0].repeat_interleave(g.group_size, 1), *window)
            self._layers.append(layer)

    def __call__(self, number: int) -> Tensor:
        """Run a decode step of layer number `number`, and return the output `[1, H, Dv]`."""
        return self._layers[number].step(self._queries[number], *self._last)[:, :, 0]

    def prepare(self, number: int) -> None:
        """Bring a layer into the state in which its decode step is timed.

        Tokens of earlier steps are removed. The first step after a removal copies all rows (keys
        and values) of the window, which a normal step does not do. So this first step runs here and
        is not timed.
        """
        self._layers[number].truncate(self._tokens - 1)
        self(number)


def timed(step: Step, layers: int, prepare: Callable[[int], None] | None) -> list[float]:
    """Run a decode step of each layer, and return the times in milliseconds.

    `prepare`, if given, is called before each step and is not timed.
    """
    found = []
    for number in range(layers):
        if prepare is not None:
            prepare(number)
        start = time.perf_counter()
        step(number)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def point(g: Geometry, specs: list[str], tokens: int, layers: int, rounds: int) -> dict[str, Any]:
    """Measure the indexes and dense attention with `tokens` tokens.

    For each of them, return the median time over the rounds in milliseconds (`ms`), and the ratio
    to the time of dense attention in the same round (`of_dense`). If an index was measured with a
    row codec and without one, also return the ratio of these two times (`of_plain`).
    """
    plans: dict[str, Any] = dense(g, tokens, layers)
    plans |= {spec: Indexed(g, spec, tokens, layers) for spec in specs}
    rows = {
        name: partial(timed, plan, layers, getattr(plan, "prepare", None))
        for name, plan in plans.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(-2, rounds):  # the first two rounds warm up
        order = [*plans][number % len(plans) :] + [*plans][: number % len(plans)]
        for name in order:
            times = rows[name]()
            if number >= 0:
                taken[name].append(statistics.median(times))
    found: dict[str, Any] = {"tokens": tokens, "threads": torch.get_num_threads()}
    for name, times in taken.items():
        over = {"of_dense": "dense"}
        plain, codec, _ = name.partition(":row_codec=")
        if codec and plain in taken:
            over["of_plain"] = plain
        found[name] = spread("ms", times) | {"least_ms": min(times)}
        for ratio, other in over.items():
            pairs = zip(times, taken[other], strict=True)
            found[name] |= spread(ratio, [mine / theirs for mine, theirs in pairs])
    return found


def append(g: Geometry, spec: str, rounds: int) -> dict[str, Any]:
    """Time an append of 1,024 tokens to an index.

    Return the time of the append in milliseconds, and this time divided by the time of the matrix
    products that a layer of SmolLM2-135M computes for 1,024 tokens.
    """
    hidden, wide, count = g.q_heads * g.head_dim, 1536, 1024
    rows_of = g.kv_heads * g.head_dim
    shapes = [(hidden, hidden)] * 2 + [(rows_of, hidden)] * 2 + [(wide, hidden)] * 2
    weights = [torch.randn(*shape) for shape in [*shapes, (hidden, wide)]]
    inputs = {width: torch.randn(count, width) for width in (hidden, wide)}
    taken: dict[str, list[float]] = {"products": [], "append": []}
    for number in range(-2, rounds):
        index = kvindex.create(spec, **g.options())
        keys, values = next(workload.tokens_of(g, number % 8, 1, 8 * count, 8 * count))
        index.append(keys[:, :, count:], values[:, :, count:])
        start = time.perf_counter()
        index.append(keys[:, :, :count], values[:, :, :count])
        middle = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        if number >= 0:
            taken["append"].append(1e3 * (middle - start))
            taken["products"].append(1e3 * (time.perf_counter() - middle))
    ratios = [mine / theirs for mine, theirs in zip(*reversed(taken.values()), strict=True)]
    found = spread("ms", taken["append"]) | spread("of_products", ratios)
    return found | {"threads": torch.get_num_threads(), "tokens": count}


def measure(specs: list[str], lengths: list[int], layers: int, rounds: int) -> dict[str, Any]:
    """Measure all indexes, first with one thread of torch, and then with all threads.

    Before that, the results of the first index are checked.
    """
    g, most = geometry(), torch.get_num_threads()
    options = dict(store="device", backend=None)
    result: dict[str, Any] = {"shape": {**SHAPE, "k": workload.K}, "layers": layers}
    result |= {"rounds": rounds, "check": check(g, specs[0], batch=1, **options), "points": []}
    result["appends"] = []
    try:
        for threads in dict.fromkeys((1, most)):
            torch.set_num_threads(threads)
            result["points"] += [point(g, specs, n, layers, rounds) for n in lengths]
            result["appends"].append(append(g, specs[0], rounds))
    finally:
        torch.set_num_threads(most)
    return result

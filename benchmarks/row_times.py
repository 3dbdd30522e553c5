"""What rows as codes save a step's attention on a GPU: with rows of each codec, here and there.

    PYTHONPATH=.:adapters python benchmarks/row_times.py [--tokens N] [--layers L] [--replays R]
        --json OUT

H = 32, G = 8, D = 128, bfloat16, k = 100, 576 resident rows. `attend`: a step's last kernel alone,
over rows of a store drawn at random, each layer other ones, without a cache of rows. `step`: a call
of `index.attend`, half as many tokens, rows on the host; the same query comes again, so that the
cache of rows holds what it selects. Both are CUDA graphs that are replayed one right after the
other, with nothing flushed in between; a time is a layer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

import torch

import kvindex
from benchmarks.decode.setting import D, G, H, K
from benchmarks.decode.timing import captured
from kvindex.core.geometry import Geometry
from kvindex.core.resident import ResidentRows
from kvindex.storage.codecs import NAMES
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.device_store import DeviceStore
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.base_step import State
from kvindex_cuda.pariskv.step import Step

NEAR = 64 + 256 + 256
"""Sink, window, and what the window grows by until it is updated."""

STORES = {"host": HostStore, "device": DeviceStore}
INDEXES = ("pariskv", "pariskv:row_codec=int8", "pariskv:row_codec=fp8", "pariskv+sample")
PIECE = 2**16
"""Tokens that are made at a time."""

Timed = Callable[[Callable[[], Any], int], dict[str, float]]
"""Of what runs so many layers: `median_us` and `low_us` (a quarter is less) of one."""


def rows_of(geometry: Geometry, tokens: int) -> Any:
    """Keys and values `[1, G, n, D]` each, `PIECE` tokens at a time."""
    shape = (2, 1, geometry.kv_heads, geometry.head_dim)
    for start in range(0, tokens, PIECE):
        count = min(PIECE, tokens - start)
        drawn = torch.randn(*shape[:3], count, shape[3], device=geometry.device)
        yield drawn.to(geometry.dtype)


def near_of(geometry: Geometry) -> ResidentRows:
    """576 rows, held and shown."""
    resident = ResidentRows(geometry, 1, NEAR)
    resident.add(*next(rows_of(geometry, NEAR)), None)
    return resident


def attend(geometry: Geometry, tokens: int, layers: int, timed: Timed) -> dict[str, Any]:
    """By codec and place: `attend` alone."""
    g, found = geometry, {}
    resident, empty = near_of(g), torch.zeros(0, device=g.device)
    needed: dict[str, Any] = {f.name: empty for f in fields(State) if f.default is MISSING}
    needed |= dict(resident=resident.rows, shown=resident.mask, held=resident.count)
    queries = torch.randn(1, g.q_heads, g.head_dim, device=g.device).to(g.dtype)
    for name in NAMES:
        found[name] = {}
        for place, kind in STORES.items():
            store = kind(g, rows=name, max_tokens=tokens)
            for rows in rows_of(g, tokens):
                store.append(store.join(*rows))
            store.wait()
            of_rows = dict(rows=store.table, row_bytes=store.row_bytes, codec=name)
            state = State(**needed | of_rows)
            steps = [Step(g, Layout(g.head_dim, 3), batch=1, k=K, most=1) for _ in range(layers)]
            for step in steps:
                shape = (g.kv_heads, tokens)
                step.ids.copy_(torch.rand(shape, device=g.device).topk(K).indices)
                step.found.fill_(K)

            def run(steps: list[Step] = steps, state: State = state) -> None:
                for one in steps:
                    one.attend(queries, state)

            found[name][place] = timed(run, layers)
    return found


def step(geometry: Geometry, tokens: int, timed: Timed) -> dict[str, Any]:
    """By index: a whole call."""
    g, found = geometry, {}
    shape = dict(q_heads=g.q_heads, kv_heads=g.kv_heads, head_dim=g.head_dim)
    resident = near_of(g)
    queries = torch.randn(1, g.q_heads, g.head_dim, device=g.device).to(g.dtype)
    for name in INDEXES:
        options = dict(backend="cuda", store="host", dtype=g.dtype, device=g.device)
        index: Any = kvindex.create(name, **options, **shape)
        for rows in rows_of(g, tokens):
            index.append(*rows)
        index.warm_up(k=K, tokens=tokens)
        found[name] = timed(lambda index=index: index.attend(queries, resident, k=K), 1)
    return found


def replayed(replays: int) -> Timed:
    """Times of a graph's replays, one right after the other."""

    def timed(run: Callable[[], Any], layers: int) -> dict[str, float]:
        graph = captured(run)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        for _ in range(3):
            graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        each = sorted(1e3 * a.elapsed_time(b) / layers for a, b in pairwise(marks))
        return {"median_us": each[replays // 2], "low_us": each[replays // 4]}

    return timed


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**18)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--json", type=output(), required=True)
    given = parser.parse_args()
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D)
    geometry = Geometry.of(**sizes, dtype=torch.bfloat16, device="cuda")
    timed = replayed(given.replays)
    result = {
        "shape": {**sizes, "k": K, "near": NEAR, "dtype": "bfloat16"},
        **dict(tokens=given.tokens, layers=given.layers, replays=given.replays),
        "machine": describe("cuda"),
        "attend": attend(geometry, given.tokens, given.layers, timed),
        "step": step(geometry, given.tokens // 2, timed),
    }
    write_json(given.json, result)


if __name__ == "__main__":
    main()

"""Rows to the host: how fast, beside a plain copy and beside other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode.timing import Times, quartiles, read_all
from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.slab_pool import Budget

REPEATS, WARM_UP = 20, 2


def measure(geometry: Geometry, tokens: int) -> dict[str, Any]:
    """Copies of `tokens` keys and values: alone, and while another stream computes or reads."""
    g = geometry
    store = HostStore(g, max_tokens=tokens, budget=Budget())
    shape = (2, 1, g.kv_heads, tokens, g.head_dim)
    keys, values = torch.randn(shape, dtype=torch.float32, device=g.device).to(g.dtype)
    rows = store.join(keys, values)
    torch.cuda.synchronize()
    start = time.perf_counter()
    store.append(rows)
    store._offload.synchronize()
    first_ms = 1e3 * (time.perf_counter() - start)
    _right(store, keys, values)
    moved = sum(part.nbytes for part in rows.values())
    host = torch.empty(moved, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(moved, dtype=torch.uint8, device=g.device)

    def offload(prepare: Callable[[], dict[str, Tensor]]) -> None:
        store.truncate(0)
        store.append(prepare())
        store.wait()

    copy = partial(host.copy_, flat, non_blocking=True)
    alone = partial(offload, lambda: rows)
    runs = {
        "memcpy": copy,
        "offload": alone,
        "join_and_offload": partial(offload, lambda: store.join(keys, values)),
    }
    found: dict[str, Any] = {"tokens": tokens, "bytes": moved, "first_ms": first_ms}
    for name, run in runs.items():
        found[name] = _rated(_timed(run), moved)
    copies, plain = {"memcpy": copy, "offload": alone}, found["memcpy"]["GB_s"]
    for kind, work in _loads(g.device).items():
        found[kind] = _beside(work, copies, found["offload"]["median_us"], moved)
        found[kind]["offload"]["of_memcpy"] = found[kind]["offload"]["GB_s"] / plain
    for name in ("offload", "join_and_offload"):
        found[name]["of_memcpy"] = found[name]["GB_s"] / plain
    return found


def _right(store: HostStore, keys: Tensor, values: Tensor) -> None:
    """Raises SystemExit if rows on the host are not those given."""
    ids = torch.randint(0, len(store), (*keys.shape[:2], 500), device=keys.device)
    rows, wide = store.gather(ids), ids[..., None].expand(-1, -1, -1, keys.shape[3])
    if not (
        torch.equal(rows.keys, keys.gather(2, wide))
        and torch.equal(rows.values, values.gather(2, wide))
    ):
        raise SystemExit("offload is wrong: other rows lie on the host")


def _loads(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A piece of work that computes, and one that reads: some 100 µs each."""
    square = torch.randn(3072, 3072, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(square)
    data = torch.zeros(2**26, dtype=torch.int32, device=device)
    total = torch.zeros(1, dtype=torch.int32, device=device)
    return {
        "beside_matmul": partial(torch.mm, square, square, out=result),
        "beside_reading": partial(read_all, data, total),
    }


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _timed(run: Callable[[], Any]) -> Times:
    """Of a run on the current stream that waits for its copies."""
    times = []
    for i in range(REPEATS + WARM_UP):
        start, stop = _events(2)
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        if i >= WARM_UP:
            times.append(start.elapsed_time(stop) * 1e3)
    return quartiles(times)


def _beside(
    work: Callable[[], Any], copies: dict[str, Callable[[], Any]], copy_us: float, moved: int
) -> dict[str, Any]:
    """Each way of copying while another stream works longer than it takes, and that work."""
    one = _timed(lambda: [work() for _ in range(10)])["median_us"] / 10
    count, side = max(1, int(1.5 * copy_us / one)), torch.cuda.Stream()
    idle = _timed(lambda: [work() for _ in range(count)])

    def once(run: Callable[[], Any]) -> tuple[float, float]:
        first, last, start, stop = _events(4)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            first.record()
            for _ in range(count):
                work()
            last.record()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3, first.elapsed_time(last) * 1e3

    found: dict[str, Any] = {"pieces": count, "work_alone": idle}
    for name, run in copies.items():
        times = [once(run) for _ in range(REPEATS + WARM_UP)][WARM_UP:]
        copying, working = (quartiles(list(part)) for part in zip(*times, strict=True))
        slower = working["median_us"] / idle["median_us"] - 1
        found[name] = {**_rated(copying, moved), "work_slower": slower}
    return found


def _rated(times: Times, moved: int) -> dict[str, Any]:
    return {**times, "GB_s": moved / times["median_us"] / 1e3}

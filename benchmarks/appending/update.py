"""Updates of the local window while decoding, and by how much they delay the steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.appending.encode import index_of, keys_of
from benchmarks.decode.setting import NEAR, K
from kvindex.core.geometry import Geometry
from kvindex.core.resident import Near
from kvindex.core.streams import side_stream

UPDATE = 256
"""Tokens between two updates of a layer, and of each update (paper, Table 1)."""

ALLOWED = 0.1
"""By how much of a step an update may make it longer: the target."""

MOST_LAYERS = UPDATE // 4
"""So that between the steps that an update falls on there is one that none does."""

PIECE = 2**16
"""Tokens that a prompt is appended in."""

APART = 100
"""Tokens that the prompt falls short of whole blocks: an update ends one block, begins another."""

AHEAD = 64
"""Updates that there is room for beyond those to come: no slab of memory is pinned ahead."""

PLANS = {
    "together": "all layers between two steps, on the steps' stream",
    "staggered": "a layer at a time, evenly spread, on the steps' stream",
    "beside": "a layer at a time, beside a step by a side stream, and ended after the next",
    "together_beside": "all layers at once, beside a step and ended after the next",
    "collected_beside": "a layer at a time and beside, with Python's garbage collector on",
}
"""Python's garbage collector stops the host, mostly where it makes objects: where it updates. So it
is off but in the last one, as in a loop that cannot wait for it."""


class Decode:
    """Layers that have read a prompt, and a step of all of them: query to attention output.

    updates: of each layer, for which room is made, as `kvhf.generate` makes it once the prompt is
    read: none pins memory. captured: as a CUDA graph.
    """

    def __init__(
        self,
        geometry: Geometry,
        tokens: int,
        layers: int,
        *,
        updates: int = 1,
        captured: bool = True,
        k: int = K,
    ) -> None:
        g, self.tokens, self.layers = geometry, tokens - APART, layers
        device, dtype = g.device, g.dtype
        self.indexes = [index_of(g, store="host") for _ in range(layers)]
        for number, index in enumerate(self.indexes):
            keys = keys_of(g, number, tokens)
            for start in range(0, self.tokens, PIECE):
                some = keys[:, :, start : min(start + PIECE, self.tokens)]
                index.append(some, some)
            self._settle(index)
        shape = (2, layers, 1, g.kv_heads, UPDATE, g.head_dim)
        self.new = torch.randn(shape, device=device).to(dtype)
        self.queries = torch.randn((layers, 1, g.q_heads, g.head_dim), device=device).to(dtype)
        self._near = Near(g, 1, NEAR)
        self._near.add(
            *torch.randn((2, 1, g.kv_heads, NEAR, g.head_dim), device=device).to(dtype), None
        )
        for index in self.indexes:
            most = tokens + (updates + AHEAD) * UPDATE
            index.warm_up(k=k, tokens=most)
            index.reserve(most)
            self._settle(index)
        self._k, self.step = k, self._run
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
            self.step = graph.replay

    def _run(self) -> None:
        self.outputs = [
            index.attend(query, self._near, k=self._k)[0]
            for index, query in zip(self.indexes, self.queries, strict=True)
        ]

    def _settle(self, index: Any) -> None:
        """No memory is being pinned, and no row is on its way."""
        pool = getattr(index._store, "_pool", None)
        if pool is not None:
            pool.settle()
            if index.geometry.device.type == "cuda":
                torch.cuda.synchronize()

    def tokens_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """What an update of the layer appends."""
        return self.new[0, layer], self.new[1, layer]

    def back(self) -> None:
        """Forget all updates."""
        for index in self.indexes:
            index.truncate(self.tokens)
            self._settle(index)


def due(plan: str, step: int, layers: int) -> list[int]:
    """Layers that are updated after a step, counted from 0."""
    place = step % UPDATE
    if plan.startswith("together"):
        return list(range(layers)) if place == UPDATE // 2 else []
    apart = UPDATE // layers
    return [place // apart] if place % apart == 0 and place // apart < layers else []


def falls(plan: str, interval: int, layers: int) -> bool:
    """Whether an update falls on an interval: from the end of a step (0, 1, …) to the next one's.

    On the steps' stream it is the one after the step that the update is due after. Beside the steps
    the side stream runs while that step does, an interval before; the host may be late for the next
    one; and the end, which the next is followed by, is an interval later.
    """
    near = (-1, 0, 1) if plan.endswith("beside") else (0,)
    return any(due(plan, interval - i, layers) for i in near if interval >= i)


class Updates:
    """What a plan does once a step is launched: updates of layers, of whose tokens an event tells.

    Beside the steps an update ends after the next one, so that the host has two of them for it. It
    runs on the stream that layers use: torch keeps memory for each stream apart, and a new one's
    first update takes some from the driver.
    """

    def __init__(self, decode: Decode, plan: str) -> None:
        self._decode, self._plan = decode, plan
        self._side = side_stream(decode.indexes[0].geometry.device)
        self._ends: list[Callable[[], None]] = []

    def __call__(self, step: int, ready: torch.cuda.Event) -> int:
        """End what was begun, begin what is due after a step; gives of how many layers."""
        self.finish()
        layers = due(self._plan, step, self._decode.layers)
        if not self._plan.endswith("beside"):
            for layer in layers:
                self._decode.indexes[layer].append(*self._decode.tokens_of(layer))
        elif layers:
            self._side.wait_event(ready)
            with torch.cuda.stream(self._side):
                self._ends = [
                    self._decode.indexes[i].start_append(*self._decode.tokens_of(i)) for i in layers
                ]
        return len(layers)

    def finish(self) -> None:
        """End what was begun."""
        if self._ends:
            torch.cuda.current_stream().wait_stream(self._side)
        while self._ends:
            self._ends.pop(0)()


@contextmanager
def collector(on: bool) -> Iterator[list[float]]:
    """Python's garbage collector is on or off meanwhile; gives its pauses, in microseconds."""
    pauses, starts, was = [], [], gc.isenabled()

    def say(phase: str, about: dict[str, int]) -> None:
        now = 1e6 * time.perf_counter()
        if phase == "start":
            starts.append(now)
        elif starts:
            pauses.append(now - starts.pop())

    if not on:
        gc.collect()
    gc.callbacks.append(say)
    (gc.enable if on else gc.disable)()
    try:
        yield pauses
    finally:
        gc.callbacks.remove(say)
        (gc.enable if was else gc.disable)()


def timed(decode: Decode, periods: int, plan: str | None) -> tuple[list[float], list[float]]:
    """Microseconds from the end of each step to the next one's, and of the host per update begun.

    The host waits for each step, as one that samples a token does, and only then begins the next.
    """
    current, ends, host = torch.cuda.current_stream(), [], []
    update = None if plan is None else Updates(decode, plan)
    for step in range(periods * UPDATE + 1):
        ready = current.record_event()
        decode.step()
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        if update is not None:
            start = time.perf_counter()
            if layers := update(step, ready):
                host.append(1e6 * (time.perf_counter() - start) / layers)
        done.synchronize()
        ends.append(done)
    if update is not None:
        update.finish()
    torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(last) for first, last in pairwise(ends)], host


def delays(found: list[float], host: list[float], hit: list[int]) -> Any:
    """How much longer than the others' median intervals of a run are that an update falls on.

    hit: those of `falls`; of their worst `worst_of_worst` says how it compares with the worst of
    the others. `over` are intervals longer than `ALLOWED`, for which a host that is held up needs
    no update: `others_over`.
    """
    where = set(hit)
    struck = [time for i, time in enumerate(found) if i in where]
    others = [time for i, time in enumerate(found) if i not in where]
    usual = statistics.median(others)
    most = (1 + ALLOWED) * usual
    return {
        "median_us": statistics.median(found),
        "worst_us": max(found),
        "others_median_us": usual,
        "others_worst_us": max(others),
        "updated_median_us": statistics.median(struck),
        "updated_worst_us": max(struck),
        "amortised": statistics.mean(found) / statistics.mean(others) - 1,
        "delay_median": statistics.median(struck) / usual - 1,
        "delay_worst": max(struck) / usual - 1,
        "worst_of_worst": max(struck) / max(others),
        "struck": len(struck),
        "over": sum(time > most for time in struck),
        "others": len(others),
        "others_over": sum(time > most for time in others),
        "steps": len(found),
        "updates": len(host),
        "host_us_per_layer": statistics.median(host),
        "host_worst_us_per_layer": max(host),
    }


def measure(geometry: Geometry, tokens: int, layers: int, periods: int) -> dict[str, Any]:
    """Each plan over so many periods of 256 steps, in which every layer is updated once.

    One more comes before, for the first update after a truncation copies the centers of all
    segments, which decoding does not meet.
    """
    decode = Decode(geometry, tokens, layers, updates=periods + 1)
    timed(decode, 1, "together_beside")  # compiles what is new
    decode.back()
    with collector(on=False):
        timed(decode, 1, None)
        base, _ = timed(decode, periods, None)
    found: dict[str, Any] = {
        "tokens": tokens,
        "layers": layers,
        "bytes_per_update": UPDATE
        * layers
        * decode.indexes[0]._store.row_bytes
        * geometry.kv_heads,
        "without": {
            "median_us": statistics.median(base),
            "p99_us": sorted(base)[int(0.99 * len(base))],
            "worst_us": max(base),
            "steps": len(base),
        },
    }
    for plan, words in PLANS.items():
        with collector(on=plan.startswith("collected")) as pauses:
            timed(decode, 1, plan)
            pauses.clear()
            steps, host = timed(decode, periods, plan)
        hit = [i for i in range(len(steps)) if falls(plan, i, layers)]
        found[plan] = {"is": words, **delays(steps, host, hit), "pauses_us": pauses}
        decode.back()
    with collector(on=False):
        again, _ = timed(decode, 1, None)
    found["without"]["again_us"] = statistics.median(again)
    return found

"""Times of a whole step, and of its kernels beside their floors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.decode.correctness import sound
from benchmarks.decode.floors import Bytes, stage_bytes
from benchmarks.decode.setting import Setting, synthetic
from benchmarks.decode.timing import Launches, Timed
from benchmarks.decode.workload import Workload
from kvindex.core.resident import ResidentRows


def measure(
    setting: Setting,
    work: Workload,
    timed: Timed,
    rates: dict[str, Any],
    *,
    tokens: int,
    batch: int,
) -> dict[str, Any]:
    """The whole step with rows here and there, its stages with rows on the host; all in µs."""
    layers, before = len(work.queries), work.ask
    with Launches() as launches:
        work.run("host", launches)
    names = launches.names
    sound(setting, work)
    listed = float(work.step.listed.float().mean())
    result: dict[str, Any] = {
        "layers": layers,
        "candidates": setting.candidates(tokens),
        "listed": listed,
        "launches": len(names),
        "graph_nodes": nodes_of(lambda: work.step(work.queries[0], work.states["host"][0])),
        "attend_nodes": None,
    }
    if setting.geometry.device.type == "cuda":
        result["attend_nodes"] = nodes_of(public(setting, batch))
    for place in work.states:
        if place == "cached":
            work.fill()
        result[f"step_{place}"] = timed(partial(work.run, place), layers, before)
    for state in work.states.get("cached", ())[:1]:
        assert state.cache is not None
        result["hit_rate"] = state.cache.hit_rate()
    reached = [0.0]  # time of the first so many kernels
    for most in range(1, len(names)):
        with Launches(most) as launches:
            reached.append(timed(partial(work.run, "host", launches), layers, before)["median_us"])
    reached.append(result["step_host"]["median_us"])
    result["stages"] = staged(names, reached, stage_bytes(setting, tokens, batch, listed), rates)
    return result


def staged(
    names: list[str], reached: list[float], bytes_: dict[str, Bytes], rates: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each stage's time, the difference of two neighbors in `reached`, beside its floor."""
    stages = []
    for name, start, stop in zip(names, reached, reached[1:], strict=False):
        stage: dict[str, Any] = {"name": name, "us": stop - start}
        if name in bytes_:
            moved = bytes_[name]
            floor = moved.floor_us(rates["read"]["GB_s"], rates["pinned"]["GB_s"])
            stage |= {"bytes": moved.device, "host_bytes": moved.host, "floor_us": floor}
            if stop > start:
                stage |= {
                    "share": floor / (stop - start),
                    "GB_s": (moved.device + moved.host) / (stop - start) / 1e3,
                }
        stages.append(stage)
    return stages


def public(setting: Setting, batch: int, tokens: int = 512) -> Callable[[], Any]:
    """A step as a user of an index calls it, `index.attend`, of any length: it is not timed."""
    g = setting.geometry
    index: Any = setting.made("cuda")
    keys = synthetic(g, 0, 0, tokens).expand(batch, -1, -1, -1)
    index.append(keys, keys)
    resident = ResidentRows(g, batch, setting.resident)
    resident.add(*(keys[:, :, -setting.resident :],) * 2, None)
    index.warm_up(k=setting.k, tokens=tokens)
    return partial(index.attend, setting.queries(batch), resident, k=setting.k)


def nodes_of(run: Callable[[], Any]) -> int | None:
    """Nodes (kernels, copies, fills) of a CUDA graph of `run`; None where none can tell."""
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        count = ctypes.c_size_t()
        handle = ctypes.c_void_p(graph.raw_cuda_graph())
        failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    except (RuntimeError, AttributeError, TypeError, OSError):
        return None
    return None if failed else count.value

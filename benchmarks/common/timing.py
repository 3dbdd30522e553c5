"""Timing of CUDA graph replays over cold caches, interleaved between the plans compared."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

Times = dict[str, float]
Timed = Callable[..., Times]
"""Of what does the work of so many layers: microseconds of one (`GraphTimer`)."""

Figures = dict[str, list[float]]
"""What a turn measures, by name."""


def quartiles(times_us: list[float]) -> Times:
    """Median and quartiles of times, microseconds."""
    low, middle, high = statistics.quantiles(times_us, n=4)
    return {"median_us": middle, "low_us": low, "high_us": high, "replays": len(times_us)}


class GraphTimer:
    """Times replays of CUDA graphs by CUDA events, after the L2 cache was filled otherwise."""

    def __init__(self, replays: int) -> None:
        self._replays = replays
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.ones(l2_bytes, dtype=torch.int32, device="cuda")  # four times as much

    def __call__(
        self, run: Callable[[], Any], layers: int, before: Callable[[int], Any] | None = None
    ) -> Times:
        """`run`'s time over `layers`; before: is called with the replay's number, untimed."""
        replay = captured(run).replay
        marks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self._replays)
        ]
        for number, (start, stop) in enumerate([*marks[:2], *marks]):  # the first two warm up
            if before is not None:
                before(number)
            self._flush.sum()
            start.record()
            replay()
            stop.record()
        torch.cuda.synchronize()
        return quartiles([a.elapsed_time(b) * 1e3 / layers for a, b in marks])


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `run`, which is run twice before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread may be pinning memory
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def settled() -> float:
    """Wait until no thread pins memory ahead any more; gives the seconds that took."""
    start = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == "kvindex-pin":
            thread.join()
    drained()
    return time.perf_counter() - start


def drained() -> None:
    """Wait until the device has done all that was launched: no later turn is to time it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def of_tokens(at: list[float]) -> Figures:
    """Milliseconds of tokens, by the seconds at which the host read them.

    at: the first is that of a drained device, before all tokens that are counted. `token_ms` is
    their mean: a host that is late reads several at once, so that single intervals, `between_ms`,
    may be shorter than any token takes.
    """
    between = [1e3 * (new - old) for old, new in pairwise(at)]
    return {"token_ms": [sum(between) / len(between)], "between_ms": between}


def check_floor(found: Mapping[str, Any], plans: Iterable[str], floor_ms: float) -> None:
    """Raises SystemExit for a plan that took less than reading the weights takes.

    found: as `in_turns` gives it.
    """
    for plan in plans if found["rounds"] else ():
        for name in ("device_ms", "token_ms"):
            for ms in found[plan].get(f"{name}_rounds", []):
                if ms < floor_ms:
                    raise SystemExit(
                        f"{plan}: got {ms:.3f} ms for a token ({name}), allowed is at least "
                        f"{floor_ms:.3f} ms, in which memory is read once for its weights; the "
                        "measurement is wrong, and nothing of this round is written"
                    )


def in_turns(
    turns: Mapping[str, Callable[[], Figures]], rounds: int, end: float, over: str = "graphs"
) -> Iterator[dict[str, Any]]:
    """Every plan's turn in each round, another one first: what slows a host slows them all.

    turns: what a turn measures, by plan; over: the one that the others are compared with; end: of
    `time.monotonic`, after which no round is begun. Gives, after each round, `rounds` and those
    `left_out`, seconds waited for memory (`settled_s`), by plan its figures (`spread`) with
    their medians in each round, and the `ratio` of plans' figures.
    """
    taken: dict[str, list[Figures]] = {plan: [] for plan in turns}
    waited = settled()
    yield {"rounds": 0, "left_out": rounds, "settled_s": waited}
    for done in range(1, rounds + 1):
        if time.monotonic() > end:
            return
        first = done % len(turns)
        for plan in [*turns][first:] + [*turns][:first]:
            waited += settled()
            taken[plan].append(turns[plan]())
        found: dict[str, Any] = {"rounds": done, "left_out": rounds - done, "settled_s": waited}
        for plan, figures in taken.items():
            found[plan] = {}
            for name in figures[0]:
                found[plan] |= spread(name, [value for one in figures for value in one[name]])
                found[plan][f"{name}_rounds"] = [statistics.median(one[name]) for one in figures]
        yield found | {"ratio": _ratios({plan: found[plan] for plan in turns}, over)}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The median as `name`, quartiles as `name_low` and `name_high`."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _ratios(found: dict[str, dict[str, Any]], over: str) -> dict[str, dict[str, float]]:
    """Of each plan's medians of a round to those of `over`, over rounds."""
    ratios: dict[str, dict[str, float]] = {}
    for plan in [plan for plan in found if plan != over]:
        ratios[plan] = {}
        for name in [name for name in found[plan] if name.endswith("_rounds")]:
            pairs = zip(found[plan][name], found[over][name], strict=True)
            ratio = [mine / theirs for mine, theirs in pairs]
            ratios[plan] |= spread(name.removesuffix("_rounds"), ratio)
    return ratios

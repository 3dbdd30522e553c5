"""Time replays of CUDA graphs over cold caches, with the compared plans in turns."""

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
"""A function that times the work of several layers, and returns microseconds of one layer."""

Figures = dict[str, list[float]]
"""The figures that a turn measures, by name."""


def quartiles(times_us: list[float]) -> Times:
    """Return the median and the quartiles of times in microseconds."""
    low, middle, high = statistics.quantiles(times_us, n=4)
    return {"median_us": middle, "low_us": low, "high_us": high, "replays": len(times_us)}


class GraphTimer:
    """Times replays of CUDA graphs with CUDA events, after filling the L2 cache with other data."""

    def __init__(self, replays: int) -> None:
        self._replays = replays
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.ones(l2_bytes, dtype=torch.int32, device="cuda")  # 4 × L2

    def __call__(
        self, run: Callable[[], Any], layers: int, before: Callable[[int], Any] | None = None
    ) -> Times:
        """Return the time of `run`, divided by `layers`.

        `before` is called before each replay, with the replay's number, and is not timed.
        """
        replay = captured(run).replay
        marks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self._replays)
        ]
        for number, (start, stop) in enumerate([*marks[:2], *marks]):  # two replays to warm up
            if before is not None:
                before(number)
            self._flush.sum()
            start.record()
            replay()
            stop.record()
        torch.cuda.synchronize()
        return quartiles([a.elapsed_time(b) * 1e3 / layers for a, b in marks])


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of `run`, after running it twice."""
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
    """Wait until no background thread pins memory. Return the seconds that this took."""
    start = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == "kvindex-pin":
            thread.join()
    drained()
    return time.perf_counter() - start


def drained() -> None:
    """Wait until the device has finished all launched work, so that no later turn includes it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def of_tokens(at: list[float]) -> Figures:
    """Return milliseconds per token, from the times in seconds at which the host read tokens.

    `token_ms` is the mean interval. `between_ms` has the single intervals. If the host is late, it
    reads several tokens at once, so an interval may be shorter than a decode step.

    at: Times in seconds. The first time is when the device was idle, before the first token.
    """
    between = [1e3 * (new - old) for old, new in pairwise(at)]
    return {"token_ms": [sum(between) / len(between)], "between_ms": between}


def check_floor(found: Mapping[str, Any], plans: Iterable[str], floor_ms: float) -> None:
    """Raise SystemExit for a plan that took less time than it takes to read the weights.

    found: The result of `in_turns`.
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
    """Run every plan's turn in each round, so that a slow moment of the host affects all plans.

    Each round begins with another plan.

    Args:
        turns: For each plan, the function that measures a turn.
        rounds: Number of rounds.
        end: No round begins after this time of `time.monotonic`.
        over: The plan with which the other plans are compared.

    Yields:
        After each round, a dictionary. `rounds` and `left_out` are the numbers of rounds that were
        run and not run, `settled_s` the seconds spent waiting for pinned memory. For each plan
        there are its figures (`spread`), with the median of each round. `ratio` has the ratios of
        each plan's figures to the figures of `over`.
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
    """Return the median as `name`, and quartiles as `name_low` and `name_high`."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _ratios(found: dict[str, dict[str, Any]], over: str) -> dict[str, dict[str, float]]:
    """Return the ratios of each plan's medians to those of `over` in the same round."""
    ratios: dict[str, dict[str, float]] = {}
    for plan in [plan for plan in found if plan != over]:
        ratios[plan] = {}
        for name in [name for name in found[plan] if name.endswith("_rounds")]:
            pairs = zip(found[plan][name], found[over][name], strict=True)
            ratio = [mine / theirs for mine, theirs in pairs]
            ratios[plan] |= spread(name.removesuffix("_rounds"), ratio)
    return ratios

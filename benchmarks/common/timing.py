"""Measure the time of CUDA graph replays with a cold L2 cache, and the time per generated token.

To compare several variants, they are measured in alternation.
"""

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
"""Function that times the work of several layers, and returns the microseconds per layer."""

Figures = dict[str, list[float]]
"""Name of a measured quantity, such as `token_ms` -> its values."""


def quartiles(times_us: list[float]) -> Times:
    """Return the median and quartiles of times in microseconds, and the number of times."""
    low, middle, high = statistics.quantiles(times_us, n=4)
    return {"median_us": middle, "low_us": low, "high_us": high, "replays": len(times_us)}


class GraphTimer:
    """Captures a function as a CUDA graph, and times replays of the graph.

    Before each replay, the L2 cache is filled with other data.
    """

    def __init__(self, replays: int) -> None:
        self._replays = replays
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.ones(l2_bytes, dtype=torch.int32, device="cuda")  # 4 × L2

    def __call__(
        self, run: Callable[[], Any], layers: int, before: Callable[[int], Any] | None = None
    ) -> Times:
        """Return the time of a replay of `run` in microseconds, divided by `layers`.

        If `before` is given, it is called before each replay, with the number of the replay. Its
        time is not measured.
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
    """Run a function twice, then capture it as a CUDA graph, and return the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # use the error mode "thread_local", so that other threads may pin memory during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def settled() -> float:
    """Wait until no background thread pins host memory. Return the waiting time in seconds."""
    start = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == "kvindex-pin":
            thread.join()
    drained()
    return time.perf_counter() - start


def drained() -> None:
    """Wait until the device has finished all launched work, so that later timings exclude it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def of_tokens(at: list[float]) -> Figures:
    """Compute the milliseconds per token from the times at which the host received tokens.

    `token_ms` is the mean time between two successive tokens, and `between_ms` is a list of these
    times. If the host is late, it receives several tokens together, so a single time may be shorter
    than a decode step.

    Args:
        at: Times in seconds. The first is the time at which the first decode step began, while the
            device was idle. The others are the times at which tokens were received.
    """
    between = [1e3 * (new - old) for old, new in pairwise(at)]
    return {"token_ms": [sum(between) / len(between)], "between_ms": between}


def check_floor(found: Mapping[str, Any], plans: Iterable[str], floor_ms: float) -> None:
    """Raise SystemExit if a decode step took less time than `floor_ms`, which is not possible.

    Args:
        found: A result of `in_turns`.
        plans: Names of the measured variants.
        floor_ms: Time in milliseconds to read the weights from memory.
    """
    for plan in plans if found["rounds"] else ():
        for name in ("device_ms", "token_ms"):
            for ms in found[plan].get(f"{name}_rounds", []):
                if ms < floor_ms:
                    raise SystemExit(
                        f"{plan}: got {ms:.3f} ms for a token ({name}), allowed is at least "
                        f"{floor_ms:.3f} ms, the time to read the weights from memory once; the "
                        "measurement is wrong, and this round is not written"
                    )


def in_turns(
    turns: Mapping[str, Callable[[], Figures]], rounds: int, end: float, over: str = "graphs"
) -> Iterator[dict[str, Any]]:
    """Measure several variants alternately, so that a slow moment of the host affects all variants.

    In each round, every variant is measured once. Successive rounds begin with different variants.

    Args:
        turns: Name of each variant -> function that measures the variant once.
        rounds: Number of rounds.
        end: Time of `time.monotonic` after which no round begins.
        over: Name of the variant with which the other variants are compared.

    Yields:
        The results so far, before the first round and after each round:

        - `rounds`, `left_out`: number of rounds that were run, and that were not run.
        - `settled_s`: time in seconds spent waiting until background threads had pinned memory.
        - an entry for each variant: medians and quartiles, and the median of each round.
        - `ratio`: ratio of each variant's values to those of `over`.
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
    """Return the median of values as `name`, and the quartiles as `name_low` and `name_high`."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _ratios(found: dict[str, dict[str, Any]], over: str) -> dict[str, dict[str, float]]:
    """Divide the median of each variant by the median of the variant `over` in the same round.

    Return the median and the quartiles of these ratios over all rounds. Values that `over` does not
    have, such as the memory of a variant that only estimates a time, are left out.
    """
    ratios: dict[str, dict[str, float]] = {}
    for plan in [plan for plan in found if plan != over]:
        ratios[plan] = {}
        for name in [name for name in found[plan] if name.endswith("_rounds")]:
            if name not in found[over]:
                continue
            pairs = zip(found[plan][name], found[over][name], strict=True)
            ratio = [mine / theirs for mine, theirs in pairs]
            ratios[plan] |= spread(name.removesuffix("_rounds"), ratio)
    return ratios

"""Plans that are compared are timed in turns: what slows a host for a while slows them all."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from kvindex_cuda.pariskv.graph import GRAPHS

PINNING = "kvindex-pin"
"""Threads that pin memory ahead (`kvindex_cuda.memory.slab_pool`)."""

Figures = dict[str, list[float]]
"""What a turn measures, by name."""


def in_turns(
    turns: Mapping[str, Callable[[], Figures]],
    rounds: int,
    steps: int,
    clock: float,
    counts: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Every plan's turn in each round, another one first; after each what is known by then.

    turns: what a turn measures, by plan, `graphs` among them, which the others are compared with;
    steps: of layers in a turn; clock: of `time.monotonic`, after which no round is begun; counts:
    as `counted` gives. Gives `rounds` and those `left_out`, seconds waited for memory (`settled`),
    the `ratio` of plans' figures, and by plan its figures (`spread`), their medians in each round,
    and graphs `captured` and `replayed`.
    """
    taken: dict[str, list[Figures]] = {plan: [] for plan in turns}
    made = {plan: Counter[str]() for plan in turns}
    waited = settled()
    yield {"rounds": 0, "left_out": rounds, "settled_s": waited}
    for done in range(1, rounds + 1):
        if time.monotonic() > clock:
            return
        first = done % len(turns)
        for plan in [*turns][first:] + [*turns][:first]:
            waited += settled()
            before = counts.copy()
            taken[plan].append(turns[plan]())
            made[plan].update(counts - before)
        found: dict[str, Any] = {"rounds": done, "left_out": rounds - done, "settled_s": waited}
        found["layer_steps"] = steps * done
        for plan, figures in taken.items():
            found[plan] = {name: made[plan][name] for name in ("replayed", "captured")}
            for name in figures[0]:
                found[plan] |= spread(name, [value for one in figures for value in one[name]])
                found[plan][f"{name}_rounds"] = [statistics.median(one[name]) for one in figures]
        yield found | {"ratio": _ratios({plan: found[plan] for plan in turns})}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The median as `name`, quartiles as `name_low` and `name_high`."""
    several = values if len(values) > 1 else 2 * values
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _ratios(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each plan's medians of a round to those with graphs, over rounds."""
    ratios: dict[str, dict[str, float]] = {}
    for plan in [plan for plan in found if plan != "graphs"]:
        ratios[plan] = {}
        for name in [name for name in found[plan] if name.endswith("_rounds")]:
            pairs = zip(found[plan][name], found["graphs"][name], strict=True)
            ratio = [mine / theirs for mine, theirs in pairs]
            ratios[plan] |= spread(name.removesuffix("_rounds"), ratio)
    return ratios


def settled() -> float:
    """Wait until no thread pins memory ahead any more; gives the seconds that took."""
    start = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == PINNING:
            thread.join()
    return time.perf_counter() - start


@contextmanager
def counted(kind: str) -> Iterator[Counter[str]]:
    """Graphs `captured` and `replayed` of those that are made meanwhile on devices of a kind."""
    counts, real = Counter[str](), GRAPHS.get(kind)

    def made(device: torch.device, work: Callable[[], object]) -> Any:
        assert real is not None
        replay = real(device, work).replay
        counts["captured"] += 1

        def again() -> None:
            counts["replayed"] += 1
            replay()

        return SimpleNamespace(replay=again)

    if real is not None:
        GRAPHS[kind] = made
    try:
        yield counts
    finally:
        if real is not None:
            GRAPHS[kind] = real

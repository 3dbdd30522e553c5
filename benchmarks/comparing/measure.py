"""Measure one index on one layer with several numbers of rows.

The index is compared with full attention, and with the index `exact`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

import kvindex
from benchmarks.comparing.layers import Layer
from benchmarks.comparing.truth import Setting, Truth, asking, truth, worth
from kvindex import BaseIndex, Hits, KVIndex, Rows
from kvindex.core.capability import capability
from kvindex.core.protocol import ExpandsBatch
from kvindex.wrappers import Wrapper

Made = TypeVar("Made")
Truths = dict[int, Truth]
"""Number of tokens of the text -> ground truth after these tokens."""


def built(
    layer: Layer, spec: str, setting: Setting, *, k: int, pieces: bool = False, **options: Any
) -> Iterator[tuple[int, KVIndex, float]]:
    """Build an index, and yield it at each point at which it is to be evaluated.

    Yields the number of tokens so far, the index, and the seconds of the build. The index gets the
    same calls that a layer makes: the prompt's queries, its tokens in one append, the tokens' ids,
    and `end_prompt`. In the spec, {k} stands for k.

    pieces: Whether the last `generated` tokens are appended later, `every` at a time. The index
        first gets their queries and ids, and then their keys. A wrapper that decides in each step
        whether to search gets these queries one by one, and searches after each of them.
    options: Options of `kvindex.create`.
    """
    keys, values, queries = layer.keys[None], layer.values[None], layer.queries[None]
    points = setting.points if pieces else [setting.tokens]
    positions = torch.arange(keys.shape[2], device=keys.device)
    made = {**layer.options(), **options}
    index = kvindex.create(spec.replace("{k}", str(k)), **made)

    def append(start: int, stop: int) -> None:
        part, valid = slice(start, stop), setting.valid(start, stop, keys.device)
        index.append(keys[:, :, part], values[:, :, part], valid=valid)

    def first() -> None:
        index.observe_queries(queries[:, :, : points[0]], positions[: points[0]])
        append(0, points[0] - setting.local_window)
        read(layer, index, 0, points[0])
        index.end_prompt()

    _, seconds = timed(first, keys.device)
    yield points[0], index, seconds
    came = points[0]
    for point in points[1:]:
        while came < point:
            piece = min(setting.every, point - came)
            stepwise = inmost(index) is not index and capability(index, ExpandsBatch) is None
            steps = [1] * piece if stepwise else [piece]
            for step in steps:
                index.observe_queries(
                    queries[:, :, came : came + step], positions[came : came + step]
                )
                if step == 1:
                    index.search(queries[:, :, came], k=k)
                read(layer, index, came, came + step)
                came += step
            append(came - piece - setting.local_window, came - setting.local_window)
        yield point, index, seconds


def read(layer: Layer, index: KVIndex, start: int, stop: int) -> None:
    """Pass the ids of tokens `start` to `stop` to the index, as a layer does after their step."""
    if layer.tokens is not None:
        index.observe_tokens(layer.tokens[start:stop], first=start)


def truths(layer: Layer, setting: Setting, rows: list[int]) -> Truths:
    """Return the ground truth at each point.

    It comes from full attention, and from `exact` with its default group policy.
    """
    exact = built(layer, "exact", setting, k=rows[0], pieces=True)
    return {point: truth(layer, setting, index, point, rows) for point, index, _ in exact}


def measure(
    layer: Layer,
    spec: str,
    setting: Setting,
    rows: list[int],
    known: Truths,
    *,
    pieces: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure an index on a layer.

    Returns the layer's name, the seconds `build_s`, and for each k the figures of `truth.worth` and
    the seconds `search_s`. A wrapper, or an index with a budget, supports only one k, so it is
    built again for each k.

    pieces: As in `built`. If True, the result also has `along`: number of tokens after the prompt
        -> these figures for the first k.
    """
    found: dict[str, Any] = {"layer": layer.name, "rows": {}, "along": {}}
    for some in [[k] for k in rows] if "+" in spec or "{k}" in spec else [rows]:
        points = built(layer, spec, setting, k=some[0], pieces=pieces, **options)
        for point, index, seconds in points:
            found["build_s"] = seconds
            each = _asked(layer, setting, index, known[point], some)
            if point == setting.tokens:
                found["rows"] |= each
            if pieces:
                found["along"][point - setting.points[0]] = each[some[0]]
    return found


def _asked(
    layer: Layer, setting: Setting, index: KVIndex, known: Truth, rows: list[int]
) -> dict[int, dict[str, Any]]:
    """Return for each k the figures of the searches with the queries after a point.

    Times are medians over the queries.
    """
    found: dict[int, list[tuple[Hits, Rows]]] = {k: [] for k in rows}
    times: dict[int, list[float]] = {k: [] for k in rows}
    asked = asking(layer, setting, known.point)
    for k in rows:
        index.search(layer.queries[None, :, asked.start - 1], k=k)  # work that is done only once
    for at in asked:
        query = layer.queries[None, :, at]
        index.observe_queries(query[:, :, None], torch.tensor([at], device=query.device))
        for k in rows:
            hits, took = timed(partial(index.search, query, k=k), query.device)
            found[k].append((hits, index.fetch(hits)))
            times[k].append(took)
        read(layer, index, at, at + 1)
    worths = {k: worth(layer, setting, found[k], known, k) for k in rows}
    return {k: {**worths[k], "search_s": median(times[k])} for k in rows}


def sizes(layer: Layer, spec: str, setting: Setting, k: int, **options: Any) -> dict[str, float]:
    """Return `BaseIndex.bytes_per_key` for these keys in bfloat16."""
    _, index, _ = next(built(layer.to(dtype=torch.bfloat16), spec, setting, k=k, **options))
    return inmost(index).bytes_per_key()


def timed(call: Callable[[], Made], device: torch.device) -> tuple[Made, float]:
    """Return the result of a call, and its seconds."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made = call()
    wait()
    return made, time.perf_counter() - start


def inmost(index: KVIndex) -> BaseIndex:
    """Return the index inside all wrappers. Raises TypeError if a wrapper has several."""
    while isinstance(index, Wrapper):
        index = index.inner
    if not isinstance(index, BaseIndex):
        raise TypeError(f"index: got a {type(index).__name__}, allowed is one on BaseIndex")
    return index

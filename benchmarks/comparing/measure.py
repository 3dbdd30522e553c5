"""One index on one layer, at several numbers of rows, beside full attention and `exact`."""

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
"""By point of the text."""


def built(
    layer: Layer, spec: str, setting: Setting, *, k: int, pieces: bool = False, **options: Any
) -> Iterator[tuple[int, KVIndex, float]]:
    """An index each time that it is to be asked: the point, the index, seconds to `end_prompt`.

    In the spec, {k} stands for k. It is told what a layer tells: the prompt's queries, its tokens
    in one append, their ids, `end_prompt`. pieces: the last `generated` tokens come later, in
    pieces of `every`: queries, ids, then keys. A wrapper that decides step by step observes these
    queries one by one and is searched at each. options: for `kvindex.create`.
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
    """Tell an index the ids of these tokens of the text, after their step, as a layer does."""
    if layer.tokens is not None:
        index.observe_tokens(layer.tokens[start:stop], first=start)


def truths(layer: Layer, setting: Setting, rows: list[int]) -> Truths:
    """What is true at each point, by full attention and by `exact` with its own policy."""
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
    """The layer's name, `build_s`; by k what the text's end shows (`worth`, and `search_s`).

    pieces: `along` has the same for the first k, by tokens that came after the prompt. A wrapper,
    or a budget, has one k only, so it is built for each.
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
    """By k, what the queries after a point find, told and asked one by one; times are medians."""
    found: dict[int, list[tuple[Hits, Rows]]] = {k: [] for k in rows}
    times: dict[int, list[float]] = {k: [] for k in rows}
    asked = asking(layer, setting, known.point)
    for k in rows:
        index.search(layer.queries[None, :, asked.start - 1], k=k)  # what is made once
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
    """`BaseIndex.bytes_per_key` on these keys in bfloat16."""
    _, index, _ = next(built(layer.to(dtype=torch.bfloat16), spec, setting, k=k, **options))
    return inmost(index).bytes_per_key()


def timed(call: Callable[[], Made], device: torch.device) -> tuple[Made, float]:
    """What it returns, and the seconds that it takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made = call()
    wait()
    return made, time.perf_counter() - start


def inmost(index: KVIndex) -> BaseIndex:
    """The index inside all wrappers. Raises TypeError for one of others."""
    while isinstance(index, Wrapper):
        index = index.inner
    if not isinstance(index, BaseIndex):
        raise TypeError(f"index: got a {type(index).__name__}, allowed is one on BaseIndex")
    return index

"""Measure one index on one layer of a real model, for several numbers of tokens to retrieve.

The keys, values and queries of the layer were recorded while the model read a text. The index is
compared with full attention and with the index `exact`.
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
"""Number of tokens after which an index is evaluated -> ground truth for the next queries."""


def built(
    layer: Layer, spec: str, setting: Setting, *, k: int, pieces: bool = False, **options: Any
) -> Iterator[tuple[int, KVIndex, float]]:
    """Build an index from recorded keys and values, and yield it at each length to evaluate.

    The function makes the calls that an attention layer makes: it passes the queries of the prompt
    to the index, appends all tokens of the prompt in one call, passes their token ids, and calls
    `end_prompt`.

    Args:
        layer: The captured layer.
        spec: Name and options of the index, in which `{k}` stands for `k`.
        setting: Division of the text into sink, local window and tokens in the index.
        k: Number of tokens to retrieve per KV head.
        pieces: Whether the end of the text is appended in chunks after the prompt, as if the model
            generated it. Before each chunk, the index gets the queries and token ids of the chunk.
            Some wrappers decide in each decode step whether to search. They get the queries one by
            one, with a search after each query.
        options: Further options of `kvindex.create`.

    Yields:
        The number of tokens so far, the index, and the time of building it in seconds.
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
    """Pass the token ids at positions `start` to `stop` to the index, as a real layer does."""
    if layer.tokens is not None:
        index.observe_tokens(layer.tokens[start:stop], first=start)


def truths(layer: Layer, setting: Setting, rows: list[int]) -> Truths:
    """Compute the ground truth at each position of a text at which indexes are evaluated.

    The ground truth consists of results of full attention, and of the index `exact` with its
    default options.
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
    """Measure an index on a captured layer: on keys, values and queries of a real model.

    An index with a wrapper, or with a budget, supports only one number of tokens to retrieve. It is
    built again for each number in `rows`.

    Args:
        layer: The captured layer.
        spec: Name and options of the index.
        setting: Division of the text into sink, local window and tokens in the index.
        rows: Numbers of tokens to retrieve per KV head.
        known: The ground truth of the layer.
        pieces: Whether the end of the text is appended in chunks, as in `built`.
        options: Further options of `kvindex.create`.

    Returns:
        - `layer`: name of the layer.
        - `build_s`: time of building the index in seconds.
        - `rows`: number of retrieved tokens -> quality (see `truth.worth`) and search time
          `search_s` in seconds, at the end of the text.
        - `along`: number of tokens after the prompt -> quality and search time with the first
          number in `rows`. It is empty without `pieces`.
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
    """Search with the queries of the tokens that follow the tokens in the index.

    Return the quality of the search results and the median search time in seconds (`search_s`), for
    each number of tokens to retrieve in `rows`.
    """
    found: dict[int, list[tuple[Hits, Rows]]] = {k: [] for k in rows}
    times: dict[int, list[float]] = {k: [] for k in rows}
    asked = asking(layer, setting, known.point)
    for k in rows:
        index.search(layer.queries[None, :, asked.start - 1], k=k)  # allocates and compiles
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
    """Return how many bytes per key the index stores, for each kind of data.

    The index is built from the keys of the layer, converted to bfloat16.
    """
    _, index, _ = next(built(layer.to(dtype=torch.bfloat16), spec, setting, k=k, **options))
    return inmost(index).bytes_per_key()


def timed(call: Callable[[], Made], device: torch.device) -> tuple[Made, float]:
    """Call a function. Return its result, and the time in seconds until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made = call()
    wait()
    return made, time.perf_counter() - start


def inmost(index: KVIndex) -> BaseIndex:
    """Return the index inside all wrappers. Raise TypeError if a wrapper contains several."""
    while isinstance(index, Wrapper):
        index = index.inner
    if not isinstance(index, BaseIndex):
        raise TypeError(f"index: got {type(index).__name__}, allowed is a subclass of BaseIndex")
    return index

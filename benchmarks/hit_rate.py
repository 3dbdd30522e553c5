"""How many of a decoding step's rows an earlier step has fetched: what a cache of rows would find.

    python -m benchmarks.hit_rate --text FILE… [--tokens N …] [--written T] [--index SPEC]
        [--rows R …] [--seconds S] [--model … --gguf-file … --lora …] [--device …] --json OUT
    python -m benchmarks.hit_rate --join RUN --json OUT

A model reads a text and goes on with it; at each of the last T tokens every layer selects its k
rows of the text, all steps of a layer in a few searches. The cache is that of
kvindex_cuda/memory/row_cache.py, empty at first: R slots per KV head in sets of 4, the oldest of
a set given up. The first half of the T steps fills it and does not count. OUT is written after each
text; once --seconds are over none is begun: --join adds those of another run, and says so
(`joined`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import kvindex
from benchmarks.reading import add_model, described, loaded, read_and_write, reported, write
from kvindex_adapters.evaluate.capture import Captured
from kvindex_cuda.memory.row_cache import WAYS

Ints = NDArray[np.int64]

PIECE = 2**23
"""Keys times queries searched at once: a search takes some 50 bytes for each."""


def selected(layer: Captured, index: str, k: int) -> Tensor:
    """Rows that each of the T steps selects, int64 `[T, G, k]` on the CPU.

    Raises ValueError for an index whose steps cannot be searched at once.
    """
    (H, T, D), (G, N, _) = layer.queries.shape, layer.keys.shape
    made: Any = kvindex.create(index, q_heads=H, kv_heads=G, head_dim=D, device=layer.keys.device)
    if getattr(made, "depends_on_queries", False) or not hasattr(made, "expand_batch"):
        raise ValueError(f"index: got {index!r}, allowed is one that serves many queries at once")
    keys = layer.keys.float()[None, :, : N - T]
    made.append(keys, keys)
    queries = layer.queries.float().transpose(0, 1).contiguous()
    parts = queries.split(max(PIECE // (H * N), 1))
    return torch.cat([made.expand_batch(len(some)).search(some, k=k).ids.cpu() for some in parts])


def found(ids: Ints, rows: int) -> Ints:
    """How many of each step's rows lie in a cache of so many slots, int64 `[T, L]`.

    ids: int64 `[T, L, k]` of L caches, distinct in a step; below 0 for none. As the kernels decide
    (kernels/cache.cuh) when a step's rows are looked up one after another; a GPU does so side by
    side.
    """
    T, L, k = ids.shape
    sets, cache = rows // WAYS, np.arange(L)
    tags = np.full((L, sets, WAYS), -1, dtype=np.int64)
    stamps = np.zeros((L, sets, WAYS), dtype=np.int64)  # the step that used a slot last
    hits = np.zeros((T, L), dtype=np.int64)
    place = _hashed(ids) % sets
    for step in range(T):
        for row in range(k):
            now, at = ids[step, :, row], place[step, :, row]
            same = (tags[cache, at] == now[:, None]) & (now >= 0)[:, None]  # [L, WAYS]
            hit, oldest = same.any(-1), stamps[cache, at].argmin(-1)
            way = np.where(hit, same.argmax(-1), oldest)
            free = hit | (stamps[cache, at, way] <= step)  # else all serve this step
            some = np.flatnonzero(free & (now >= 0))
            to = some, at[some], way[some]
            tags[to], stamps[to] = now[some], step + 1
            hits[step] += hit
    return hits


def _hashed(ids: Ints) -> Ints:
    """As kernels/cache.cuh, int64."""
    return (ids * 2654435761 & 0xFFFFFFFF) >> 12


def rates(ids: Tensor, rows: int) -> list[float]:
    """Per layer the share of the second half's rows that are found, of ids `[L, T, G, k]`."""
    L, T, G, k = ids.shape
    hits = found(ids.transpose(0, 1).reshape(T, L * G, k).numpy(), rows)
    shares: list[float] = (hits[T // 2 :].reshape(-1, L, G).mean((0, 2)) / k).tolist()
    return shares


def measured(layers: list[Captured], given: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Hit rates by slots, each with that of every layer, and the seconds that both parts took."""
    start = time.monotonic()
    chosen = []
    for layer in layers:
        chosen.append(selected(layer, given.index, given.k))
        progress()
    ids, searched = torch.stack(chosen), time.monotonic()
    caches = []
    for rows in given.rows:
        each = rates(ids, rows)
        shares = dict(hit_rate=sum(each) / len(each), worst_layer=min(each), best_layer=max(each))
        caches.append({"rows": rows, **shares, "layers": each})
    took = {"search_s": searched - start, "play_s": time.monotonic() - searched}
    return {"caches": caches, **took}


SAME = ("model", "lora", "index", "k", "steps")
"""What runs that are joined have in common, and of their machines:"""

ALIKE = ("gpu", "torch", "transformers")


def joined(result: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`result` with the texts and lengths of another run that it lacks.

    Raises ValueError for a run of something else, with other slots or on another kind of machine,
    for one that adds nothing, and for one that has been joined.
    """
    of = [_kind(run) for run in (result, other)]
    if of[0] != of[1]:
        raise ValueError(f"join: got a run of {of[1]}, allowed is one of {of[0]}")
    if "joined" in other:
        raise ValueError("join: got a run with texts of others, allowed is one that read them all")
    held, more = ({_place(cell): cell for cell in run["cells"]} for run in (result, other))
    new = [place for place in more if place not in held]
    if not new:
        raise ValueError(f"join: got a run of {list(more)}, allowed is one that adds some")
    cells = held | {place: more[place] for place in new}
    about = [{"text": text, "tokens": tokens} for text, tokens in new]
    return result | {
        "cells": [cells[place] for place in sorted(cells)],
        "not_begun": [cell for cell in result["not_begun"] if _place(cell) not in new],
        "joined": [*result.get("joined", []), {"cells": about, "machine": other["machine"]}],
    }


def _kind(run: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same of runs that are joined."""
    slots = {tuple(cache["rows"] for cache in cell["caches"]) for cell in run["cells"]}
    machine = (run["machine"].get(name) for name in ALIKE)
    return *(run[name] for name in SAME), *machine, sorted(slots)


def _place(cell: dict[str, Any]) -> tuple[str, int]:
    return cell["text"], cell["tokens"]


def show(result: dict[str, Any]) -> None:
    """Print a line for each text, length and size of cache."""
    table = Table("text", "tokens", "rows", "hit rate", "worst layer", "best layer")
    for cell in result["cells"]:
        for cache in cell["caches"]:
            shares = (f"{cache[name]:.3f}" for name in ("hit_rate", "worst_layer", "best_layer"))
            table.add_row(cell["text"], f"{cell['tokens']:,}", f"{cache['rows']:,}", *shares)
    Console().print(table)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16000])
    parser.add_argument("--written", type=int, default=256)
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then none is begun")
    parser.add_argument("--join", type=Path, help="a result of another run, to take texts of")
    add_model(parser)
    found = parser.parse_args(given)
    if (found.text is None) == (found.join is None):
        parser.error(
            f"text: got {found.text} with --join {found.join}, allowed is either, not both"
        )
    if found.join and not (found.join.exists() and found.json and found.json.exists()):
        parser.error(f"join: got {found.join}, allowed is a file that exists, with --json another")
    return found


def main() -> None:
    """Read, play, write, report; or join."""
    start, given = time.monotonic(), arguments()
    if given.join:
        runs = [json.loads(path.read_text()) for path in (given.json, given.join)]
        try:
            write(joined(*runs), given.json)
        except ValueError as error:
            sys.exit(str(error))
        return
    model, tokenizer = loaded(given)
    about = {"index": given.index, "k": given.k, "steps": given.written}
    result: dict[str, Any] = {**described(given), **about, "cells": [], "not_begun": []}
    with Progress() as progress:
        for text in given.text:
            for tokens in given.tokens:
                if time.monotonic() - start > given.seconds:
                    result["not_begun"].append({"text": text.stem, "tokens": tokens})
                else:
                    began = time.monotonic()
                    report = reported(progress, f"{text.stem}, {tokens} tokens")
                    words = text.read_text()
                    layers = read_and_write(model, tokenizer, words, tokens, given.written, report)
                    read_s = time.monotonic() - began
                    task = progress.add_task("layers", total=len(layers))
                    cell = measured(layers, given, lambda task=task: progress.advance(task))
                    about = {"text": text.stem, "tokens": tokens, "read_s": read_s}
                    result["cells"].append({**about, **cell})
                write(result, given.json)
    show(result)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

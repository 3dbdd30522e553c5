"""Hit rate of the row cache while a model generates.

    PYTHONPATH=.:adapters python tools/cache_hits.py --text FILE… [--tokens N …] [--written T]
        [--index SPEC] [--rows R …] [-k K] [--model … --gguf-file … --lora …] [--device …]
        --json OUT

The model reads N tokens of each text and writes T more; their queries search, and the rows that
each step selects are looked up in a cache as `kvindex_cuda` has it, empty at first: R slots per KV
head in sets of 4, the oldest of a set given up. The first half of the T steps fills it and does
not count. OUT is written after each text.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor

import kvindex
from benchmarks import report
from benchmarks.common.reading import add_model, described, ids_of, loaded, read_and_write, write
from kvindex.core.capability import required
from kvindex.core.protocol import ExpandsBatch
from kvindex_adapters.evaluate.capture import Captured

Ints = NDArray[np.int64]

WAYS = 4
"""Slots of a set, as in the kernels."""

PIECE = 2**23
"""Keys times queries searched at once: a search takes some 50 bytes for each."""


def selected(layer: Captured, index: str, k: int) -> Tensor:
    """Rows that each of the T steps selects, int64 `[T, G, k]` on the CPU.

    The index must serve many queries of one sequence at once (`expand_batch`).
    """
    (H, T, D), (G, N, _) = layer.queries.shape, layer.keys.shape
    made = kvindex.create(index, q_heads=H, kv_heads=G, head_dim=D, device=layer.keys.device)
    keys = layer.keys.float()[None, :, : N - T]
    made.append(keys, keys)
    queries = layer.queries.float().transpose(0, 1).contiguous()
    parts = queries.split(max(PIECE // (H * N), 1))
    many = required(made, ExpandsBatch).expand_batch
    return torch.cat([many(len(part)).search(part, k=k).ids.cpu() for part in parts])


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
    place = ((ids * 2654435761 & 0xFFFFFFFF) >> 12) % sets
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


def rates(ids: Tensor, rows: int) -> list[float]:
    """Per layer the share of the second half's rows that are found, of ids `[L, T, G, k]`."""
    L, T, G, k = ids.shape
    hits = found(ids.transpose(0, 1).reshape(T, L * G, k).numpy(), rows)
    shares: list[float] = (hits[T // 2 :].reshape(-1, L, G).mean((0, 2)) / k).tolist()
    return shares


def caches(layers: list[Captured], index: str, k: int, slots: list[int]) -> list[dict[str, Any]]:
    """Hit rates by slots, each with that of every layer."""
    ids, found = torch.stack([selected(layer, index, k) for layer in layers]), []
    for rows in slots:
        each = rates(ids, rows)
        shares = dict(hit_rate=sum(each) / len(each), worst_layer=min(each), best_layer=max(each))
        found.append({"rows": rows, **shares, "layers": each})
    return found


def main() -> None:
    """Read, play, write, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16000])
    parser.add_argument("--written", type=int, default=256)
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("-k", type=int, default=100)
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    about = {"index": given.index, "k": given.k, "steps": given.written}
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    with Progress() as progress:
        for text, tokens in itertools.product(given.text, given.tokens):
            ids = ids_of(tokenizer, text.read_text(), tokens)
            title = f"{text.stem}, {tokens} tokens"
            layers = read_and_write(model, ids, given.written, progress, title)
            played = caches(layers, given.index, given.k, given.rows)
            result["cells"].append({"text": text.stem, "tokens": tokens, "caches": played})
            write(result, given.json)
    print(report.TABLES["hit_rate"](result))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

"""How many of a decoding step's rows an earlier step has fetched: what a cache of rows would find.

    python -m benchmarks.hit_rate --text FILE… [--tokens N …] [--written T] [--index SPEC]
        [--rows R …] [--model … --gguf-file … --lora …] [--device …] --json OUT

A model reads a text and goes on with it; at each of the last T tokens every layer selects its k
rows. The cache is that of kvindex_cuda/row_cache.py, empty at first: R slots per KV head in sets
of 4, the oldest of a set given up. The first half of the T steps fills it and does not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import kvindex
from benchmarks.reading import add_model, described, loaded, read_and_write, reported, write
from kvindex_adapters.capture import Captured

WAYS = 4


def selected(layer: Captured, index: str, k: int) -> Tensor:
    """Rows that each of the T steps selects, int64 `[T, G, k]`."""
    (H, T, D), (G, N, _) = layer.queries.shape, layer.keys.shape
    made = kvindex.create(index, q_heads=H, kv_heads=G, head_dim=D, device=layer.keys.device)
    keys = layer.keys.float()[None]
    made.append(keys[:, :, : N - T], keys[:, :, : N - T])
    queries = layer.queries.float().transpose(0, 1)
    return torch.stack([made.search(queries[t][None], k=k).ids[0].cpu() for t in range(T)])


def found(ids: list[list[int]], rows: int) -> list[int]:
    """How many of each step's ids lie in a cache of so many rows, one KV head's."""
    sets: list[dict[int, int]] = [{} for _ in range(rows // WAYS)]  # id: the step that used it
    hits = []
    for step, now in enumerate(ids):
        where = [sets[_hashed(i) % len(sets)] for i in now]
        old = [i in ways for i, ways in zip(now, where, strict=True)]
        for i, ways, was in zip(now, where, old, strict=True):
            if was:
                ways[i] = step
        for i, ways, was in zip(now, where, old, strict=True):
            if was:
                continue
            if len(ways) == WAYS:
                oldest = min(ways, key=ways.__getitem__)
                if ways[oldest] == step:
                    continue  # all serve this step
                del ways[oldest]
            ways[i] = step
        hits.append(sum(old))
    return hits


def _hashed(i: int) -> int:
    """As kernels/agree.cu."""
    return (i * 2654435761 & 0xFFFFFFFF) >> 12


def rates(ids: Tensor, rows: int) -> float:
    """Share of the second half's rows that are found, of ids `[T, G, k]`."""
    T, G, k = ids.shape
    per_head = [found(ids[:, g].tolist(), rows) for g in range(G)]
    return sum(sum(hits[T // 2 :]) for hits in per_head) / (G * (T - T // 2) * k)


def main() -> None:
    """Read, play, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16000])
    parser.add_argument("--written", type=int, default=256)
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--k", type=int, default=100)
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    cells: list[dict[str, Any]] = []
    with Progress() as progress:
        for text in given.text:
            for tokens in given.tokens:
                report = reported(progress, f"{text.stem}, {tokens} tokens")
                words = text.read_text()
                layers = read_and_write(model, tokenizer, words, tokens, given.written, report)
                task = progress.add_task("layers", total=len(layers))
                each: dict[int, list[float]] = {rows: [] for rows in given.rows}
                for layer in layers:
                    ids = selected(layer, given.index, given.k)
                    for rows in given.rows:
                        each[rows].append(rates(ids, rows))
                    progress.advance(task)
                for rows, layers_ in each.items():
                    cells.append(
                        {
                            "text": text.stem,
                            "tokens": tokens,
                            "rows": rows,
                            "hit_rate": sum(layers_) / len(layers_),
                            "worst_layer": min(layers_),
                            "best_layer": max(layers_),
                        }
                    )
    table = Table("text", "tokens", "rows", "hit rate", "worst layer", "best layer")
    for cell in cells:
        shares = (f"{cell[name]:.3f}" for name in ("hit_rate", "worst_layer", "best_layer"))
        table.add_row(cell["text"], f"{cell['tokens']:,}", f"{cell['rows']:,}", *shares)
    Console().print(table)
    about = {"index": given.index, "k": given.k, "steps": given.written}
    write({**described(given), **about, "cells": cells}, given.json)


if __name__ == "__main__":
    main()

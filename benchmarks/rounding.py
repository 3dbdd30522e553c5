"""What rounding the query costs, and one list of candidates per group: recall of a group's rows.

    python -m benchmarks.rounding --text FILE… [--tokens N] [--written N] [--largest N …]
        [--json OUT]

SmolLM2-135M-Instruct reads N tokens of each text, then writes some of its own; the newest queries
search the keys of the text, as layers do: one set of rows for the query heads of a KV head. Recall
is of the rows that exact search returns under the same policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvindex
from benchmarks.reading import SEED, read_and_write
from kvindex.core.config import parse_spec
from kvindex.indexes.pariskv import LISTS
from kvindex.ops.coarse import ceil_share
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.recall import SINK
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load, smollm2

LARGEST = (127, 85, 21, 15, 5, 3)
FIRST, EVERY = 2, 5
"""Layers 2, 7, 12, …: a sixth of them, from all depths."""

CANDIDATES = ("beta=.03:refine_factor=1", "beta=.02:refine_factor=4")
"""Few enough for the coarse stage to matter, and as the presets have it."""


def recalls(
    layers: Sequence[Captured], specs: Sequence[str], *, k: int, prompt: int
) -> list[float]:
    """Of each spec: the share of exact search's rows that it returns, over layers and queries."""
    found = [0.0] * len(specs)
    for layer in layers:
        keys = layer.keys[None, :, SINK:prompt].float()
        queries = layer.queries.float().transpose(0, 1).contiguous()
        (T, H, D), G = queries.shape, keys.shape[1]
        shape = dict(q_heads=H, kv_heads=G, head_dim=D, scale=layer.scale, softcap=layer.softcap)
        ids = []
        for spec in ("exact", *specs):
            index: Any = kvindex.create(spec, **shape)
            index.append(keys, keys)
            ids.append(index.expand_batch(T).search(queries, k=k).ids)
        for at, mine in enumerate(ids[1:]):
            same = (ids[0][..., None] == mine[..., None, :]).any(-1)
            found[at] += float(same.double().mean()) / len(layers)
    return found


def main() -> None:
    """Capture, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--written", type=int, default=64, help="sampled tokens whose queries ask")
    parser.add_argument("--largest", nargs="+", type=int, default=LARGEST)
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--json", type=output())
    given = parser.parse_args()
    folder, file = smollm2()
    model, tokenizer = load(folder, gguf_file=file)
    specs = [
        f"pariskv:preset=fast:{share}:lists={lists}:largest={largest}"
        for share in CANDIDATES
        for lists in LISTS
        for largest in given.largest
    ]
    cells: list[dict[str, Any]] = []
    for text in given.text:
        layers = read_and_write(model, tokenizer, text.read_text(), given.tokens, given.written)
        searched = layers[FIRST::EVERY]
        found = recalls(searched, specs, k=given.k, prompt=given.tokens)
        for spec, recall in zip(specs, found, strict=True):
            options = parse_spec(spec)[1]
            share = ceil_share(given.tokens - SINK, options["beta"])
            cells.append(
                {
                    "text": text.stem,
                    "index": spec,
                    "candidates": max(share, options["pool"] * given.k),
                    "lists": options["lists"],
                    "query_max": options["query_max"],
                    "recall": recall,
                }
            )
            print(text.stem, spec, f"{recall:.4f}", flush=True)
    if given.json:
        written = {
            "model": file,
            "tokens": given.tokens,
            "k": given.k,
            "queries_per_head": given.written,
            "layers": list(range(FIRST, len(layers), EVERY)),
            "heads_per_group": len(layers[0].queries) // len(layers[0].keys),
            "seed": SEED,
            "machine": describe(),
            "cells": cells,
        }
        write_json(given.json, written)


if __name__ == "__main__":
    main()

"""Measure the loss of quality if all query heads of a layer share one list of rows.

In latent attention (MLA) all heads have the same keys, so they share a list. The models here have
several KV heads with keys of their own. They attend through exact search, with one list for each KV
head, or with one list for all query heads of a layer, by the same group policy. The model reads N
tokens of a text and then the next T tokens one at a time. In latent attention, a step with one list
of R rows reads R rows, and a step with m lists of R rows reads m · R.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import described, ids_of, loaded, write
from kvindex import Hits
from kvindex.indexes.exact import Exact
from kvindex.ops import group
from kvindex_adapters.evaluate.fidelity import followed, full_logits
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import prefill


class OneList(Exact):
    """Exact search with one list of tokens for all query heads of a layer.

    Each KV head fetches its own rows of these tokens.
    """

    def _search(self, queries: Tensor, k: int) -> Hits:
        g = self.geometry
        scores = self.scores(group.fold(queries, g.kv_heads, self.config.group))
        every = scores.flatten(1, 2)[:, None]  # [B, 1, H, N]
        agreed = group.agree(every, self.config.group, scale=g.scale, softcap=g.softcap)
        best, ids = self.ops.select.top_k(agreed, k)
        return Hits(*(part.expand(-1, g.kv_heads, -1).contiguous() for part in (ids, best)))


WAYS = {"one": OneList, "several, as many rows": Exact, "several": Exact}
"""Ways to select rows: name -> index."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("-k", type=int, default=100)


def run(given: argparse.Namespace) -> None:
    """Measure each way to select rows. Print and write the result."""
    model, tokenizer = loaded(given)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    sizes = {"one": given.k, "several, as many rows": -(-given.k // heads[1]), "several": given.k}
    about = dict(tokens=given.tokens, steps=given.steps, k=given.k)
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    result |= dict(q_heads=heads[0], kv_heads=heads[1])
    with Progress() as progress:
        for text in given.text:
            words = text.read_text(encoding="utf-8")
            ids = ids_of(tokenizer, words, given.tokens + given.steps).to(model.device)
            prompt, rest = ids[: given.tokens], ids[given.tokens :]
            full = full_logits(model, prompt, rest)
            for way, index in progress.track(WAYS.items(), description=text.stem):
                k = sizes[way]
                with attach(model, index=index, k=k, dense_below=0) as cache:
                    prefill(model, ids, cache, stop=len(prompt), chunk=1024)
                    found = followed(model, cache, rest.to(model.device), full)
                cell = dict(text=text.stem, lists=way, k=k, **dataclasses.asdict(found))
                result["cells"].append(cell)
                write(result, given.json)
    print(report.TABLES["lists"](result))

"""Measure the loss of quality if all query heads of a layer attend to the same list of tokens.

In latent attention (MLA), all heads have the same keys. So an index retrieves one list of tokens
for all heads. This benchmark measures the effect of such a common list in models with several KV
heads. An exact search retrieves either one list of tokens for each KV head, or one common list for
all query heads of a layer. The model reads N tokens of a text, and then the next T tokens one by
one.

In latent attention, a decode step with one list of R tokens would read R tokens from memory. With m
lists, it would read m · R tokens.
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
    """Exact search that retrieves the same tokens for all query heads of a layer.

    Each KV head then reads its own keys and values of these tokens.
    """

    def _search(self, queries: Tensor, k: int) -> Hits:
        g = self.geometry
        scores = self.scores(group.fold(queries, g.kv_heads, self.config.group))
        every = scores.flatten(1, 2)[:, None]  # [B, 1, H, N]
        agreed = group.agree(every, self.config.group, scale=g.scale, softcap=g.softcap)
        best, ids = self.ops.select.top_k(agreed, k)
        return Hits(*(part.expand(-1, g.kv_heads, -1).contiguous() for part in (ids, best)))


WAYS = {"one": OneList, "several, as many rows": Exact, "several": Exact}
"""Number of lists of retrieved tokens per layer, "one" or "several" -> class of the index.

With "several, as many rows", all lists together contain as many tokens as the list of "one".
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `lists` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument("--tokens", type=int, default=4000, help="Number of tokens of the prompt")
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="Compare the predictions for this number of tokens after the prompt",
    )
    parser.add_argument(
        "-k",
        type=int,
        default=100,
        help="Number of tokens that a search retrieves for one KV head",
    )


def run(given: argparse.Namespace) -> None:
    """Run the command `lists`: compare one list of tokens per layer with several lists.

    The results are printed, and written to the JSON file.
    """
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

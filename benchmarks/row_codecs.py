"""What rows of a byte per number cost: error of attention's output, KL of the model's next token.

    python -m benchmarks.row_codecs --text FILE… [--tokens N] [--steps T] [-k K]
        [--model … --gguf-file … --lora …] [--device cuda] [--json OUT]

First by itself: the model reads each text, and the newest queries of every layer attend to all
keys and values before them, as they are and as a codec gives them back; the error is
`‖õ − o‖ / ‖o‖` of one head's output. Then in the model: it is fed the tokens after the text
through an index whose rows are codes, and the KL divergence from full attention is taken.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.comparing.layers import Layer, capture
from benchmarks.reading import add_model, described, loaded, write
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.storage.codecs import NAMES, codec
from kvindex_adapters.evaluate.fidelity import divergences, full_logits
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.reading import prefill

CODECS = {"bfloat16": ("plain", torch.bfloat16)} | {
    name: (name, torch.float32) for name in NAMES if name != "plain"
}
"""Codecs, and the dtype in which they give numbers back; bfloat16 is what others are beside."""

PARTS = ("both", "keys", "values")


def coded(layer: Layer, name: str) -> Rows:
    """The layer's keys `[G, N, D]` and values `[G, N, Dv]` as a codec of `CODECS` gives them."""
    codes, dtype = CODECS[name]
    (G, _, D), width = layer.keys.shape, layer.values.shape[-1]
    sizes = dict(q_heads=G, kv_heads=G, head_dim=D, value_dim=width)
    rows = codec(codes, Geometry.of(**sizes, dtype=dtype, device=layer.keys.device))
    back = rows.decode(rows.encode(layer.keys[None].to(dtype), layer.values[None].to(dtype)))
    return Rows(back.keys[0].float(), back.values[0].float())


def attention(layer: Layer, rows: Rows, newest: int) -> Tensor:
    """Causal attention of the newest queries over rows, float32 `[G, H / G, newest, Dv]`."""
    G, N, _ = rows.keys.shape
    queries = layer.queries[:, -newest:].float().unflatten(0, (G, -1))
    logits = layer.scale * queries @ rows.keys[:, None].mT
    if layer.softcap is not None:
        logits = layer.softcap * (logits / layer.softcap).tanh()
    at = torch.arange(N, device=logits.device)
    logits = logits.masked_fill(at > at[-newest:, None], float("-inf"))
    return logits.softmax(-1) @ rows.values[:, None]


def errors(layer: Layer, newest: int) -> dict[tuple[str, str], Tensor]:
    """By codec and what it codes: `‖õ − o‖ / ‖o‖`, float32 `[G, H / G, newest]`."""
    plain = Rows(layer.keys.float(), layer.values.float())
    want, found = attention(layer, plain, newest), {}
    for name in CODECS:
        back = coded(layer, name)
        rows = (back, Rows(back.keys, plain.values), Rows(plain.keys, back.values))
        for part, some in zip(PARTS, rows, strict=True):
            off = (attention(layer, some, newest) - want).norm(dim=-1)
            found[name, part] = off / want.norm(dim=-1)
    return found


def summary(layers: list[Tensor]) -> dict[str, float]:
    """Of the errors of layers: their mean, nine tenths' bound, the worst layer's mean."""
    every = torch.cat([layer.flatten() for layer in layers])
    return {
        "mean": float(every.mean()),
        "p90": float(every.quantile(0.9)),
        "worst_layer": max(float(layer.mean()) for layer in layers),
    }


def dense_divergences(model: Any, prompt: Tensor, rest: Tensor, full: Tensor, rows: str) -> Tensor:
    """As `divergences`, with attention to every row: what the codec costs by itself."""
    ids = torch.cat([prompt, rest]).to(model.device)
    dense: Any = dict(index=f"exact:rows={rows}", dense_below=2**62)
    with torch.no_grad(), attach(model, **dense) as cache:
        prefill(model, ids, cache, stop=len(prompt), chunk=1024)
        logits = model(input_ids=ids[None, len(prompt) :], past_key_values=cache).logits[0]
    p, q = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).cpu()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("-k", type=int, default=100)
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    everything = given.tokens + given.steps
    off: dict[tuple[str, str], list[Tensor]] = {}
    cells: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("texts", total=len(given.text) * 3 * len(NAMES))
        for text in given.text:
            ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
            ids = torch.tensor(ids[:everything])
            if len(ids) < everything:
                raise ValueError(f"{text}: got {len(ids)} tokens, allowed are {everything} or more")
            for layer in capture(model, ids):
                for key, found in errors(layer, given.steps).items():
                    off.setdefault(key, []).append(found.cpu())
            prompt, rest = ids[: given.tokens], ids[given.tokens :]
            full = full_logits(model, prompt, rest)
            for rows, index in itertools.product(NAMES, ("all", "exact", "pariskv")):
                if index == "all":
                    kl = dense_divergences(model, prompt, rest, full, rows)
                else:
                    name = f"{index}:rows={rows}"
                    kl = divergences(model, prompt, rest, full, index=name, k=given.k)
                cell = dict(text=text.stem, read=index, rows=rows, kl_mean=float(kl.mean()))
                cells.append(cell)
                progress.advance(task)
                progress.console.print(cell)
    usual = dict(q_heads=1, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    result = {
        **described(given),
        **dict(tokens=given.tokens, steps=given.steps, k=given.k),
        "texts": [text.stem for text in given.text],
        "row_bytes_128": {name: codec(name, Geometry.of(**usual)).row_bytes for name in NAMES},
        "errors": {name: {part: summary(off[name, part]) for part in PARTS} for name in CODECS},
        "cells": cells,
    }
    write(result, given.json)


if __name__ == "__main__":
    main()

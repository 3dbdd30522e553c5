"""Measure the loss of quality if a row codec compresses the stored keys and values.

There are two measurements. In each, the first 64 tokens of a text (the sink) are not compressed.

1. Error of the attention output: the model reads N + T tokens of a text. The queries of the last T
   tokens attend to all earlier tokens, once with the original keys and values, and once with keys
   and values that a row codec has encoded and decoded.
2. KL divergence from full attention: the model reads N tokens, and then T tokens with an index that
   stores compressed keys and values. Attention reads either all tokens, or k tokens that the index
   `exact` or `pariskv` retrieves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import described, ids_of, loaded, reported, write
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.ops.attention import attend
from kvindex.storage.codecs import NAMES, codec
from kvindex.storage.store import TensorStore
from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.evaluate.fidelity import divergences, full_logits
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.model.cache_argument import CACHE

PARTS = ("both", "keys", "values")
"""What the codec encodes: keys and values, only keys, or only values."""

INDEXES = ("exact", "pariskv")

SINK = 64
"""Number of tokens at the beginning of a text that are not encoded."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `rows` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument("--tokens", type=int, default=2000, help="Number of tokens of the prompt")
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="Number of tokens after the prompt that are evaluated",
    )
    parser.add_argument(
        "-k", type=int, default=100, help="Number of tokens that each KV head retrieves"
    )
    parser.add_argument(
        "--without-kl",
        action="store_true",
        help="Measure only the error of the attention output, and no KL divergence",
    )


def coded(rows: Rows, name: str) -> Rows:
    """Encode keys and values, float32 `[1, G, N, D]`, with the row codec `name`, and decode them.

    The codec "plain" rounds numbers to bfloat16. The first `SINK` tokens are not changed.
    """
    dtype = torch.bfloat16 if name == "plain" else torch.float32
    G, _, D = rows.keys.shape[1:]
    sizes = dict(q_heads=G, kv_heads=G, head_dim=D, value_dim=rows.values.shape[-1])
    kept = TensorStore(Geometry.of(**sizes, dtype=dtype, device=rows.keys.device), "device", name)
    joined = kept.join(*(part[:, :, SINK:].to(dtype) for part in (rows.keys, rows.values)))
    kept.reserve(joined)
    kept.append(joined)
    _, back = next(kept.blocks(len(kept)))
    parts = ((rows.keys, back.keys), (rows.values, back.values))
    return Rows(*(torch.cat([whole[:, :, :SINK], part.float()], 2) for whole, part in parts))


def errors(layer: Captured, names: tuple[str, ...] = NAMES) -> dict[tuple[str, str], Tensor]:
    """Return the relative error of the attention output, `‖õ − o‖ / ‖o‖`, for each codec.

    `o` is the attention output with the original keys and values. `õ` is the output after the codec
    has encoded and decoded the keys, the values, or both.

    Returns:
        (codec, encoded part, one of `PARTS`) -> error for each head and query, `[H, T]`.
    """
    plain = Rows(layer.keys[None].float(), layer.values[None].float())
    N, T = plain.keys.shape[2], layer.queries.shape[1]
    queries = layer.queries.float().flatten(0, 1)[None]  # all queries as heads: [1, H * T, D]
    at = torch.arange(N, device=queries.device)
    later = torch.where(at > at[-T:, None], float("-inf"), 0.0)  # [T, N]
    bias = later.repeat(len(layer.queries), 1)[None]
    terms: dict[str, Any] = dict(scale=layer.scale, softcap=layer.softcap, bias=bias)
    want, found = attend(queries, plain.keys, plain.values, **terms)[0], {}
    for name in names:
        back = coded(plain, name)
        rows = (back, Rows(back.keys, plain.values), Rows(plain.keys, back.values))
        for part, some in zip(PARTS, rows, strict=True):
            off = attend(queries, some.keys, some.values, **terms)[0] - want
            found[name, part] = (off.norm(dim=-1) / want.norm(dim=-1)).view(-1, T).cpu()
    return found


def summary(layers: list[Tensor]) -> dict[str, float]:
    """Summarize the relative errors of the attention output, one tensor for each layer.

    Returns the mean and the 90th percentile over all layers, and the mean of the worst layer.
    """
    every = torch.cat([layer.flatten() for layer in layers]).sort().values
    return {
        "mean": float(every.mean()),
        "p90": float(every[int(0.9 * (len(every) - 1))]),
        "worst_layer": max(float(layer.mean()) for layer in layers),
    }


def read_whole(model: Any, prompt: Tensor, rest: Tensor, full: Tensor, index: str) -> Tensor:
    """Measure how much a row codec, which compresses keys and values, changes the model's output.

    Attention reads all tokens that `index` stores, compressed by its row codec. `full` contains the
    logits with the original keys and values. The result is the KL divergence from these logits at
    each token, float64 `[T]`.
    """
    ids = torch.cat([prompt, rest]).to(model.device)
    with attach(model, index=index, dense_below=2**62) as cache:
        prefill(model, ids, cache, stop=len(prompt), chunk=1024)
        logits = model(input_ids=ids[None, len(prompt) :], **{CACHE: cache}).logits[0]
    p, q = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).cpu()


def run(given: argparse.Namespace) -> None:
    """Run the command `rows`: measure the row codecs, then print and write the results."""
    model, tokenizer = loaded(given)
    usual = Geometry.of(q_heads=1, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    about: dict[str, Any] = dict(tokens=given.tokens, steps=given.steps, k=given.k)
    about["texts"] = [text.stem for text in given.text]
    about["row_bytes_128"] = {name: codec(name, usual).row_bytes for name in NAMES}
    result: dict[str, Any] = {**described(given), **about, "errors": {}, "cells": []}
    off: dict[tuple[str, str], list[Tensor]] = {
        (name, part): [] for name in NAMES for part in PARTS
    }
    with Progress() as progress:
        for text in given.text:
            words = text.read_text(encoding="utf-8")
            ids = ids_of(tokenizer, words, given.tokens + given.steps)
            shown = reported(progress, text.stem)
            for layer in capture(model, ids, queries=given.steps, on_progress=shown):
                for key, found in errors(layer).items():
                    off[key].append(found)
            if given.without_kl:
                continue
            prompt, rest = ids[: given.tokens], ids[given.tokens :]
            full = full_logits(model, prompt, rest)
            for name in progress.track(NAMES, description=f"{text.stem}, KL"):
                kls = {"all": read_whole(model, prompt, rest, full, f"exact:row_codec={name}")}
                for index in INDEXES:
                    spec = f"{index}:row_codec={name}"
                    kls[index] = divergences(model, prompt, rest, full, index=spec, k=given.k)
                for read, kl in kls.items():
                    cell = dict(text=text.stem, read=read, rows=name, kl_mean=float(kl.mean()))
                    result["cells"].append(cell)
    result["errors"] = {name: {part: summary(off[name, part]) for part in PARTS} for name in NAMES}
    write(result, given.json)
    print(report.TABLES["row_codecs"](result))

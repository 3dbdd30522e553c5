"""Measure the output error of keys with few bits per number, with scales per token or per channel.

The model reads N tokens of each text, and then generates some tokens. The newest queries attend to
encoded keys of the text and to the original keys, with the original values. A group of 32 numbers
has a lowest value and a step. The numbers are either coordinates of one token, or one channel of 32
tokens, so both ways need the same number of bytes. Groups along a channel begin at multiples of 32
tokens (KIVI, arXiv 2402.02750).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import SEED, described, ids_of, loaded, read_and_write, write
from kvindex.core import check
from kvindex.ops.attention import attend
from kvindex.storage.codecs import BITS, rotated
from kvindex.storage.quantize import GROUP, code_bytes, dequantize, groups, quantize
from kvindex_adapters.evaluate.capture import Captured


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of each text, a multiple of 32"
    )
    parser.add_argument(
        "--written", type=int, default=64, help="sampled tokens whose queries are evaluated"
    )


def coded(keys: Tensor, bits: int) -> Tensor:
    """Encode keys `[G, N, D]` in groups of a token's coordinates, and return the decoded keys."""
    return dequantize(*quantize(keys, bits), keys.shape[-1], bits)


KEYS = {
    "token": coded,
    "token, rotated": lambda keys, bits: rotated(coded(rotated(keys), bits)),
    "channel": lambda keys, bits: coded(keys.mT, bits).mT,
    "channel, rotated": lambda keys, bits: rotated(coded(rotated(keys).mT, bits).mT),
}
"""Kind of group -> function that encodes and decodes keys float32 `[G, N, D]`. The row codec `int4`
uses the second kind."""


def errors(layer: Captured, keys: Tensor) -> Tensor:
    """Return the error `‖õ − o‖ / ‖o‖` of each head and query, `[H, T]`.

    `o` is the attention output with the original keys, and `õ` the output with `keys`.

    keys: Decoded keys that replace the first `N` keys of the layer, float32 `[G, N, D]`.
    """
    # each query counts as a head of its group
    N, queries = keys.shape[1], layer.queries.float().flatten(0, 1)
    got, want = (
        attend(
            queries[None],
            some[None],
            layer.values[None, :, :N].float(),
            scale=layer.scale,
            softcap=layer.softcap,
        )[0]
        for some in (keys, layer.keys[:, :N].float())
    )
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).view(layer.queries.shape[:2])


def cell_of(layers: list[Captured], name: str, codec: str, tokens: int) -> dict[str, Any]:
    """Return a summary of the errors over all layers, heads and queries."""
    bits = BITS[codec]
    keys = [KEYS[name](layer.keys[:, :tokens].float(), bits) for layer in layers]
    found = torch.stack([errors(*pair) for pair in zip(layers, keys, strict=True)])
    D = layers[0].keys.shape[-1]
    return {
        "groups": name,
        "bits": bits,
        "key_bytes": code_bytes(D, bits) + 4 * groups(D)[0],
        "error": float(found.mean()),
        "error_90": float(found.flatten().quantile(0.9)),
        "error_worst_layer": float(found.mean((1, 2)).max()),
    }


def run(given: argparse.Namespace) -> None:
    """Capture layers and measure errors on them. Print and write the result."""
    if check.at_least("tokens", given.tokens, 1) % GROUP:
        raise ValueError(f"tokens: got {given.tokens}, allowed is a multiple of {GROUP}")
    model, tokenizer = loaded(given)
    about = {"tokens": given.tokens, "queries_per_head": given.written, "seed": SEED}
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    with Progress() as progress:
        for text in given.text:
            ids = ids_of(tokenizer, text.read_text(encoding="utf-8"), given.tokens)
            layers = read_and_write(model, ids, given.written, progress, text.stem)
            for codec in BITS:
                for name in KEYS:
                    cell = cell_of(layers, name, codec, given.tokens)
                    result["cells"].append({"text": text.stem, **cell})
            write(result, given.json)
    print(report.TABLES["row_scales"](result))

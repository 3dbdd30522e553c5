"""Measure the error of the attention output if keys have 2 or 4 bits per number.

The numbers are quantized in groups of 32. Each group has its own lowest value and its own step
between two levels. There are two kinds of groups, which need the same number of bytes:

- by token: a group contains 32 coordinates of one token.
- by channel: a group contains the same coordinate (channel) of 32 tokens, as in KIVI (arXiv
  2402.02750).

The model reads N tokens of each text, and then generates some tokens. The queries of the generated
tokens attend to the text, once with quantized and once with original keys. The values are original.
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
    """Add the options of the command `scales` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096,
        help="Number of tokens to read from each text, a multiple of 32",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=64,
        help="Number of tokens that the model generates after each text; the benchmark evaluates "
        "the queries of these tokens",
    )


def coded(keys: Tensor, bits: int) -> Tensor:
    """Quantize keys `[G, N, D]` in groups along the last axis, and return the dequantized keys."""
    return dequantize(*quantize(keys, bits), keys.shape[-1], bits)


KEYS = {
    "token": coded,
    "token, rotated": lambda keys, bits: rotated(coded(rotated(keys), bits)),
    "channel": lambda keys, bits: coded(keys.mT, bits).mT,
    "channel, rotated": lambda keys, bits: rotated(coded(rotated(keys).mT, bits).mT),
}
"""Kind of group of numbers with a common scale -> function that quantizes and dequantizes keys.

Keys are float32 `[G, N, D]`. With "rotated", an orthogonal matrix is applied to the keys before
they are quantized. The row codec `int4` uses the kind "token, rotated".
"""


def errors(layer: Captured, keys: Tensor) -> Tensor:
    """Return the relative error of the attention output, `‖õ − o‖ / ‖o‖`, as `[H, T]`.

    `o` is the output of a head for a query over the first `N` tokens of the layer. `õ` is the same
    output with `keys` in place of the original keys.

    Args:
        layer: The captured layer.
        keys: Keys of the first `N` tokens after quantization, float32 `[G, N, D]`.
    """
    # pass all queries as heads: [H * T, D]
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
    """Quantize the keys of one text, and measure the error of the attention output.

    Errors are summarized over all layers, heads and queries.

    Args:
        layers: Captured layers of a text: their keys, values and queries.
        name: Kind of group of numbers with a common scale, a key of `KEYS`.
        codec: Name of the row codec that determines the bits per number.
        tokens: Number of tokens of the text.
    """
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
    """Run the command `scales`: record keys, values and queries of a model, and measure errors.

    The results are printed, and written to the JSON file.
    """
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

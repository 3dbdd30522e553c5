"""Measure the error of attention if searches choose the number of tokens (`k="auto"`).

The model reads a text with full attention, and its keys, values and queries are recorded. Then an
attention layer with `k="auto"` decodes the last tokens of the text again, for each allowed error,
and its outputs are compared with those of full attention. The errors of other layers do not matter,
because each layer gets the recorded queries.

An error is relative: the norm of the difference between the outputs of all heads of a layer,
divided by the norm of full attention's outputs. With --fixed, layers also decode with fixed numbers
of tokens, for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import kvindex
from benchmarks import report
from benchmarks.common.reading import described, ids_of, loaded, reported, write
from kvindex.layer import AttentionLayer
from kvindex.layer.retrieval import row_bytes
from kvindex.ops import attention
from kvindex_adapters.evaluate.capture import Captured, capture

MEASURED = 256
"""Number of tokens before the decoded ones whose outputs the layer measures."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `budget` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[8192], help="Lengths of the prompts in tokens"
    )
    parser.add_argument("--steps", type=int, default=64, help="Number of tokens to decode")
    parser.add_argument(
        "--layers", type=int, default=3, metavar="L", help="Measure only every L-th layer"
    )
    parser.add_argument(
        "--error", nargs="+", type=float, default=(0.2, 0.1, 0.05), help="Allowed errors"
    )
    parser.add_argument(
        "--fixed", nargs="*", type=int, default=(100, 256), help="Fixed numbers of tokens"
    )


def decoded(layer: Captured, steps: int, **options: Any) -> dict[str, list[float]]:
    """Decode the last `steps` tokens of a captured layer.

    Args:
        layer: The layer, with the queries of the last `MEASURED + steps` tokens.
        steps: Number of tokens to decode.
        options: Options of the attention layer.

    Returns:
        The relative error of each step, and the mean number of tokens that it has found per KV
        head.
    """
    keys, values, queries = layer.keys[None], layer.values[None], layer.queries[None]
    sizes = dict(q_heads=queries.shape[1], kv_heads=keys.shape[1], head_dim=keys.shape[-1])
    own = dict(value_dim=values.shape[-1], dtype=keys.dtype, device=keys.device)
    logits = dict(scale=layer.scale, softcap=layer.softcap)
    made = AttentionLayer(
        kvindex.create("pariskv", **sizes, **own, **logits), dense_below=0, **options
    )
    start = keys.shape[2] - steps
    first = start - MEASURED
    made.append(keys[:, :, :first], values[:, :, :first])
    part = slice(first, start)
    made.step(queries[:, :, :MEASURED], keys[:, :, part], values[:, :, part])
    errors, rows = [], []
    for step in range(steps):
        query, at = queries[:, :, MEASURED + step, None], slice(start + step, start + step + 1)
        before = made.traffic
        output = made.step(query, keys[:, :, at], values[:, :, at])[:, :, 0]
        seen = keys[:, :, : at.stop], values[:, :, : at.stop]
        full = attention.attend(query[:, :, 0], *seen, **logits)
        errors.append(_norm(output - full) / _norm(full))
        read = float(made.traffic.bytes_fetched) - float(before.bytes_fetched)
        rows.append(read / row_bytes(made.index) / keys.shape[1])
    return {"errors": errors, "rows": rows}


def _norm(output: Tensor) -> float:
    return float(output.float().norm())


@dataclasses.dataclass(frozen=True)
class Cell:
    """Errors of one text with one setting, over all measured layers and steps.

    Attributes:
        text: Name of the text.
        tokens: Length of the prompt.
        error: Allowed error, or None for a fixed number of tokens.
        k: Fixed number of tokens, or the largest one.
        rows: Mean number of tokens that a step has found per KV head.
        rows_by_layer: The same for each measured layer.
        median: Median of the errors.
        p95: 95th percentile of the errors.
        within: Fraction of the errors that are at most `error`.
        within_by_layer: The same for each measured layer.
    """

    text: str
    tokens: int
    error: float | None
    k: int
    rows: float
    rows_by_layer: list[float]
    median: float
    p95: float
    within: float | None
    within_by_layer: list[float] | None


def cell(text: str, tokens: int, found: list[dict[str, list[float]]], **setting: Any) -> Cell:
    """Sum up what `decoded` returned for each layer."""
    errors = torch.tensor([one["errors"] for one in found])  # [layers, steps]
    rows, allowed = torch.tensor([one["rows"] for one in found]), setting["error"]
    within = None if allowed is None else (errors <= allowed).double()
    return Cell(
        text=text,
        tokens=tokens,
        rows=float(rows.mean()),
        rows_by_layer=rows.mean(1).tolist(),
        median=float(errors.median()),
        p95=float(errors.flatten().quantile(0.95)),
        within=None if within is None else float(within.mean()),
        within_by_layer=None if within is None else within.mean(1).tolist(),
        **setting,
    )


def run(given: argparse.Namespace) -> None:
    """Run the command `budget`: measure errors, then print and write the results."""
    model, tokenizer = loaded(given)
    about = dict(steps=given.steps, every=given.layers)
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    settings = [dict(error=error, k="auto") for error in given.error]
    settings += [dict(error=None, k=k) for k in given.fixed]
    with Progress() as progress:
        for tokens in given.tokens:
            for text in given.text:
                words = text.read_text(encoding="utf-8")
                ids = ids_of(tokenizer, words, tokens + given.steps)
                reading = reported(progress, f"{text.stem}, {tokens}")
                queries = MEASURED + given.steps
                layers = capture(model, ids, queries=queries, on_progress=reading)[:: given.layers]
                for setting in progress.track(settings, description="decoding"):
                    found = [decoded(one, given.steps, **setting) for one in layers]
                    most = {**setting, "k": 1024 if setting["k"] == "auto" else setting["k"]}
                    one = cell(text.stem, tokens, found, **most)
                    result["cells"].append(dataclasses.asdict(one))
                    write(result, given.json)
    print(report.TABLES["budget"](result))

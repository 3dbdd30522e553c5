"""Measure the KL divergence of an index's next-token distribution from that of full attention.

The model reads N tokens of a text, and then the next T tokens with each index. The results equal
those of reading the T tokens one by one. To save time, tokens between two changes of the index are
read together.

The KL divergence is divided by that of the index `exact`. The confidence interval of this ratio is
a paired bootstrap over blocks of tokens: the same blocks are resampled for both indexes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import described, ids_of, loaded, write
from kvindex_adapters.evaluate.fidelity import divergences, full_logits

PRESETS = ("paper:beta=.05:rho=.25", "fast", "accurate", "precise", "scan")
INDEXES = tuple(f"pariskv:preset={preset}" for preset in PRESETS)
BLOCK, RESAMPLES = 50, 4000
"""`BLOCK`: number of successive tokens that the bootstrap resamples together, because the KL
divergences of neighboring tokens are not independent. `RESAMPLES`: number of resamples."""

Kls = dict[tuple[str, int], Tensor]
"""(text, length of the prompt) -> KL divergence at each token, float64 `[T]`."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `kl` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[4000], help="Lengths of the prompts in tokens"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2000,
        help="Compare the predictions for this number of tokens after the prompt",
    )
    parser.add_argument(
        "--index", nargs="+", default=INDEXES, help="Names and options of the indexes to measure"
    )
    parser.add_argument(
        "-k", type=int, default=100, help="Number of tokens that each KV head retrieves"
    )


def ratio_interval(
    cells: list[tuple[Tensor, Tensor]], *, block: int = BLOCK
) -> tuple[float, float, float]:
    """Divide the KL divergence of an index by that of `exact`, with a confidence interval.

    Args:
        cells: KL divergence of the index and of `exact` at each token, float64 `[T]` each, for each
            text and length.
        block: Number of successive tokens that the bootstrap resamples together.

    Returns:
        The ratio of the mean KL divergences as a geometric mean over `cells`, and the lower and
        upper end of its 95% confidence interval (paired bootstrap).
    """
    generator = torch.Generator().manual_seed(0)
    logs, draws = [], []
    for ours, theirs in cells:
        blocks = len(ours) // block
        sums = [part[: blocks * block].view(blocks, block).sum(1) for part in (ours, theirs)]
        chosen = torch.randint(blocks, (RESAMPLES, blocks), generator=generator)
        logs.append(math.log(float(sums[0].sum() / sums[1].sum())))
        draws.append((sums[0][chosen].sum(1) / sums[1][chosen].sum(1)).log())
    spread = torch.stack(draws).mean(0).sort().values
    low, high = spread[int(0.025 * RESAMPLES)], spread[int(0.975 * RESAMPLES)]
    return math.exp(sum(logs) / len(logs)), math.exp(float(low)), math.exp(float(high))


def group_of(spec: str) -> str:
    """Return the name and options of the exact index with which the index `spec` is compared.

    If `spec` has the option `group`, the index `exact` gets the same value of this option.
    """
    policy = [part for part in spec.split("+")[0].split(":") if part.startswith("group=")]
    return ":".join(["exact", *policy])


def summary(mine: Kls, exact: Kls) -> dict[str, Any]:
    """Summarize the KL divergence of one index, and its ratio to that of `exact`.

    Args:
        mine: KL divergence of the index.
        exact: KL divergence of `exact` on the same texts.
    """
    ratio, low, high = ratio_interval([(mine[cell], exact[cell]) for cell in mine])
    means = {cell: float(kl.mean()) for cell, kl in mine.items()}
    cells = [
        {"text": text, "tokens": tokens, "kl_mean": means[text, tokens]}
        | {"kl_exact": float(exact[text, tokens].mean())}
        for text, tokens in mine
    ]
    mean = sum(means.values()) / len(means)
    return {"kl_mean": mean, "ratio": ratio, "ratio_95": [low, high], "cells": cells}


def run(given: argparse.Namespace) -> None:
    """Run the command `kl`: measure the indexes, then print and write the results."""
    model, tokenizer = loaded(given)
    indexes = list(dict.fromkeys([*(group_of(spec) for spec in given.index), *given.index]))
    found: dict[str, Kls] = {index: {} for index in indexes}
    result: dict[str, Any] = {}
    with Progress() as progress:
        for tokens in given.tokens:
            for text in given.text:
                ids = ids_of(tokenizer, text.read_text(encoding="utf-8"), tokens + given.steps)
                prompt, rest = ids[:tokens], ids[tokens:]
                full = full_logits(model, prompt, rest)
                for index in progress.track(indexes, description=f"{text.stem}, {tokens}"):
                    kl = divergences(model, prompt, rest, full, index=index, k=given.k)
                    found[index][text.stem, tokens] = kl
            written = {index: summary(found[index], found[group_of(index)]) for index in indexes}
            result = {**described(given), "k": given.k, "steps": given.steps, "indexes": written}
            write(result, given.json)  # write the results so far, in case a longer text fails
    print(report.TABLES["divergence"](result))

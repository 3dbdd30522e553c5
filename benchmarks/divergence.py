"""What an index costs the output: KL from full attention, beside `exact` with as many rows.

    python -m benchmarks.divergence --text FILE… [--tokens N …] [--steps T] [--index SPEC …]
        [--model … --gguf-file … --lora …] [--device cuda] --json OUT

The model reads N tokens of a text and is then fed the next T, one at a time as decoding would
(all between two updates at once), through each index. Intervals: a paired bootstrap over blocks
of tokens, the same blocks for both indexes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.reading import add_model, described, loaded, write
from kvindex_adapters.evaluate.fidelity import divergences, full_logits

INDEXES = tuple(
    f"pariskv:preset={preset}" for preset in ("paper:beta=.05:rho=.25", "fast", "accurate", "scan")
)
BLOCK, RESAMPLES = 50, 4000
"""Tokens that are drawn together, for neighbors are alike; and how often."""


def ratio_interval(cells: list[tuple[Tensor, Tensor]], seed: int = 0) -> tuple[float, float, float]:
    """Geometric mean over cells of mean KL over `exact`'s, with its paired 95% interval.

    cells: (KL of the index, KL of exact) per token, float64 `[T]` each.
    """
    generator = torch.Generator().manual_seed(seed)
    logs, draws = [], []
    for ours, theirs in cells:
        blocks = len(ours) // BLOCK
        sums = [part[: blocks * BLOCK].view(blocks, BLOCK).sum(1) for part in (ours, theirs)]
        chosen = torch.randint(blocks, (RESAMPLES, blocks), generator=generator)
        logs.append(math.log(float(sums[0].sum() / sums[1].sum())))
        draws.append((sums[0][chosen].sum(1) / sums[1][chosen].sum(1)).log())
    spread = torch.stack(draws).mean(0).sort().values
    low, high = spread[int(0.025 * RESAMPLES)], spread[int(0.975 * RESAMPLES)]
    return math.exp(sum(logs) / len(logs)), math.exp(float(low)), math.exp(float(high))


def group_of(spec: str) -> str:
    """`exact` with the same policy of the group."""
    policy = [part for part in spec.split("+")[0].split(":") if part.startswith("group=")]
    return ":".join(["exact", *policy])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4000])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--index", nargs="+", default=INDEXES)
    parser.add_argument("-k", type=int, default=100)
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    indexes = list(dict.fromkeys([*(group_of(spec) for spec in given.index), *given.index]))
    found: dict[str, dict[tuple[str, int], Tensor]] = {index: {} for index in indexes}
    with Progress() as progress:
        cells = list(itertools.product(given.text, given.tokens))
        task = progress.add_task("texts and lengths", total=len(cells) * len(indexes))
        for text, tokens in cells:
            ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
            if len(ids) < tokens + given.steps:
                progress.console.print(f"{text.stem}: {len(ids)} tokens, too short for {tokens}")
                progress.advance(task, len(indexes))
                continue
            ids = torch.tensor(ids)
            prompt, rest = ids[:tokens], ids[tokens : tokens + given.steps]
            full = full_logits(model, prompt, rest)
            for index in indexes:
                start = time.perf_counter()
                kl = divergences(model, prompt, rest, full, index=index, k=given.k)
                found[index][text.stem, tokens] = kl
                progress.advance(task)
                progress.console.print(
                    f"{text.stem} {tokens} {index}: {float(kl.mean()):.4f} nats, "
                    f"{time.perf_counter() - start:.1f} s"
                )
    written: dict[str, Any] = {}
    table = Table("index", "mean KL", "over exact", "95% interval")
    for index in indexes:
        exact, mine = found[group_of(index)], found[index]
        ratio, low, high = ratio_interval([(mine[cell], exact[cell]) for cell in mine])
        mean = sum(float(kl.mean()) for kl in mine.values()) / len(mine)
        table.add_row(index, f"{mean:.4f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
        written[index] = {
            "kl_mean": mean,
            "ratio": ratio,
            "ratio_95": [low, high],
            "cells": [
                {
                    "text": text,
                    "tokens": tokens,
                    "kl_mean": float(kl.mean()),
                    "kl_exact": float(exact[text, tokens].mean()),
                }
                for (text, tokens), kl in mine.items()
            ],
        }
    Console().print(table)
    about = {"k": given.k, "steps": given.steps}
    write({**described(given), **about, "indexes": written}, given.json)


if __name__ == "__main__":
    main()

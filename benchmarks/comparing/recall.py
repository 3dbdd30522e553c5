"""Measure recall, coverage of attention weight, and bytes per key of pariskv's presets.

The model reads N tokens of each text, and then generates some tokens. The index `pariskv` searches
the keys of the text with the queries of the generated tokens, separately for each query head.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks import report
from benchmarks.common.reading import SEED, described, ids_of, loaded, read_and_write, write
from kvindex.core.config import parse_spec
from kvindex_adapters.evaluate.recall import Recall, bytes_per_key, measure

PRESETS = ("paper", "fast", "accurate", "precise", "scan")
BETAS = (0.02, 0.05, 0.1, 0.2, 1.0)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `recall` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[7000],
        help="Numbers of tokens to read from each text",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=64,
        help="Number of tokens that the model generates after each text. The queries of these "
        "tokens are used for the searches.",
    )
    parser.add_argument(
        "--presets",
        nargs="+",
        default=PRESETS,
        help="Presets of the index pariskv, each as PRESET or PRESET:OPTION=VALUE",
    )
    parser.add_argument(
        "--beta",
        nargs="+",
        type=float,
        default=BETAS,
        help="Values of the option beta, the fraction of keys that become candidates",
    )
    parser.add_argument(
        "--rho", type=float, default=0.25, help="Value of the option rho for the preset paper"
    )
    parser.add_argument(
        "-k", type=int, default=100, help="Number of tokens that each query head retrieves"
    )


def expand(presets: list[str], betas: list[float], rho: float) -> list[str]:
    """Combine each preset with each value of the option `beta`. Return a list of specs.

    Two kinds of presets are not combined, and occur only once: the preset `scan`, which has no
    option `beta`, and presets to which the command line adds an option.
    """
    specs = []
    for preset in presets:
        more = f":rho={rho}" if preset == "paper" else ""
        alone = preset == "scan" or "=" in preset
        fractions = [""] if alone else [f":beta={beta}{more}" for beta in betas]
        specs += [f"pariskv:preset={preset}{fraction}" for fraction in fractions]
    return specs


def summary(found: Recall) -> dict[str, float]:
    """Summarize recall and coverage over layers and heads.

    Recall is given as the mean, for the worst layer, and for the worst 10% of the heads. Coverage
    is divided by the coverage of an exact search.
    """
    heads = found.recall.flatten().sort().values
    return {
        "recall": float(found.recall.mean()),
        "recall_worst_layer": float(found.recall.mean(1).min()),
        "recall_worst_decile": float(heads[: max(len(heads) // 10, 1)].mean()),
        "mass_ratio": float(found.coverage.mean() / found.coverage_true.mean()),
    }


def cell_of(layers: Any, spec: str, given: argparse.Namespace, **where: Any) -> dict[str, Any]:
    """Measure one index on recorded keys and queries of a text. Return one entry of the results."""
    options = parse_spec(spec)[1]
    found = summary(measure(layers, spec, k=given.k, prompt=where["tokens"]))
    return {
        **where,
        "index": spec,
        "preset": options.get("preset", spec),
        "beta": options.get("beta", 1.0),
        "bytes_128": bytes_per_key(spec, 128),
        **found,
    }


def run(given: argparse.Namespace) -> None:
    """Run the command `recall`: record a model's keys and queries, and measure presets on them.

    The results are printed, and written to the JSON file.
    """
    model, tokenizer = loaded(given)
    specs = expand(given.presets, given.beta, given.rho)
    about = {"k": given.k, "queries_per_head": given.written, "seed": SEED}
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    with Progress() as progress:
        for text, tokens in itertools.product(given.text, given.tokens):
            ids, title = (
                ids_of(tokenizer, text.read_text(encoding="utf-8"), tokens),
                f"{text.stem}, {tokens}",
            )
            layers = read_and_write(model, ids, given.written, progress, title)
            for spec in progress.track(specs, description=f"{title}: indexes"):
                cell = cell_of(layers, spec, given, text=text.stem, tokens=tokens)
                result["cells"].append(cell)
            write(result, given.json)
    print(report.TABLES["recall"](result))

"""Measure KL divergence from full attention if several ranks share the tokens of a sequence.

    torchrun --nproc-per-node=2 -m benchmarks.ranks_quality --text FILE… [--index SPEC …]
        [--tokens N] [--steps T] [-k K] [--model … --gguf-file … --lora …] --json OUT

On each rank, the whole model (SmolLM2-135M-Instruct by default) reads N tokens of a text, and then
the next T tokens one by one, with each index. Four variants are compared:

- `one`: a single process stores all tokens, and a decode step attends to K of them.
- `own`: W ranks share the tokens, and a decode step attends to K tokens of each rank.
- `own_part`: W ranks share the tokens, and a decode step attends to K / W tokens of each rank.
- `best`: W ranks share the tokens, and a decode step attends to the best K tokens of all ranks.

`ratio` is the KL divergence of a variant divided by that of `one` with the same index, over all
texts. Its confidence interval is a paired bootstrap, as in `benchmarks.quality kl`. The benchmark
runs on CPUs with gloo.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import add_model, described, ids_of, loaded, write
from benchmarks.comparing.kl import ratio_interval
from kvindex_adapters.common import parallel
from kvindex_adapters.evaluate.fidelity import full_logits, kl
from kvindex_adapters.hf import attach
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.model.cache_argument import CACHE

BLOCK = 10
"""Number of successive tokens that the bootstrap resamples together.

It is small, because few tokens are measured.
"""

WAIT_S = 600
"""Time in seconds that a rank waits for another rank, which may run on the same cores."""


def followed(model: Any, cache: Any, rest: Tensor, full: Tensor, k: int, rows: str) -> Tensor:
    """Let a model with an index read tokens one by one, and compare it with full attention.

    Args:
        model: The attached model.
        cache: The cache of the model, which contains the prompt.
        rest: Token ids that follow the prompt, int64 `[T]`.
        full: Logits of full attention after each of these tokens, `[T, V]`.
        k: Number of tokens that a decode step retrieves per KV head.
        rows: Value of the option `rows` of the wrapper `Sharded`: "own" retrieves `k` tokens of
            each rank, "best" the best `k` tokens of all ranks.

    Returns:
        KL divergence from full attention at each token, float64 `[T]`.
    """
    for layer in cache.attention_layers():
        layer.k, index = k, parallel.sharded(layer.index)
        if index is not None:
            index.rows = rows  # each step reads this attribute
    steps = [model(input_ids=one.view(1, 1), **{CACHE: cache}).logits[0, -1] for one in rest]
    return torch.tensor([kl(*pair) for pair in zip(full, steps, strict=True)]).double()


def summary(ways: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Summarize the KL divergence from full attention for each variant.

    The variants are one process that stores all tokens, and several ways to divide the tokens among
    ranks.

    A summary has the mean over all texts, the mean of each text, and `ratio`: the KL divergence
    divided by that of one process, with its 95% confidence interval `ratio_95`.

    Args:
        ways: Name of a variant (`one`, `own`, `own_part` or `best`) -> KL divergence at each token
            of each text, float64 `[T]`.
    """
    summaries: dict[str, Any] = {}
    for way, cells in ways.items():
        means, pairs = [float(kls.mean()) for kls in cells], zip(cells, ways["one"], strict=True)
        ratio, *ends = ratio_interval(list(pairs), block=BLOCK)
        summaries[way] = {"kl_mean": sum(means) / len(means), "kl_texts": means}
        summaries[way] |= {"ratio": ratio, "ratio_95": ends}
    return summaries


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Run the command line: measure the indexes, and print and write results after each text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--index",
        nargs="+",
        default=["exact", "pariskv"],
        help="Names and options of the indexes to measure",
    )
    parser.add_argument("--tokens", type=int, default=4000, help="Number of tokens of the prompt")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="Compare the predictions for this number of tokens after the prompt",
    )
    parser.add_argument(
        "-k", type=int, default=100, help="Number of tokens that each KV head retrieves"
    )
    given = parser.parse_args(arguments)
    if parallel.launched():
        given.device = parallel.join(given.device, WAIT_S)
    (rank, ranks), k = parallel.rank(), given.k
    shared = {"own": (k, "own"), "own_part": (k // ranks, "own"), "best": (k, "best")}
    plans = {"": {"one": (k, "own")}, f"+sharded:timeout_s={WAIT_S}": shared}
    model, tokenizer = loaded(given)
    found: dict[str, dict[str, list[Tensor]]] = {index: {} for index in given.index}
    sizes: dict[str, Any] = dict(k=k, tokens=given.tokens, steps=given.steps, ranks=ranks, texts=[])
    for text in given.text:
        ids = ids_of(tokenizer, text.read_text(encoding="utf-8"), given.tokens + given.steps)
        prompt, rest = ids[: given.tokens], ids[given.tokens :]
        full = full_logits(model, prompt, rest)
        for index in given.index:
            for wrapper, ways in plans.items():
                with attach(model, index=index + wrapper, k=k, dense_below=0) as cache:
                    prefill(model, ids, cache, stop=len(prompt), chunk=len(prompt))
                    for way, plan in ways.items():
                        kls = followed(model, cache.fork(), rest, full, *plan)
                        found[index].setdefault(way, []).append(kls)
        sizes["texts"].append(text.stem)
        indexes = {index: summary(ways) for index, ways in found.items()}
        if rank == 0:
            result = {**described(given), **sizes, "indexes": indexes}
            write(result, given.json)
            print(report.TABLES["ranks_quality"](result), flush=True)
    parallel.leave()


if __name__ == "__main__":
    main()

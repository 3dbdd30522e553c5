"""Measure the KL divergence from full attention if several ranks share the tokens of a sequence.

    torchrun --nproc-per-node=2 -m benchmarks.ranks_quality --text FILE… [--index SPEC …]
        [--tokens N] [--steps T] [-k K] [--model … --gguf-file … --lora …] --json OUT

On each rank the whole model (SmolLM2-135M-Instruct by default) reads N tokens of a text and then
the next T tokens, one at a time, through each index. In `one`, a single process has all tokens.
With the tokens on W ranks, a step attends to K rows of each rank (`own`), to K / W rows of each
rank (`own_part`), or to the best K rows of all ranks (`best`). Ratios are to the KL of the same
index in one process, over all texts, with the paired bootstrap of `benchmarks.quality kl`. The
benchmark runs on CPUs with gloo.
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

BLOCK = 10
"""Number of tokens that the bootstrap resamples together. It is small, because there are few steps.
"""

WAIT_S = 600
"""Seconds that a rank waits for another one, which may share its cores."""


def followed(model: Any, cache: Any, rest: Tensor, full: Tensor, k: int, rows: str) -> Tensor:
    """Return KL at each token of `rest` `[T]`, float64 `[T]`. The cache contains the prompt.

    k: Number of rows that a step retrieves.
    rows: The option `rows` of the wrapper `Sharded`.
    full: Logits of full attention, `[T, V]`.
    """
    for layer in cache.attention_layers():
        layer.k, index = k, parallel.sharded(layer.index)
        if index is not None:
            index.rows = rows  # each step reads this attribute
    steps = [model(input_ids=one.view(1, 1), past_key_values=cache).logits[0, -1] for one in rest]
    return torch.tensor([kl(*pair) for pair in zip(full, steps, strict=True)]).double()


def summary(ways: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Summarize each way: the KL means of each text and of all texts, the ratio to one process."""
    told: dict[str, Any] = {}
    for way, cells in ways.items():
        means, pairs = [float(kls.mean()) for kls in cells], zip(cells, ways["one"], strict=True)
        ratio, *ends = ratio_interval(list(pairs), block=BLOCK)
        told[way] = {"kl_mean": sum(means) / len(means), "kl_texts": means}
        told[way] |= {"ratio": ratio, "ratio_95": ends}
    return told


@torch.no_grad()
def main(told: list[str] | None = None) -> None:
    """Measure the indexes. Print and write the results after each text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--index", nargs="+", default=["exact", "pariskv"])
    for option, size in {"--tokens": 4000, "--steps": 100, "-k": 100}.items():
        parser.add_argument(option, type=int, default=size)
    given = parser.parse_args(told)
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

"""Count right answers after a dense and after a sparse prompt, for the same questions.

    python -m benchmarks.sparse_answers [--tasks NAME …] [--tokens N …] [--tries N] [--index SPEC]
        [--k N] [--part I/N] [--from FILE …] [--seconds S] [--dtype …] [--model …] [--gguf-file …]
        [--lora FILE] [--device …] [--json OUT]

The decoder reads each prompt of the tasks twice, once with `prefill="dense"` and once with
`prefill="sparse"`, and answers its first question greedily with the same index. The result has the
score of each answer, and for each length and for all prompts together the mean scores, their
difference, and its 95% interval (a bootstrap over prompts).

`--part 0/4` measures every fourth prompt, so that several processes can share the work. `--from`
takes over the answers of earlier results with the same settings, which may be other parts. No
prompt is begun after `--seconds` seconds. The results are written after each prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.reading import add_model, described, loaded, write
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.statistics import bootstrap

TASKS = ("needle", "needle-multikey", "needle-multivalue", "chain", "lookup", "copy")

READ = ("dense", "sparse")

Key = tuple[str, int, int]
"""A prompt: its task, its number of tokens, and its seed."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 30720])
    parser.add_argument("--tries", type=int, default=10, help="Prompts of each task and length")
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N")
    parser.add_argument("--from", dest="earlier", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add_model(parser)
    return parser.parse_args(given)


def part(text: str) -> tuple[int, int]:
    """Parse `I/N`."""
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError(f"part: got {text}, allowed is 0/N to N-1/N")
    return number, count


def prompts(given: argparse.Namespace) -> list[Key]:
    """Return the prompts of this part, in the order in which they are measured."""
    keys = [
        (task, tokens, seed)
        for seed in range(given.tries)
        for tokens in given.tokens
        for task in given.tasks
    ]
    number, count = given.part
    return keys[number::count]


def answers(decoder: Decoder, tokenizer: Any, key: Key, given: argparse.Namespace) -> list[float]:
    """Return the scores of the answers after a dense and after a sparse prompt."""
    task, tokens, seed = key
    instance, scores = tasks.make(task, tokenizer, tokens=tokens, seed=seed), list[float]()
    question = instance.questions[0]
    for prefill in READ:
        made = decoder.generate(
            torch.cat([instance.context, question.ids]),
            index=given.index,
            k=given.k,
            attach_options={"prefill": prefill},
            max_new_tokens=question.max_new_tokens,
        )
        scores.append(instance.score(0, made.text))
    return scores


def summary(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean scores and their difference for each length, and for all prompts."""
    lengths = sorted({cell["tokens"] for cell in cells})
    for tokens in (*lengths, None):
        some = [cell for cell in cells if tokens in (None, cell["tokens"])]
        off = [cell["sparse"] - cell["dense"] for cell in some]
        low, high = bootstrap(off)
        means = {name: sum(cell[name] for cell in some) / len(some) for name in READ}
        found = {"tokens": tokens, "prompts": len(some), **means}
        yield {**found, "difference": sum(off) / len(off), "low": low, "high": high}


def main(given: list[str] | None = None) -> None:
    """Measure, print a line for each prompt, and write the results."""
    options = arguments(given)
    end = time.monotonic() + options.seconds
    cells: list[dict[str, Any]] = []
    result = {**described(options), "index": options.index, "k": options.k, "dtype": options.dtype}
    for file in options.earlier:
        before = json.loads(file.read_text(encoding="utf-8"))
        for name in ("model", "index", "k", "dtype"):
            if before[name] != result[name]:
                raise SystemExit(
                    f"--from: got {file} with {name}={before[name]!r}, allowed is {result[name]!r}"
                )
        cells += before["cells"]
    done = {(cell["task"], cell["tokens"], cell["seed"]) for cell in cells}
    left = [key for key in prompts(options) if key not in done]
    if left and options.seconds > 0:
        model, tokenizer = loaded(options, dtype=getattr(torch, options.dtype))
        decoder = Decoder.of(model, tokenizer)
        for key in left:
            if time.monotonic() > end:
                break
            dense, sparse = answers(decoder, tokenizer, key, options)
            task, tokens, seed = key
            cell = dict(task=task, tokens=tokens, seed=seed, dense=dense, sparse=sparse)
            cells.append(cell)
            print(cell, flush=True)
            write({**result, "summary": list(summary(cells)), "cells": cells}, options.json)
    if cells:
        found = {**result, "summary": list(summary(cells)), "cells": cells}
        write(found, options.json)
        for line in found["summary"]:
            print(line)


if __name__ == "__main__":
    main()

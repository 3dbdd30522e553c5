"""Measure how long a GPU takes to append tokens to an index, in a prompt and during decoding.

    python -m benchmarks.append [--index SPEC] [--tokens N] [--context N …] [--layers L]
        [--periods P] [--json OUT]

A layer has 32 query heads, 8 KV heads, D = 128 and bfloat16. First, the result of a decode step
over appended tokens is checked. Nothing is timed if it is wrong. The results have two parts:

- `prompts`: the time to append N tokens (`--tokens`) in chunks of 65,536 tokens, until the device
  is done. Memory is reserved before the timing starts.
- `layers`: the times of decode steps of L attention layers over N tokens (`--context`). The layers
  are launched one after another, and the host waits for each step, as if it sampled a token. Every
  256 steps, a layer moves 256 tokens from its local window into its index. This is called an
  update. Each layer has its updates at different steps, and P updates are measured per layer. Steps
  in which an update begins or ends are counted separately from all other steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from benchmarks.common import workload
from benchmarks.common.correctness import check
from benchmarks.common.decoding import UPDATE, Decoding
from benchmarks.common.timing import quartiles, settled
from benchmarks.latency import add_index, refuse
from kvindex.core.geometry import Geometry
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json

PLANS = {"concurrent": "one layer at a time", "room": "the same, with memory reserved before"}
KINDS = {"plain": "a token only", "updated": "an update of a window begins or ends"}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=2**20, help="Number of tokens of the prompt that is appended"
    )
    parser.add_argument(
        "--context",
        nargs="*",
        type=int,
        default=[2**17],
        help="Numbers of tokens that each layer contains before the decode steps",
    )
    parser.add_argument(
        "--layers", type=int, default=16, help="Number of attention layers in a decode step"
    )
    parser.add_argument(
        "--periods",
        type=int,
        default=4,
        help="Number of periods of 256 decode steps to measure. In each period, every layer moves "
        "tokens from its local window into its index once.",
    )
    add_index(parser)
    parser.add_argument("--json", type=output(), help="JSON file to which the results are written")
    found = parser.parse_args(given)
    refuse(parser, found, tokens=4096, context=4096, layers=1, periods=1)
    if found.layers > UPDATE // 4:
        parser.error(f"layers: got {found.layers}, allowed is at most {UPDATE // 4}")
    return found


def prompt(g: Geometry, spec: str, tokens: int, place: str, repeats: int) -> dict[str, Any]:
    """Measure how long it takes to append a prompt of `tokens` tokens to an index.

    `place` is the memory that stores keys and values, "host" or "device". Return the median and the
    quartiles of `repeats` repetitions in microseconds.
    """
    pieces = list(workload.tokens_of(g, 0, 1, tokens))
    index, times = workload.created(g, spec, store=place), []
    for _ in range(repeats + 1):  # the first repetition allocates memory and compiles
        index.reset()
        settled()
        start = time.perf_counter()
        for keys, values in pieces:
            index.append(keys, values)
        settled()
        times.append(1e6 * (time.perf_counter() - start))
    moved = sum(part.nbytes for piece in pieces for part in piece)
    found = quartiles(times[1:])
    about = {"place": place, "tokens": tokens, "bytes": moved}
    return {**about, **found, "GB_s": moved / found["median_us"] / 1e3}


def steps(decoding: Decoding, count: int) -> tuple[list[float], list[str]]:
    """Run `count` decode steps. Return the time of each step in microseconds, and its kind.

    The kind of a step is "updated" if a layer begins or ends an update in this step (it moves
    tokens from its local window into its index). Otherwise the kind is "plain".
    """
    times, kinds, layers = [], [], decoding.layers
    for _ in range(count):
        before, start = [len(layer.index) for layer in layers], time.perf_counter()
        decoding.step()
        decoding.wait()
        times.append(1e6 * (time.perf_counter() - start))
        pairs = zip(layers, decoding.turns, strict=True)
        begun = any(len(layer) % layer.update_every == turn for layer, turn in pairs)
        ended = before != [len(layer.index) for layer in layers]
        kinds.append("updated" if begun or ended else "plain")
    return times, kinds


def delays(times: list[float], kinds: list[str]) -> dict[str, Any]:
    """Summarize the times of decode steps, as relative delays compared with steps without updates.

    `times` and `kinds` are the results of `steps`. The summary has the median and the worst delay
    for each kind of step. The value `amortised` compares the mean time of all steps with the median
    time of the steps without an update.
    """
    usual = statistics.median(t for t, kind in zip(times, kinds, strict=True) if kind == "plain")
    found: dict[str, Any] = {"amortised": sum(times) / len(times) / usual - 1}
    for kind, words in KINDS.items():
        some = [time for time, other in zip(times, kinds, strict=True) if other == kind]
        found[kind] = {"is": words, "steps": len(some)}
        if some:
            median, worst = statistics.median(some), max(some)
            found[kind] |= {"median_us": median, "worst_us": worst}
            found[kind] |= {"delay_median": median / usual - 1, "delay_worst": worst / usual - 1}
    return found


def updates(g: Geometry, spec: str, tokens: int, layers: int, periods: int) -> dict[str, Any]:
    """Measure decode steps in which layers move tokens from their windows into their indexes.

    Steps are measured twice: in one measurement, memory for the moved tokens is reserved before the
    steps, and in the other it is not. Each measurement has `periods` times 256 steps.
    """
    found: dict[str, Any] = {"tokens": tokens, "layers": layers}
    for plan, words in PLANS.items():
        room = (periods + 2) * UPDATE if plan == "room" else 0
        decoding = Decoding(g, spec, tokens, layers, room=room)
        steps(decoding, UPDATE)  # compile kernels: after these steps, each layer had an update
        found[plan] = {"is": words, **delays(*steps(decoding, periods * UPDATE))}
    return found


def main() -> None:
    """Run the command line: check a decode step, then time appends and decode steps.

    Results are printed, and written to the JSON file.
    """
    given, g = arguments(), workload.geometry("cuda")
    result: dict[str, Any] = {"index": given.index, "machine": describe("cuda")}
    with torch.no_grad():
        result |= {"check": check(g, given.index), "prompts": [], "layers": []}
        for place in ("device", "host"):
            found = prompt(g, given.index, given.tokens, place, repeats=10)
            result["prompts"].append(found)
            print(json.dumps(found), flush=True)
        for context in given.context:
            workload.free()
            sizes = context, given.layers, given.periods
            result["layers"].append(updates(g, given.index, *sizes))
            print(json.dumps(result["layers"][-1], indent=1), flush=True)
            if given.json:
                write_json(given.json, result)


if __name__ == "__main__":
    main()

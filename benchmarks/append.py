"""Time appends on a GPU: of a whole prompt, and from the window into the index during decoding.

    python -m benchmarks.append [--index SPEC] [--tokens N] [--context N …] [--layers L]
        [--periods P] [--json OUT]

A layer has 32 query heads, 8 KV heads, D = 128 and bfloat16. First a step over appended tokens is
checked. Nothing is timed if its result is wrong. The result has two parts:

- `prompts` has the time to append N tokens in chunks of 65,536, until the device is done. Memory is
  reserved before the timing starts.
- `layers` has the times of decode steps of attention layers. The layers are launched one by one,
  and the host waits for each step, as if it sampled a token. Each layer moves 256 tokens of its
  window into the index every 256 steps (P times), and each layer does so at a different step. Steps
  in which an update begins or ends are counted separately.
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

PLANS = {"beside": "one layer at a time", "room": "the same, with memory reserved before"}
KINDS = {"plain": "a token only", "updated": "an update of a window begins or ends"}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with an error message if it cannot be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**20, help="tokens of the prompt")
    parser.add_argument(
        "--context", nargs="*", type=int, default=[2**17], help="tokens that the layers contain"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--periods", type=int, default=4, help="how often each layer updates, every 256 steps"
    )
    add_index(parser)
    parser.add_argument("--json", type=output())
    found = parser.parse_args(given)
    refuse(parser, found, tokens=4096, context=4096, layers=1, periods=1)
    if found.layers > UPDATE // 4:
        parser.error(f"layers: got {found.layers}, allowed is up to {UPDATE // 4}")
    return found


def prompt(g: Geometry, spec: str, tokens: int, place: str, repeats: int) -> dict[str, Any]:
    """Measure the microseconds of appending a prompt, with rows on the host or the device."""
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
    """Run steps. Return the microseconds of each step until the device is done, and its kind.

    A kind is one of `KINDS`.
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
    """Return how much longer steps of each kind take than plain steps of the same run.

    A plain step has no update.
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
    """Measure each plan over `periods` periods of 256 steps."""
    found: dict[str, Any] = {"tokens": tokens, "layers": layers}
    for plan, words in PLANS.items():
        room = (periods + 2) * UPDATE if plan == "room" else 0
        decoding = Decoding(g, spec, tokens, layers, room=room)
        steps(decoding, UPDATE)  # compiles kernels, and moves the layers' updates apart
        found[plan] = {"is": words, **delays(*steps(decoding, periods * UPDATE))}
    return found


def main() -> None:
    """Check and measure. Print and write the results after each part."""
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

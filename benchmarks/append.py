"""What an append costs on a GPU: codes, rows on the host, and updates while decoding.

    PYTHONPATH=.:adapters python benchmarks/append.py [--tokens N] [--piece N] [--rows N]
        [--context N …] [--layers L] [--periods P] [--seconds S] --json OUT
    PYTHONPATH=.:adapters python benchmarks/append.py --join RUN --parts update layers --json OUT

H = 32, G = 8, D = 128, bfloat16, `pariskv`. Codes and rows are checked first; wrong ones are not
timed. `encode`: CUDA graphs after the L2 cache was filled otherwise, shares of the read-only rate
of the same run. `small`: the kernels of an update and of a token, and rows by ids, alone, each in a
graph of all layers. `offload`: CUDA events around copies, shares of a plain copy from the device to
pinned memory of the same size. `update`: 256 tokens of each layer move into the index every 256
steps; a step is a graph of all layers' searches and attention alone, which makes a delay as large a
share as it can be. `layers`: the same of attention layers that are launched one by one, and update
their windows by themselves. The second line measures nothing: it takes parts of another run, on a
machine alike, into a result, which says so (`joined`).
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.appending import encode, layers, offload, small, update
from benchmarks.decode.floors import ceilings
from benchmarks.decode.setting import D, G, H
from benchmarks.decode.timing import Clock, GraphTimer, OutOfTimeError
from kvindex.core.geometry import Geometry
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe
from kvindex_cuda.runtime import launch as launching

PARTS = ("ceilings", "encode", "small", "offload", "update", "layers")
SHORT = 2**14
"""Tokens of the indexes of `small`, whose kernels do not depend on them."""

ALIKE = ("gpu", "torch", "processor", "cores")
"""Of a machine: what runs that are joined have in common."""


def joined(result: dict[str, Any], other: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """`result` with these parts of another run, named under `joined`.

    Raises ValueError for a run of another shape or machine, or without them.
    """
    of = [
        (run["shape"], run["index"], *(run["machine"][n] for n in ALIKE)) for run in (result, other)
    ]
    if of[0] != of[1]:
        raise ValueError(f"join: got a run of {of[1]}, allowed is one of {of[0]}")
    if missing := [name for name in parts if name not in other]:
        raise ValueError(f"join: got a run without {missing}, allowed is one with {parts}")
    about = {"machine": other["machine"], "notes": other["notes"], "seconds": other["seconds"]}
    said = result.get("joined", {}) | {name: {"is": "of another run"} | about for name in parts}
    return result | {name: other[name] for name in parts} | {"joined": said}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**20, help="that are encoded")
    parser.add_argument("--piece", type=int, default=2**16, help="of a prefill")
    parser.add_argument("--rows", type=int, default=2**16, help="tokens that are copied")
    parser.add_argument("--context", nargs="*", type=int, default=[131_072], help="of updates")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--periods", type=int, default=4, help="of 256 steps")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=300, help="after which nothing is begun")
    parser.add_argument("--join", type=Path, help="a result of another run, to take parts of")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["update", "layers"])
    parser.add_argument("--json", type=output())
    found = parser.parse_args(given)
    if found.join is not None and not (found.json and found.json.exists() and found.join.exists()):
        parser.error(f"join: got {found.join}, allowed is a file that exists, with --json another")
    least = dict(tokens=4096, piece=256, rows=4096, context=4096, layers=1, periods=1, replays=10)
    for name, low in least.items():
        values = getattr(found, name)
        for value in values if isinstance(values, list) else [values]:
            if value < low:
                parser.error(f"{name}: got {value}, allowed is at least {low}")
    if found.layers > update.MOST_LAYERS:
        parser.error(f"layers: got {found.layers}, allowed is up to {update.MOST_LAYERS}")
    if not found.seconds > 0:
        parser.error(f"seconds: got {found.seconds}, allowed is above 0")
    if found.join is None and not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and torch sees none")
    return found


def measure_all(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check, then measure part by part; what is known is written after each."""
    clock, card = Clock(given.seconds), torch.cuda.get_device_properties(0)
    launching.checked(torch.cuda.current_device())
    geometry = Geometry.of(q_heads=H, kv_heads=G, head_dim=D, dtype=torch.bfloat16, device="cuda")
    timed = GraphTimer(given.replays, clock, card.L2_cache_size)
    result: dict[str, Any] = {
        "shape": {"q_heads": H, "kv_heads": G, "head_dim": D, "dtype": "bfloat16"},
        "index": encode.INDEX,
        "machine": describe("cuda"),
        "notes": [],
        "check": encode.check(geometry),
    }

    def keep(name: str, found: Any) -> None:
        result[name] = found
        if given.json:
            write_json(given.json, result)
        console.print(f"{clock.spent:5.0f} s  {name}: {json.dumps(found, indent=1)}")
        gc.collect()
        torch.cuda.empty_cache()

    try:
        keep("ceilings", ceilings(timed, "cuda"))
        rate = result["ceilings"]["read"]["GB_s"]
        keep("encode", encode.measure(geometry, given.tokens, given.piece, timed, rate))
        clock.check()
        keep("small", small.measure(geometry, SHORT, given.layers, timed, result["ceilings"]))
        clock.check()
        keep("offload", offload.measure(geometry, given.rows))
        updates = []
        for context in given.context:
            clock.check()
            updates.append(update.measure(geometry, context, given.layers, given.periods))
            keep("update", updates)
        decoding = []
        for context in given.context:
            clock.check()
            decoding.append(layers.measure(geometry, context, given.layers, given.periods))
            keep("layers", decoding)
    except (OutOfTimeError, torch.cuda.OutOfMemoryError, MemoryError) as error:
        keep("notes", [*result["notes"], f"stopped: {str(error).splitlines()[0]}"])
    keep("seconds", clock.spent)
    return result


def main() -> None:
    """Check, measure, print and write; or join."""
    given = arguments()
    if given.join is not None:
        runs = [json.loads(path.read_text()) for path in (given.json, given.join)]
        write_json(given.json, joined(*runs, given.parts))
        return
    with torch.no_grad():
        measure_all(given, Console(width=160))


if __name__ == "__main__":
    main()

"""One decoding step of one layer on a GPU, from query to attention output, and where it spends it.

    PYTHONPATH=.:adapters python benchmarks/decode_step.py [--tokens N …] [--batch B …]
        [--index SPEC] [--layers L] [--replays R] [--seconds S] [--faiss FOLDER]
        --json OUT --plot OUT.png
    PYTHONPATH=.:adapters python benchmarks/decode_step.py --draw RESULT.json … [--plot OUT.png]

H = 32, G = 8, D = 128, bfloat16, k = 100, an index that fused kernels serve: every preset, as
`--index pariskv:preset=scan`. First the answer
is checked; a wrong one is not timed. All times are of replays of a CUDA graph that holds the step
of L layers one after another, divided by L, by CUDA events, after the L2 cache was filled with
something else and with other queries in each replay. Launches are counted of the bare step and, as
nodes of a captured graph, of the public call, `index.attend`. Where dense attention does not fit
into memory or time (4,194,304 tokens, say), a note tells why and the step is measured alone.
Rows on the host are read as they are, as codes of a byte (`int8`, `fp8`), and with a cache of rows
that is filled before and forgets so many that --hit-rate of the rows are found; a point's
`hit_rate` says how many were while it was timed. FAISS's GPU indexes, where they can be imported
(--faiss: from a folder), are timed by the same events without a graph. --draw shows and draws the
first result with the points of the others.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.decode import options
from benchmarks.decode.correctness import check
from benchmarks.decode.faiss_rivals import gpu_library, rivals
from benchmarks.decode.floors import ceilings
from benchmarks.decode.rivals import dense, layers_of_dense
from benchmarks.decode.setting import NEAR, D, G, H, K, Setting, geometry
from benchmarks.decode.show import found_by, joined, plot, show, spread
from benchmarks.decode.stages import measure
from benchmarks.decode.timing import Clock, GraphTimer, OutOfTimeError
from benchmarks.decode.workload import ROWS, Pool, Workload, row_pools, sequences_of
from kvindex_adapters.files import PICTURES, output, write_json
from kvindex_adapters.machine import describe
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.runtime import launch as launching

TOKENS = (32_768, 131_072, 1_048_576)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    options.add(parser)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=480, help="after which nothing is begun")
    parser.add_argument("--faiss", type=Path, help="a folder that holds faiss with a GPU part")
    parser.add_argument("--json", type=output())
    parser.add_argument("--plot", type=output(*PICTURES))
    parser.add_argument(
        "--draw", type=Path, nargs="+", help="show and draw these results; measure nothing"
    )
    found = parser.parse_args(given)
    options.check(parser, found, tokens=4096, batch=1, layers=1, replays=50)
    if not found.seconds > 0:
        parser.error(f"seconds: got {found.seconds}, allowed is above 0")
    if found.faiss is not None and not (found.faiss / "faiss").is_dir():
        parser.error(f"faiss: got {found.faiss}, allowed is a folder with the package faiss in it")
    for path in found.draw or ():
        if not path.is_file():
            parser.error(f"draw: got {path}, allowed is a JSON that this script has written")
    if found.draw is None and not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and torch sees none; --draw draws a result")
    return found


def write_rows(result: dict[str, Any], given: argparse.Namespace) -> None:
    """Write and draw what is known so far."""
    if given.json and given.draw is None:
        write_json(given.json, result)
    if given.plot and result["points"]:
        plot(result, given.plot)


def measure_all(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check, then measure point by point; batch 1 first of every length."""
    clock = Clock(given.seconds)
    card = torch.cuda.get_device_properties(0)
    launching.checked(torch.cuda.current_device())
    setting = Setting(geometry("cuda"), given.index, hit_rate=given.hit_rate)
    processors, l2 = card.multi_processor_count, card.L2_cache_size
    timed = GraphTimer(given.replays, clock, l2)
    result: dict[str, Any] = {
        "shape": {"q_heads": H, "kv_heads": G, "head_dim": D, "k": K, "dtype": "bfloat16"},
        "index": given.index,
        "near": NEAR,
        "hit_rate": given.hit_rate,
        "l2_bytes": l2,
        "machine": describe("cuda"),
        "ceilings": {},
        "points": [],
        "faiss": [],
        "notes": [],
    }

    def say(text: str) -> None:
        console.print(f"{clock.spent:5.0f} s  {text}")

    def end(note: str) -> None:
        result["notes"].append(note)
        say(note)

    result["check"] = check(setting, processors, batch=max(2, *given.batch))
    say(f"checked: {result['check']}")
    try:
        result["ceilings"] = ceilings(timed, "cuda", record=setting.record)
        _free()
        say(str({name: round(part["GB_s"]) for name, part in result["ceilings"].items()}))
        rows = row_pools(setting, min(max(given.tokens), ROWS))
        pinned = sum(pool.alive.pinned_bytes for place, pool in rows.items() if place != "device")
        say(f"rows: {pinned / 2**30:.1f} GiB pinned")
        layout, scanned_bytes = setting.layout, setting.scanned_bytes
        for tokens in given.tokens:
            S = -(-tokens // BLOCK)
            scanned = G * tokens * scanned_bytes
            sequences = sequences_of(scanned, given.layers, l2)
            fit = int(0.85 * torch.cuda.mem_get_info()[0]) // (S * G * layout.head_bytes)
            if fit < 1:
                end(f"{tokens} tokens: their codes do not fit into the device")
                continue
            if fit < sequences:
                end(f"{tokens} tokens: codes of {fit} sequences, not {sequences}: memory")
            points = [{"tokens": tokens, "batch": batch} for batch in given.batch]
            for point in points:
                need = 4 * G * D * tokens * point["batch"]
                rate = result["ceilings"]["read"]["GB_s"]
                limits = dict(replays=given.replays, GB_s=rate, left_s=clock.left)
                free = torch.cuda.mem_get_info()[0]
                layers, why = layers_of_dense(need, free, given.layers, **limits)
                try:
                    if layers:
                        point |= dense(setting, tokens, point["batch"], layers, timed)
                except torch.cuda.OutOfMemoryError as error:
                    why = str(error).splitlines()[0]
                if why:
                    end(f"{tokens} tokens, batch {point['batch']}: no dense attention: {why}")
                _free()
                result["points"].append(point)
                if "dense" in point:
                    say(f"{tokens} × {point['batch']} dense: {spread(point, 'dense')} µs")
            pool = Pool.of(setting, tokens, min(fit, sequences), clock)
            say(f"{tokens} tokens: {pool.blocks.nbytes / 2**30:.1f} GiB of codes")
            for point in points:
                batch = point["batch"]
                work = Workload.of(setting, tokens, batch, given.layers, pool, rows, processors)
                sizes = dict(tokens=tokens, batch=batch)
                point |= measure(setting, work, timed, result["ceilings"], **sizes)
                point["sequences"] = len(pool.blocks)
                say(f"{tokens} × {batch} step: {spread(point, 'step_host')} µs")
                for part, times in point.items():
                    if isinstance(times, dict) and not times["graph"]:
                        end(f"{tokens} tokens, batch {batch}: {part} was not captured in a graph")
                write_rows(result, given)
                del work
                _free()
            del pool
            _free()
        try:
            faiss = gpu_library(given.faiss)
        except ImportError as error:
            end(f"FAISS was not measured: {error}")
            faiss = None
        for tokens in [n for n in given.tokens if n <= ROWS and faiss]:
            result["faiss"].append(rivals(faiss, setting, tokens, timed, clock))
            say(f"FAISS, {tokens} tokens: {found_by(result['faiss'][-1])}")
            write_rows(result, given)
            _free()
    except OutOfTimeError as error:
        end(f"stopped: {error}")
    except torch.cuda.OutOfMemoryError as error:
        end(f"stopped: {str(error).splitlines()[0]}")
    finally:  # whatever happens on the device, what was measured is kept
        result["seconds"] = clock.spent
        write_rows(result, given)
    return result


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Check, measure, print, write and draw."""
    given, console = arguments(), Console(width=200)
    if given.draw is not None:
        result = joined([json.loads(path.read_text()) for path in given.draw])
        write_rows(result, given)
    else:
        with torch.no_grad():
            result = measure_all(given, console)
    show(result, console)


if __name__ == "__main__":
    main()

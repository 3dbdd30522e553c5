"""When the blocks of a step's kernels begin, wait, go on and end: where its time goes.

    PYTHONPATH=.:adapters python benchmarks/timeline.py [--tokens N] [--rows cached]
        [--index SPEC] [--hit-rate H] [--replays R] --json OUT

The step is that of `decode_step.py`, of the tree that this runs in, batch 1. Its kernels are
compiled a second time from a copy that stamps %globaltimer at the points that `stamps.py` tells;
end a line of a kernel in `// MARK` for one more. Times are of the last layer of a graph of 16, in
µs since the first block of its first kernel began. The table has, for each point, the first, the
median and the last block, each the median over replays; the JSON also every block's median, by its
number x + gx (y + gy z), for groups of heads differ: `grid` tells which block is whose.

Stamps cost registers and stores: a line says what the step takes with them and without. Another
says the least difference between two stamps; where that is a µs, the device's timer is too coarse.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.beside.worker import Bench
from benchmarks.decode import options
from benchmarks.decode.correctness import sound
from benchmarks.decode.timing import captured, read_all
from benchmarks.side_by_side import PLACES
from benchmarks.stamps import Launched, Point, Stamped, launched
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rows", choices=PLACES, default="cached", help="where they lie")
    options.add(parser)
    parser.add_argument("--json", type=output(), required=True)
    found = parser.parse_args(given)
    options.check(parser, found, tokens=4096, replays=10)
    if not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and torch sees none")
    return found


def measure(
    bench: Bench, place: str, replays: int, capture: Callable[[Callable[[], Any]], Any] = captured
) -> dict[str, Any]:
    """Stamp the kernels of a step that was built, and replay it.

    capture: gives what `replay`s a run. Raises SystemExit where the stamped step is wrong, and for
    a MARK that cannot be stamped.
    """
    work = bench.work
    assert work is not None
    run, device = partial(work.run, place), bench.setting.geometry.device
    with launched() as kernels:
        run()
    plain = bench.round([place])[place]
    try:
        stamps = Stamped(kernels, device)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    taken = []
    with stamps:
        sound(bench.setting, work)
        slower = bench.round([place])[place]
        replay = capture(run).replay
        other = torch.zeros(4 * bench.l2_bytes, dtype=torch.uint8, device=device)
        total = torch.zeros(1, dtype=torch.int32, device=device)
        for number in range(replays):
            work.ask(number)
            stamps.marks.zero_()
            read_all(other, total)  # the L2 cache holds something else
            replay()
            taken.append(stamps.marks.cpu())
    return {
        "plain_us": plain["median_us"],
        "stamped_us": slower["median_us"],
        "tick_ns": tick(taken[-1]),
        "grids": {name: list(kernel.grid) for name, kernel in kernels.items()},
        "points": figures(stamps.points, kernels, taken),
    }


def tick(marks: Tensor) -> int:
    """The least difference between two stamps of a replay, nanoseconds."""
    apart = marks[marks > 0].unique().diff()
    return int(apart.min()) if len(apart) else 0


def figures(
    points: dict[int, Point], kernels: dict[str, Launched], taken: list[Tensor]
) -> list[dict[str, Any]]:
    """Of each point that was come by, in order: when, in µs. taken: marks of each replay."""
    names = [*kernels]
    begun = next(n for n, at in points.items() if (at.kernel, at.what) == (names[0], "start"))
    each = []
    for marks in taken:
        start = marks[begun][marks[begun] > 0].min()
        # what is earlier was left by a layer before: this one did not come by
        us = torch.where(marks < start, math.nan, (marks - start).double() / 1e3)
        each.append(us.numpy())
    found = []
    order = sorted(points, key=lambda n: (names.index(points[n].kernel), points[n].line, n))
    for number in order:
        there = [us[number][~np.isnan(us[number])] for us in each]
        there = [blocks for blocks in there if len(blocks)]
        if not there:
            continue
        spread = [
            statistics.median(float(of(blocks)) for blocks in there)
            for of in (np.min, np.median, np.max)
        ]
        by_block = np.stack([us[number] for us in each])
        last = int(np.flatnonzero(~np.isnan(by_block).all(0))[-1])
        blocks = [_median(by_block[:, i]) for i in range(last + 1)]
        point = points[number]
        found.append(
            {"kernel": point.kernel, "line": point.line, "what": point.what}
            | dict(zip(("first_us", "median_us", "last_us"), spread, strict=True))
            | {"blocks": blocks}
        )
    return found


def _median(values: np.ndarray[Any, Any]) -> float | None:
    """Over replays; None where a block came by in fewer than half of them."""
    there = values[~np.isnan(values)]
    return round(float(np.median(there)), 3) if 2 * len(there) >= len(values) else None


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows."""
    rows = [
        (
            point["kernel"],
            str(sum(block is not None for block in point["blocks"])),
            *(f"{point[name]:.2f}" for name in ("first_us", "median_us", "last_us")),
            str(point["line"]),
            point["what"],
        )
        for point in result["points"]
    ]
    return ("kernel", "blocks", "first", "median", "last", "line", "point"), rows


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table, and what stamps cost."""
    head, rows = table(result)
    shown = Table(*head, title=f"µs, {result['tokens']:,} tokens, rows: {result['rows']}")
    for row in rows:
        shown.add_row(*(part.replace("[", r"\[") for part in row))
    console.print(shown)
    console.print(
        f"A layer takes {result['stamped_us']:.2f} µs with stamps, {result['plain_us']:.2f} "
        f"without; two stamps are {result['tick_ns']} ns apart or more."
    )


def main(given: list[str] | None = None) -> None:
    """Check, measure, write, print."""
    told, console = arguments(given), Console(width=160)
    with torch.no_grad():
        bench = Bench.on_device(index=told.index, hit_rate=told.hit_rate, replays=told.replays)
        found = bench.check()
        console.print(f"checked: {found['check']}")
        bench.pin(told.tokens)
        bench.build(told.tokens)
        result = {name: getattr(told, name) for name in ("tokens", "rows", "index", "hit_rate")}
        result |= {"replays": told.replays, "machine": describe("cuda"), **found}
        result |= measure(bench, told.rows, told.replays)
    write_json(told.json, result)
    show(result, console)


if __name__ == "__main__":
    main()

"""Measure when the thread blocks of a decode step's kernels begin, wait, resume and end.

```
PYTHONPATH=.:adapters python tools/timeline.py [--tokens N] [--rows host] [--index SPEC]
    [--q-heads H] [--kv-heads G] [--decoder SHAPE] [--hit-rate H] [--replays R] --json OUT
```

The decode step is the one that `benchmarks/latency.py` times, with batch size 1. With `--decoder`
it is the attention of one layer in a decode step of `benchmarks/generation.py`.

The kernels are compiled a second time, from a copy of their source that stores the time at certain
lines. Such a line is called a point, and a stored time is called a stamp. `stamps.py` describes
where the points are. To add a point, end a line of a kernel with `// MARK`.

The command prints a line for each point: the times at which the first, the median and the last
block reached it, each as the median over replays. Times are in µs since the first block of the
layer's first kernel began. The layer is the last one of a CUDA graph with 16 layers, or of the
decoder.

Storing times slows kernels down, so the command also prints the time of the decode step with and
without stamps. Finally it prints the smallest difference between two stamps. If this is about 1 µs,
the device's timer is too coarse for the measurement.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from heads import add_heads, refuse_heads
from stamps import Point, Stamped, launched
from torch import Tensor

from benchmarks.common import token, workload
from benchmarks.common.correctness import check
from benchmarks.common.shapes import SHAPES, Shape, weights_of
from benchmarks.common.timing import GraphTimer, captured
from benchmarks.common.workload import Layers
from benchmarks.latency import add_index, agree, refuse
from benchmarks.reporting.parts import table
from kvindex.core.geometry import Geometry
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with a message if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=131_072, help="number of tokens that the index stores"
    )
    parser.add_argument(
        "--rows",
        choices=("host", "device"),
        default="host",
        help="memory in which the index stores keys and values",
    )
    add_heads(parser)
    parser.add_argument(
        "--decoder",
        choices=SHAPES,
        help="run decode steps of a whole model with the shape of this one, and measure one layer",
    )
    add_index(parser)
    parser.add_argument(
        "--json", type=output(), required=True, help="JSON file to which the result is written"
    )
    found = parser.parse_args(given)
    refuse_heads(parser, found)
    refuse(parser, found, tokens=4096, replays=10)
    return found


def measure(
    work: Layers, before: Callable[[int], None], replays: int, timed: Any, capture: Any = captured
) -> dict[str, Any]:
    """Measure a decode step of several layers, in which kernels store times.

    The source of the kernels is changed before it is compiled (`stamps.py`). With these changes,
    each thread block stores the time when it reaches certain lines.

    Args:
        work: The layers.
        before: Function to call before each replay, with the number of the replay.
        replays: Number of replays.
        timed: Function that measures the time of `work.run`.
        capture: Function that captures `work.run`, and returns an object with a method `replay`.

    Raises:
        SystemExit: The kernels give wrong results when they store times.
        ValueError: A comment `// MARK` in a kernel is in the middle of a statement.
    """
    with launched() as kernels:
        want = work.answers()
    plain = timed(work.run, len(work), before)
    stamps = Stamped(kernels, work.geometry.device)
    taken = []
    with stamps:
        agree({"host": want, "device": work.answers()})
        slower = timed(work.run, len(work), before)
        replay = capture(work.run).replay
        for number in range(replays):
            before(number)
            stamps.marks.zero_()
            replay()
            taken.append(stamps.marks.cpu())
    times = {"plain_us": plain["median_us"], "stamped_us": slower["median_us"]}
    return times | of_stamps(stamps, [*kernels], taken)


def measure_token(
    shape: Shape, g: Geometry, index: str, tokens: int, hit_rate: float, replays: int
) -> dict[str, Any]:
    """Measure a decode step of a whole model.

    During the step, the kernels of the index read the GPU's timer and store the times.
    """
    weights, room = weights_of(shape, g), token.MOST_SHARPENED + 4 * (replays + token.WARM)
    layers = token.indexed(g, index, tokens, shape.layers, room)

    def plan() -> token.Plan:
        return token.Plan(shape, g, weights, layers)

    def us(plan: token.Plan) -> float:
        return 1e3 * statistics.median(plan.turn(replays)["device_ms"])

    plain = plan()
    plain.turn(1)  # this run uses no graph
    with launched() as found:
        plain.turn(1)
    kernels = {name: file for name, file in found.items() if file.startswith("step/")}
    token.sharpen_for(weights, plain, hit_rate)
    times = {"plain_us": us(plain)}
    stamps, taken = Stamped(kernels, g.device), []
    with stamps:
        slower = plan()
        slower.turn(token.WARM)
        times["stamped_us"] = us(slower)
        for _ in range(replays):
            stamps.marks.zero_()
            slower.turn(1)
            taken.append(stamps.marks.cpu())
    return times | of_stamps(stamps, [*kernels], taken)


def of_stamps(stamps: Stamped, names: list[str], taken: list[Tensor]) -> dict[str, Any]:
    """Summarize the times that kernels have stored at certain lines of their source.

    Such a line is called a point.

    Args:
        stamps: The context in which the kernels ran.
        names: Names of the kernels in the order of their launches.
        taken: For each replay, the time in ns at which each block reached each point, int64
            `[points, blocks]` (the attribute `marks` of `Stamped`).

    Returns:
        `points`: the times of each point (see `figures`). `tick_ns`: the smallest difference
        between two stored times of the last replay.
    """
    apart = taken[-1][taken[-1] > 0].unique().diff()
    tick_ns = int(apart.min()) if len(apart) else 0
    return {"tick_ns": tick_ns, "points": figures(stamps.points, names, taken)}


def figures(
    points: dict[int, Point], names: list[str], taken: list[Tensor]
) -> list[dict[str, Any]]:
    """Return the times at which thread blocks reached certain lines of their kernels (points).

    Times are in µs after the layer's first thread block started. The result is sorted by kernel and
    line, and contains only points that were reached.

    Args:
        points: Number of a point -> its kernel and line.
        names: Names of the kernels in the order of their launches.
        taken: For each replay, the time in ns at which each thread block reached each point, int64
            `[points, blocks]`; 0 where no time was stored.
    """
    begun = next(n for n, at in points.items() if (at.kernel, at.what) == (names[0], "start"))
    found = []
    for number in sorted(points, key=lambda n: (names.index(points[n].kernel), points[n].line, n)):
        there = []
        for marks in taken:
            start = marks[begun][marks[begun] > 0].min()
            mine = marks[number]
            # The kernels of all layers write their times to the same addresses, so a layer
            # overwrites the times of the layers before it. Only times of the last layer are used.
            # Older times remain where a thread block of the last layer has written no time,
            # because it did not reach the place in the kernel. They are left out here.
            if len(blocks := mine[mine >= start]):
                there.append((blocks - start).double() / 1e3)
        if there:
            point = points[number]
            spread = {
                f"{name}_us": statistics.median(float(of(blocks)) for blocks in there)
                for name, of in (("first", Tensor.min), ("median", Tensor.median))
            } | {"last_us": statistics.median(float(blocks.max()) for blocks in there)}
            about = {"kernel": point.kernel, "line": point.line, "what": point.what}
            found.append({**about, "blocks": max(map(len, there)), **spread})
    return found


def shown(result: dict[str, Any]) -> str:
    """Return the text to print.

    It has a table of the times at which thread blocks reached certain lines of their kernels, and
    the time of a decode step with and without the code that stores these times.
    """
    rows = [
        (
            *(point["kernel"], str(point["blocks"])),
            *(f"{point[f'{name}_us']:.2f}" for name in ("first", "median", "last")),
            *(str(point["line"]), point["what"]),
        )
        for point in result["points"]
    ]
    head = ("kernel", "blocks", "first", "median", "last", "line", "point")
    return (
        f"µs\n\n{table(head, rows)}\n\nA {'token' if result.get('decoder') else 'layer'} takes "
        f"{result['stamped_us']:.2f} µs with stamps, "
        f"{result['plain_us']:.2f} without; two stamps are {result['tick_ns']} ns apart or more."
    )


def main(given: list[str] | None = None) -> None:
    """Check the results of a decode step, measure its kernels, and print and write the times."""
    options = arguments(given)
    g = replace(workload.geometry("cuda"), q_heads=options.q_heads, kv_heads=options.kv_heads)
    names = "tokens", "rows", "q_heads", "kv_heads", "decoder", "index", "hit_rate"
    result = {name: getattr(options, name) for name in names}
    result |= {"replays": options.replays, "machine": describe("cuda")}
    with torch.no_grad():
        if options.decoder:
            shape = SHAPES[options.decoder]
            g = shape.geometry(g.dtype, "cuda")
            token.check(shape, g, options.index)
            of = options.index, options.tokens, options.hit_rate, options.replays
            result |= measure_token(shape, g, *of)
        else:
            result["check"] = check(g, options.index)
            work = Layers(g, options.index, options.rows, tokens=options.tokens, layers=16)
            work.fill()
            before = partial(work.ask, hit_rate=options.hit_rate)
            result |= measure(work, before, options.replays, GraphTimer(options.replays))
    write_json(options.json, result)
    print(shown(result))


if __name__ == "__main__":
    main()

"""Time sizes of tiles of the Triton products of a decoder's layer, on a GPU.

    PYTHONPATH=.:adapters python tools/tune_triton.py [--shape NxK …] [--batch B] [--fp8]
        [--overlap] [--json OUT]

Shapes are of Qwen3-8B unless given. A time is the median of chains of launches over different
matrices, larger together than L2, in a captured graph. `rate` is the weights' bytes over time, and
`share` that over the rate of a kernel that reads as many bytes and does nothing else with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json
from kvindex_cuda.triton import Matrix, Norm, Tile, norm_linear, to_fp8

SHAPES = ["6144x4096", "4096x4096", "24576x4096", "4096x12288", "151936x4096"]
CHAIN_BYTES = 2**30
REPEATS = 20
READ = 8192
TILES = [
    Tile(*sizes) for sizes in product((8, 16, 32, 64), (128, 256, 512, 1024), (4, 8), (2, 3, 4))
]


@triton.jit
def read(source, target, count, BLOCK: tl.constexpr):
    """Read all words of a tensor; a sum that depends on them keeps the loads."""
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total ^= tl.load(source + at, at < count, other=0)
    tl.store(target + tl.program_id(0), tl.sum(total, 0))


def seconds(run: Callable[[], None]) -> float:
    """The median time of a captured call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return median(times)


def read_rate(matrices: list[Matrix]) -> float:
    """Bytes per second of reading the same weights, one launch each."""
    programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    target = torch.empty(programs, dtype=torch.int32, device="cuda")
    words = [matrix.weight.view(torch.int32).flatten() for matrix in matrices]

    def run() -> None:
        for part in words:
            read[(programs,)](part, target, part.numel(), BLOCK=READ, num_warps=8)

    return sum(part.nbytes for part in words) / seconds(run)


def timed(N: int, K: int, batch: int, fp8: bool, overlap: bool) -> list[dict[str, Any]]:
    """Every tile's time on a shape, the fastest first; a tile that does not compile is left out."""
    wide = Matrix(torch.randn(N, K, dtype=torch.bfloat16, device="cuda"))
    one = to_fp8(wide) if fp8 else wide
    count = max(2, CHAIN_BYTES // one.weight.nbytes)
    matrices = [Matrix(one.weight.clone(), None, one.scale) for _ in range(count)]
    x, norm = wide.weight[:batch].clone(), Norm(wide.weight[0].clone(), 1e-6)
    out, best = wide.weight.new_empty(batch, N), read_rate(matrices)
    found = []
    for tile in (tile._replace(overlap=overlap) for tile in TILES):

        def run(tile: Tile = tile) -> None:
            for matrix in matrices:
                norm_linear(x, norm, matrix, out=out, tile=tile)

        try:
            each = seconds(run) / count
        except triton.runtime.errors.OutOfResources:
            continue
        rate = one.weight.nbytes / each
        found.append(dict(N=N, K=K, us=1e6 * each, rate=rate, share=rate / best, **tile._asdict()))
    return sorted(found, key=lambda row: row["us"])


def main() -> None:
    """Print the three fastest tiles of each shape; write all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--json", type=output())
    args = parser.parse_args()
    found = [
        timed(*map(int, size.split("x")), args.batch, args.fp8, args.overlap) for size in args.shape
    ]
    for rows in found:
        for row in rows[:3]:
            print({key: round(value, 3) for key, value in row.items()})
    if args.json is not None:
        told = dict(batch=args.batch, fp8=args.fp8, rows=found)
        write_json(args.json, dict(machine=describe("cuda"), **told))


if __name__ == "__main__":
    main()

"""Time a few tiles for each product of a decoder's token, on a GPU; print lines for `tiles.py`.

    PYTHONPATH=.:adapters python tools/tune_triton.py [--decoder SHAPE …] [--batch B …]
        [--weights plain fp8] [--json OUT]

Shapes are those of `benchmarks/common/shapes.py`. A time is the median of chains of launches over
different matrices, larger together than L2, in a captured graph; launches overlap where the
decoder's do. Several sequences have one tile: that of the least time in all batches together. Each
line goes into `TILES` of `kvindex_cuda/triton/tiles.py`; beside it stand microseconds of each
batch, the usual tile's, and the weights' bytes over the longest time as a share of the rate of a
kernel that reads as many bytes and does nothing else with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.common.shapes import SHAPES, Shape
from kvindex_adapters.decoder.quantized import PLAIN, WEIGHTS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json
from kvindex_adapters.llama.fused import OVERLAPS
from kvindex_cuda.triton import (
    Matrix,
    Norm,
    Tile,
    linear_residual,
    norm_linear,
    norm_swiglu,
    swiglu_linear,
    to_fp8,
)
from kvindex_cuda.triton.tiles import Case, case_of, usual

CHAIN_BYTES, CHAIN = 2**30, 256
"""Of a chain's weights, and its launches: no more than either asks for."""

REPEATS = 20
READ = 8192
ONE = [
    Tile(),
    Tile(stages=5),
    *(Tile(8, 512, 4, 4, ahead=ahead) for ahead in (1, 2, 3)),
    Tile(8, 512, 8, 4),
    *(Tile(16, 512, 8, 3, ahead=ahead) for ahead in (1, 2)),
    Tile(rows=32, warps=8),
]
SEVERAL = [
    Tile(16, 256, 4, 4),
    *(Tile(16, 512, 8, stages) for stages in (3, 4)),
    *(Tile(32, 256, 4, stages) for stages in (3, 4)),
    *(Tile(32, 512, 8, stages) for stages in (3, 4)),
    Tile(16, 1024, 8, 3),
    Tile(64, 512, 8, 3),
]
"""Tiles that are tried for one sequence and for several, the usual ones among them."""


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


def products(shape: Shape, weights: str, batch: int) -> Iterator[tuple[str, int, int]]:
    """Products of a token of that shape, each with its matrix's rows and columns."""
    attended = shape.q_heads * shape.head_dim
    yield "norm_linear", attended + 2 * shape.kv_heads * shape.head_dim, shape.hidden
    yield "linear_residual", shape.hidden, attended
    yield "norm_linear" if batch == 1 else "norm_swiglu", 2 * shape.inner, shape.hidden
    yield "swiglu_linear" if batch == 1 else "linear_residual", shape.hidden, shape.inner
    if weights == PLAIN:
        yield "norm_linear", shape.vocabulary, shape.hidden


def cases(
    shapes: Sequence[Shape], batches: Sequence[int], weights: Sequence[str]
) -> dict[Case, tuple[int, int, list[int]]]:
    """Rows and columns by which each case is timed, the first that it has, and its batches."""
    found: dict[Case, tuple[int, int, list[int]]] = {}
    for kind in weights:
        dtype = torch.bfloat16 if kind == PLAIN else torch.float8_e4m3fn
        for shape in shapes:
            for batch in batches:
                for product, N, K in products(shape, kind, batch):
                    matrix = Matrix(torch.empty(N, K, dtype=dtype, device="meta"))
                    timed = found.setdefault(case_of(product, matrix, batch), (N, K, []))[2]
                    if batch not in timed:
                        timed.append(batch)
    return found


def timed(case: Case, N: int, K: int, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Every tile's times, the fastest first; a tile that does not compile is left out."""
    one = Matrix(torch.randn(N, K, dtype=torch.bfloat16, device="cuda") / K**0.5)
    if case.width == 1:
        one = to_fp8(one)
    count = min(CHAIN, max(2, CHAIN_BYTES // one.weight.nbytes))
    matrices = [Matrix(one.weight.clone(), None, one.scale) for _ in range(count)]
    best = read_rate(matrices)

    def run(tile: Tile, x: Tensor, residual: Tensor, out: Tensor) -> None:
        for matrix in matrices:
            if case.product == "norm_linear":
                norm_linear(x[:, :K], Norm(x[0, :K], 1e-6), matrix, out=out, tile=tile)
            elif case.product == "norm_swiglu":
                norm_swiglu(x[:, :K], Norm(x[0, :K], 1e-6), matrix, out=out[:, : N // 2], tile=tile)
            elif case.product == "linear_residual":
                linear_residual(x[:, :K], matrix, residual, out=out, tile=tile)
            else:
                swiglu_linear(x, matrix, residual, out=out, tile=tile)

    overlap, found = torch.cuda.get_device_capability() >= OVERLAPS, []
    for tile in ONE if case.one else SEVERAL:
        us = {}
        try:
            for batch in batches:
                x, residual, out = (
                    torch.randn(batch, width, dtype=torch.bfloat16, device="cuda")
                    for width in (2 * K, N, N)
                )
                call = partial(run, tile._replace(overlap=overlap), x, residual, out)
                us[batch] = 1e6 * seconds(call) / count
        except triton.runtime.errors.OutOfResources:
            continue
        share = one.weight.nbytes / max(us.values()) * 1e6 / best
        found.append(dict(case=case, tile=tile, N=N, K=K, us=us, share=share))
    return sorted(found, key=lambda row: sum(row["us"].values()))


def line(rows: list[dict[str, Any]]) -> str:
    """The fastest tile of a case, as `tiles.TILES` has it."""
    best = rows[0]
    shape = Matrix(torch.empty(best["N"], best["K"], device="meta"))
    plain = usual(shape, max(best["us"]))
    usually = next((row["us"] for row in rows if row["tile"] == plain), {})
    sizes = ", ".join(map(str, best["tile"][:4])) + f", ahead={best['tile'].ahead}"
    told = f"{_told(best['us'])} (usual {_told(usually)}), {best['share']:.2f}"
    return f"    Case({', '.join(map(repr, best['case']))}): Tile({sizes}),  # {told}"


def _told(us: dict[int, float]) -> str:
    return ", ".join(f"{time:.1f} us at {batch}" for batch, time in us.items()) or "not timed"


def main() -> None:
    """Print a line for each case; write all times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decoder", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--json", type=output())
    args = parser.parse_args()
    found = []
    shapes = [SHAPES[name] for name in args.decoder]
    for case, sizes in cases(shapes, args.batch, args.weights).items():
        found.append(timed(case, *sizes))
        print(line(found[-1]), flush=True)
    if args.json is not None:
        write_json(args.json, dict(machine=describe("cuda"), rows=found))


if __name__ == "__main__":
    main()

"""Find the fastest tile sizes for a decoder's matrix products in Triton on a GPU.

```
PYTHONPATH=.:adapters python tools/tune_triton.py [--decoder SHAPE] [--batch B …]
    [--weights fp8] [--context N] [--rounds R] [--json OUT]
```

A tile is the set of block sizes and launch options of one matrix product. Each tile is timed in
whole decode steps, because the tile that is fastest for a matrix product alone may not be fastest
in a decode step, where kernels overlap and share the L2 cache. The decode steps are those of
`benchmarks/generation.py --decoder`. They have no attention, or attention with indexes of
`--context` tokens. Steps with a new tile alternate with steps with the current tiles, and the ratio
of their times is used.

If several batch sizes are given, one tile is selected for all of them: the tile with the smallest
geometric mean of the ratios. The command prints a line for each matrix product. Copy these lines
into the dict `TILES` of `kvindex_cuda/triton/tiles.py`. The comment in each line has the ratio and
the current tile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import geometric_mean, median
from typing import Any

import torch
import triton

from benchmarks.common import token
from benchmarks.common.shapes import SHAPES, Shape, weights_of
from kvindex.core.geometry import Geometry
from kvindex_adapters.decoder.quantized import PLAIN, WEIGHTS
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json
from kvindex_cuda.triton import Tile, tiles
from kvindex_cuda.triton.tiles import Case

TOKENS = 16
"""Number of decode steps in one measurement."""

ONE = [
    Tile(),
    *(Tile(8, 512, 4, 4, ahead=ahead) for ahead in (1, 2, 3)),
    Tile(8, 512, 4, 5),
    Tile(8, 1024, 8, 3),
    Tile(4, 1024, 4, 4),
    Tile(4, 1024, 4, 3, ahead=3),
    *(Tile(16, 512, 8, 3, ahead=ahead) for ahead in (1, 2, 3)),
    Tile(16, 256, 4, 5),
]
SEVERAL = [
    Tile(16, 256, 4, 4),
    *(Tile(16, 512, 8, stages) for stages in (3, 4)),
    *(Tile(32, 256, 4, stages) for stages in (3, 4)),
    *(Tile(32, 512, 8, stages) for stages in (3, 4)),
    Tile(16, 1024, 8, 3),
    Tile(64, 512, 8, 3),
]
"""Tiles to try: `ONE` for batch size 1, `SEVERAL` for larger batches. Both contain the default."""


class Asked(dict[Case, Tile]):
    """A dict from matrix products to tiles (block sizes and launch options).

    The dict also records for which matrix products a tile was looked up.
    """

    def __init__(self, table: dict[Case, Tile]) -> None:
        super().__init__(table)
        self.cases: dict[Case, None] = {}

    def get(self, case: Case, default: Any = None) -> Any:
        """Return the tile for a matrix product, and record that it was looked up."""
        self.cases[case] = None
        return super().get(case, default)


@contextmanager
def using(more: dict[Case, Tile]) -> Iterator[Asked]:
    """Context manager that changes the tile sizes of some matrix products.

    `more` contains these matrix products and their new tiles. All other matrix products keep their
    tiles.
    """
    before, asked = tiles.TILES, Asked(tiles.TILES | more)
    tiles.TILES = asked
    try:
        yield asked
    finally:
        tiles.TILES = before


def ratios(
    shape: Shape, g: Geometry, kind: str, batch: int, context: int, rounds: int
) -> dict[Case, dict[Tile, float]]:
    """Time decode steps with each tile (block sizes and launch options) for each matrix product.

    Returns:
        Matrix product -> tile -> time of a decode step, relative to the time with the current
        tiles.
    """
    weights, layers = weights_of(shape, g, kind), [token.Nothing()] * shape.layers
    tried = ONE if batch == 1 else SEVERAL
    if context:
        room = (5 * len(tried) + 1) * ((rounds + 1) * TOKENS + token.WARM)
        layers = token.indexed(g, "pariskv", context, shape.layers, room, batch)

    def plan() -> token.Plan:
        made = token.Plan(shape, g, weights, layers, batch=batch)
        made.turn(token.WARM)
        return made

    with using({}) as asked:
        base = plan()
    plans: dict[tuple[Case, Tile], token.Plan] = {}
    for case in asked.cases:
        for tile in tried:
            with using({case: tile}):
                try:
                    plans[case, tile] = plan()
                except triton.runtime.errors.OutOfResources:
                    continue
    of: dict[tuple[Case, Tile], list[float]] = {key: [] for key in plans}
    for _ in range(rounds):
        today = median(base.turn(TOKENS)["device_ms"])
        for (case, tile), one in plans.items():
            with using({case: tile}):  # the step may be captured again, which looks up tiles
                of[case, tile].append(median(one.turn(TOKENS)["device_ms"]) / today)
    found: dict[Case, dict[Tile, float]] = {}
    for (case, tile), each in of.items():
        found.setdefault(case, {})[tile] = median(each)
    return found


def line(case: Case, found: Sequence[dict[Tile, float]]) -> str:
    """Return a line for `tiles.TILES` with the best tile for a matrix product.

    `found` contains one dict for each batch size, with the relative time of each tile.
    """
    all_have = [tile for tile in found[0] if all(tile in one for one in found)]
    means = {tile: geometric_mean(one[tile] for one in found) for tile in all_have}
    best = min(means, key=means.__getitem__)
    gain = f"{means[best]:.3f} of a step, before: {_shown(tiles.TILES.get(case))}"
    return f"    Case({', '.join(map(repr, case))}): {_shown(best)},  # {gain}"


def _shown(tile: Tile | None) -> str:
    if tile is None:
        return "the default"
    return f"Tile({', '.join(map(str, tile[:4]))}, ahead={tile.ahead})"


def main() -> None:
    """Parse the command line, time all tiles, and print a line for each matrix product."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--decoder", choices=SHAPES, default="qwen3-8b", help="model whose matrix shapes are timed"
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8],
        help="batch sizes for which to find tiles",
    )
    parser.add_argument(
        "--weights", choices=WEIGHTS, default=PLAIN, help="precision of the model's weights"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=0,
        help="number of tokens that each index stores; 0 to run the decoder without attention",
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="number of times that each tile is timed"
    )
    parser.add_argument(
        "--json", type=output(), help="file for the relative times of all tiles that were tried"
    )
    args = parser.parse_args()
    shape = SHAPES[args.decoder]
    g = shape.geometry(torch.bfloat16, "cuda")
    found: dict[Case, list[dict[Tile, float]]] = {}
    rows = []
    with torch.no_grad():
        for batch in args.batch:
            of = ratios(shape, g, args.weights, batch, args.context, args.rounds)
            for case, each in of.items():
                found.setdefault(case, []).append(each)
                rows += [
                    dict(batch=batch, case=case, tile=tile, ratio=ratio)
                    for tile, ratio in each.items()
                ]
    print(*(line(case, each) for case, each in found.items()), sep="\n")
    if args.json is not None:
        write_json(args.json, dict(machine=describe("cuda"), decoder=args.decoder, rows=rows))


if __name__ == "__main__":
    main()

"""Time a decoder's tokens with other tiles for a product, on a GPU; print lines for `tiles.py`.

    PYTHONPATH=.:adapters python tools/tune_triton.py [--decoder SHAPE] [--batch B …]
        [--weights fp8] [--context N] [--rounds R] [--json OUT]

The tokens are those of `benchmarks/generation.py --decoder`, without attention, or with an index
over `--context` tokens: of a product alone the fastest tile may not be a token's, for launches
overlap, and share L2. Each tile's plan takes turns with that of today's tiles. Several sequences
have one tile: that of the least mean of the ratios of all batches. A line goes into `TILES` of
`kvindex_cuda/triton/tiles.py`; beside it stand a token's ratio to today's and today's tile.
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
"""Of a plan's turn."""

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
"""Tiles that are tried for one sequence and for several, the usual ones among them."""


class Asked(dict[Case, Tile]):
    """A table that keeps what it was asked for."""

    def __init__(self, table: dict[Case, Tile]) -> None:
        super().__init__(table)
        self.cases: dict[Case, None] = {}

    def get(self, case: Case, default: Any = None) -> Any:
        """As of a dict."""
        self.cases[case] = None
        return super().get(case, default)


@contextmanager
def using(more: dict[Case, Tile]) -> Iterator[Asked]:
    """Tokens that are captured meanwhile have these tiles."""
    before, asked = tiles.TILES, Asked(tiles.TILES | more)
    tiles.TILES = asked
    try:
        yield asked
    finally:
        tiles.TILES = before


def ratios(
    shape: Shape, g: Geometry, kind: str, batch: int, context: int, rounds: int
) -> dict[Case, dict[Tile, float]]:
    """Of a token with each tile of each product that has room, to one with today's."""
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
            with using({case: tile}):  # should a token be captured anew
                of[case, tile].append(median(one.turn(TOKENS)["device_ms"]) / today)
    found: dict[Case, dict[Tile, float]] = {}
    for (case, tile), each in of.items():
        found.setdefault(case, {})[tile] = median(each)
    return found


def line(case: Case, found: Sequence[dict[Tile, float]]) -> str:
    """The best tile of a case in all batches, as `tiles.TILES` has it. found: ratios of each."""
    all_have = [tile for tile in found[0] if all(tile in one for one in found)]
    means = {tile: geometric_mean(one[tile] for one in found) for tile in all_have}
    best = min(means, key=means.__getitem__)
    told = f"{means[best]:.3f} of a token, before: {_told(tiles.TILES.get(case))}"
    return f"    Case({', '.join(map(repr, case))}): {_told(best)},  # {told}"


def _told(tile: Tile | None) -> str:
    if tile is None:
        return "the usual one"
    return f"Tile({', '.join(map(str, tile[:4]))}, ahead={tile.ahead})"


def main() -> None:
    """Print a line for each case; write all ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decoder", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--weights", choices=WEIGHTS, default=PLAIN)
    parser.add_argument("--context", type=int, default=0, help="tokens that an index holds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=output())
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

"""Find the fastest tiles of a decoder's matrix products on a GPU, and print lines for `tiles.py`.

```
PYTHONPATH=.:adapters python tools/tune_triton.py [--decoder SHAPE] [--batch B …]
    [--weights fp8] [--context N] [--rounds R] [--json OUT]
```

Each tile is timed in whole decode steps, because the fastest tile of a product alone may not be the
fastest in a step, where launches overlap and share the L2 cache. The steps are those of
`benchmarks/generation.py --decoder`, without attention, or with an index over `--context` tokens.
Steps with a tile to try alternate with steps with the present tiles.

If several batch sizes are given, they share one tile: the one with the smallest mean ratio over all
of them. Copy the printed lines into `TILES` of `kvindex_cuda/triton/tiles.py`. The comment on each
line has the present tile, and the time of a step relative to the time with the present tile.
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
"""Number of decode steps that are timed together."""

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
"""Tiles to try for one sequence, and for several sequences. The defaults are among them."""


class Asked(dict[Case, Tile]):
    """A table of tiles that records which cases were looked up."""

    def __init__(self, table: dict[Case, Tile]) -> None:
        super().__init__(table)
        self.cases: dict[Case, None] = {}

    def get(self, case: Case, default: Any = None) -> Any:
        """Return a tile as a dict does, and record its case."""
        self.cases[case] = None
        return super().get(case, default)


@contextmanager
def using(more: dict[Case, Tile]) -> Iterator[Asked]:
    """Capture decode steps in this context with these tiles."""
    before, asked = tiles.TILES, Asked(tiles.TILES | more)
    tiles.TILES = asked
    try:
        yield asked
    finally:
        tiles.TILES = before


def ratios(
    shape: Shape, g: Geometry, kind: str, batch: int, context: int, rounds: int
) -> dict[Case, dict[Tile, float]]:
    """Return the time of a decode step with each tile of each product, relative to the present
    tiles."""
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
            with using({case: tile}):  # in here, a step may be captured again
                of[case, tile].append(median(one.turn(TOKENS)["device_ms"]) / today)
    found: dict[Case, dict[Tile, float]] = {}
    for (case, tile), each in of.items():
        found.setdefault(case, {})[tile] = median(each)
    return found


def line(case: Case, found: Sequence[dict[Tile, float]]) -> str:
    """Return the best tile of a case over all batches, as a line of `tiles.TILES`."""
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
    """Print a line for each case, and write all ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decoder", choices=SHAPES, default="qwen3-8b", help="shape of the model")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 2, 4, 8], help="batch sizes to find tiles for"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default=PLAIN, help="precision of weights")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens that an index stores; 0: no attention"
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="number of times that each tile is timed"
    )
    parser.add_argument("--json", type=output(), help="file for all ratios")
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

"""Tiles by product: the sizes that `tools/tune_triton.py` found fastest, and a default."""

from __future__ import annotations

from typing import NamedTuple

from triton import next_power_of_2

from kvindex_cuda.triton.operands import Matrix, Tile

MOST_ROWS = 2**16
"""Matrices with more rows are alike: each has more programs than a GPU runs at once."""


class Case(NamedTuple):
    """What a tile is chosen by.

    product: the function's name; rows, columns: the matrix's `N` (at most `MOST_ROWS`) and `K`, up
    to the next power of two; width: bytes of a weight; one: whether one sequence is multiplied.
    """

    product: str
    rows: int
    columns: int
    width: int
    one: bool


TILES: dict[Case, Tile] = {
    Case("norm_linear", 8192, 4096, 2, True): Tile(16, 512, 8, 3),
    Case("linear_residual", 4096, 4096, 2, True): Tile(8, 512, 4, 4),
    Case("norm_linear", 32768, 4096, 2, True): Tile(8, 512, 4, 4),
    Case("swiglu_linear", 4096, 16384, 2, True): Tile(16, 256, 4, 5),
    Case("norm_linear", 65536, 4096, 2, True): Tile(16, 512, 8, 3),
    Case("norm_linear", 8192, 4096, 1, True): Tile(8, 512, 4, 4),
    Case("linear_residual", 4096, 4096, 1, True): Tile(8, 512, 4, 4),
    Case("norm_linear", 32768, 4096, 1, True): Tile(16, 256, 4, 5),
    Case("swiglu_linear", 4096, 16384, 1, True): Tile(8, 512, 4, 4),
}
"""Lines that `tools/tune_triton.py` prints; what is not here takes the default."""


def case_of(product: str, matrix: Matrix, batch: int) -> Case:
    """The case of a product of so many sequences."""
    N, K = matrix.weight.shape
    rows, columns = min(MOST_ROWS, next_power_of_2(N)), next_power_of_2(K)
    return Case(product, rows, columns, matrix.weight.itemsize, batch == 1)


def tile_of(product: str, matrix: Matrix, batch: int, *, overlap: bool = False) -> Tile:
    """The tile of a product (`norm_linear`, `linear_residual`, `swiglu_linear`).

    batch: sequences; overlap: as of `Tile`.
    """
    return TILES.get(case_of(product, matrix, batch), Tile())._replace(overlap=overlap)

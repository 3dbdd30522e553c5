"""Tile sizes for matrix products: measured ones for some products, and a rule for all others."""

from __future__ import annotations

from typing import NamedTuple

from triton import next_power_of_2

from kvindex_cuda.triton.operands import Matrix, Tile

PROGRAMS = 132
"""Fewest Triton programs of a launch, if the matrix has enough rows: the number of multiprocessors
of an H100 or H200."""

MOST_ROWS = 2**16
"""Matrices with more rows use the same tiles, because they have more programs than a GPU runs at
once."""


class Case(NamedTuple):
    """The properties of a matrix product by which its tile sizes are chosen.

    Attributes:
        product: Name of the function in `products.py`.
        rows: `N` of the matrix, rounded up to a power of two, at most `MOST_ROWS`.
        columns: `K` of the matrix, rounded up to a power of two.
        width: Bytes of a weight.
        one: True if there is only one sequence.
    """

    product: str
    rows: int
    columns: int
    width: int
    one: bool


TILES: dict[Case, Tile] = {
    Case("norm_linear", 8192, 4096, 2, True): Tile(16, 256, 4, 3),
    Case("linear_residual", 4096, 4096, 2, True): Tile(8, 512, 4, 4, ahead=3),
    Case("norm_linear", 32768, 4096, 2, True): Tile(4, 1024, 4, 4),
    Case("swiglu_linear", 4096, 16384, 2, True): Tile(16, 512, 8, 3),
    Case("norm_linear", 65536, 4096, 2, True): Tile(8, 512, 4, 4),
    Case("norm_linear", 8192, 4096, 1, True): Tile(8, 512, 4, 4, ahead=1),
    Case("linear_residual", 4096, 4096, 1, True): Tile(4, 1024, 4, 3, ahead=3),
    Case("norm_linear", 32768, 4096, 1, True): Tile(8, 512, 4, 4, ahead=1),
    Case("swiglu_linear", 4096, 16384, 1, True): Tile(8, 512, 4, 4, ahead=3),
    Case("norm_linear", 8192, 4096, 2, False): Tile(32, 256, 4, 4),
    Case("linear_residual", 4096, 4096, 2, False): Tile(16, 1024, 8, 3),
    Case("norm_swiglu", 32768, 4096, 2, False): Tile(32, 256, 4, 4),
    Case("linear_residual", 4096, 16384, 2, False): Tile(16, 1024, 8, 3),
    Case("norm_linear", 65536, 4096, 2, False): Tile(32, 256, 4, 4),
}
"""The fastest tiles, by the time of whole decode steps on an H200 (docs/lab/decode-step.md).

Tiles for bfloat16 and one sequence were measured with an index, first on an H100. Tiles for FP8,
and for four and eight sequences, were measured without attention. Other cases use `usual`."""


def case_of(product: str, matrix: Matrix, batch: int) -> Case:
    """Return the key in `TILES` of a matrix product with the activations of `batch` sequences."""
    N, K = matrix.weight.shape
    rows, columns = min(MOST_ROWS, next_power_of_2(N)), next_power_of_2(K)
    return Case(product, rows, columns, matrix.weight.itemsize, batch == 1)


def usual(matrix: Matrix, batch: int) -> Tile:
    """Return the tile sizes for a matrix product that is not in `TILES`, the table of measured tile
    sizes.

    With several sequences, each multiprocessor should prefetch at least 40 KB, which hides about
    1,000 cycles of memory latency. With 16-bit weights, 32 matrix rows of 1 KiB in three pipeline
    stages do this. A matrix may have too few rows for every multiprocessor to get a program of 32
    rows. Then a program has 16 rows in four stages. Matrices with short rows get narrower tiles.
    """
    if batch == 1:
        return Tile()
    N, K = matrix.weight.shape
    rows, stages = (32, 3) if N > 32 * (PROGRAMS - 1) else (16, 4)
    return Tile(rows, 512, 8, stages) if K > 1024 else Tile(rows, 256, 4, 4)


def tile_of(product: str, matrix: Matrix, batch: int, *, overlap: bool = False) -> Tile:
    """Return the tile sizes for `norm_linear`, `norm_swiglu`, `linear_residual` or `swiglu_linear`.

    batch: number of sequences.
    overlap: see `Tile`.
    """
    found = TILES.get(case_of(product, matrix, batch)) or usual(matrix, batch)
    return found._replace(overlap=overlap)

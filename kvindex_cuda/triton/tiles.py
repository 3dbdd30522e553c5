"""Tiles by product: sizes that were found fastest, and usual ones."""

from __future__ import annotations

from typing import NamedTuple

from triton import next_power_of_2

from kvindex_cuda.triton.operands import Matrix, Tile

PROGRAMS = 132
"""At least, where a matrix has the rows: multiprocessors of an H100 and an H200."""

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
"""Tiles measured by whole decode steps on an H200 (docs/lab/decode-step.md): bfloat16 and one
sequence over an index (first on an H100); FP8, and four and eight sequences, without attention.
Other cases have the usual tile."""


def case_of(product: str, matrix: Matrix, batch: int) -> Case:
    """The case of a product of so many sequences."""
    N, K = matrix.weight.shape
    rows, columns = min(MOST_ROWS, next_power_of_2(N)), next_power_of_2(K)
    return Case(product, rows, columns, matrix.weight.itemsize, batch == 1)


def usual(matrix: Matrix, batch: int) -> Tile:
    """The tile of a product that nobody timed.

    Of several sequences, so that each multiprocessor asks for at least 40 KB ahead, which hide some
    1,000 cycles of a memory's latency: 32 rows, each 1 KiB wide in 16 bits, three stages; 16 and
    four where 32 leave some without a program. Short rows are cut into narrower pieces.
    """
    if batch == 1:
        return Tile()
    N, K = matrix.weight.shape
    rows, stages = (32, 3) if N > 32 * (PROGRAMS - 1) else (16, 4)
    return Tile(rows, 512, 8, stages) if K > 1024 else Tile(rows, 256, 4, 4)


def tile_of(product: str, matrix: Matrix, batch: int, *, overlap: bool = False) -> Tile:
    """The tile of a product (`norm_linear`, `norm_swiglu`, `linear_residual`, `swiglu_linear`).

    batch: sequences; overlap: as of `Tile`.
    """
    found = TILES.get(case_of(product, matrix, batch)) or usual(matrix, batch)
    return found._replace(overlap=overlap)

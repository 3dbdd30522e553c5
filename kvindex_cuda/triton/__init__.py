"""Triton kernels for the layers of a language model.

Most of them process one token of each of 1 to 16 sequences, that is, a decode step. The kernels
`attend_pages`, `rotate_heads` and `swiglu` process several tokens of each sequence.

The module `reference` implements the same functions in plain torch. This package imports `triton`,
which is optional. Therefore it must be imported by its full name, and other parts of `kvindex_cuda`
import it only in the functions that use it.
"""

from kvindex_cuda.triton import reference
from kvindex_cuda.triton.chunk import rotate_heads, swiglu
from kvindex_cuda.triton.ends import begin_token, most_likely
from kvindex_cuda.triton.heads import project_heads
from kvindex_cuda.triton.operands import Matrix, Norm, Tile, stack, to_fp8
from kvindex_cuda.triton.pages import attend_pages
from kvindex_cuda.triton.products import (
    linear_residual,
    norm_linear,
    norm_swiglu,
    swiglu_linear,
)
from kvindex_cuda.triton.tiles import tile_of
from kvindex_cuda.triton.token import attend_token

__all__ = [
    "Matrix",
    "Norm",
    "Tile",
    "attend_pages",
    "attend_token",
    "begin_token",
    "linear_residual",
    "most_likely",
    "norm_linear",
    "norm_swiglu",
    "project_heads",
    "reference",
    "rotate_heads",
    "stack",
    "swiglu",
    "swiglu_linear",
    "tile_of",
    "to_fp8",
]

"""A decoded token goes where a step reads it, in one launch: its key, its value, its queries."""

from __future__ import annotations

from torch import Tensor

from kvindex.near import Near
from kvindex.protocol import Rows
from kvindex_cuda.arguments import CODES, of_shape, of_type
from kvindex_cuda.launch import launch

THREADS = 128
"""As in the kernel's source."""


def hold(
    near: Near, token: Rows, window: Rows, queries: Tensor, asked: Tensor | None = None
) -> None:
    """`near` holds a token more, whose rows are copied to its places in the window, too.

    token: keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`; window: places of that shape, strided;
    queries: `[B, H, D]`, copied to asked, contiguous, if that is given. All of one dtype.
    Raises ValueError for other shapes or dtypes, before anything is held.
    """
    rows, keys = near.rows, _near_by(token.keys)
    B, G, room, wide = rows.shape
    values, D = _near_by(token.values), keys.shape[3]
    to_keys, to_values = window.keys, window.values
    of_type("keys", keys, *CODES)
    for name, tensor, width in (
        *(("keys", keys, D), ("values", values, wide - D)),
        *(("window.keys", window.keys, D), ("window.values", window.values, wide - D)),
    ):
        of_shape(name, of_type(name, tensor, rows.dtype), B, G, 1, width)
    queries = _near_by(queries)
    of_shape("queries", of_type("queries", queries, rows.dtype), B, queries.shape[1], D)
    if len(near) >= room:
        raise ValueError(f"near: got {len(near)} rows, allowed are fewer than its room of {room}")
    launch(
        "hold.cu",
        "hold",
        (G, B),
        (THREADS,),
        *(keys, keys.stride(0), keys.stride(1), values, values.stride(0), values.stride(1)),
        *(to_keys, to_keys.stride(0), to_keys.stride(1)),
        *(to_values, to_values.stride(0), to_values.stride(1)),
        *(rows, near.held, room, near.claim(1)),
        *(queries, queries.stride(0), queries.stride(1), asked),
        D=D,
        DV=wide - D,
        DTYPE=CODES[rows.dtype],
        GROUP=queries.shape[1] // G,
    )


def _near_by(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose last dimension has no gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

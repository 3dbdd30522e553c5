"""A decoded token goes where a step reads it, in one launch: its key, its value, its queries."""

from __future__ import annotations

from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex_cuda.runtime.arguments import CODES, of_shape, of_type
from kvindex_cuda.runtime.launch import launch

THREADS = 128
"""As in the kernel's source."""

NAMES = "keys", "values", "window.keys", "window.values", "queries"


def stage_token(
    resident: ResidentRows, token: Rows, window: Rows, queries: Tensor, asked: Tensor | None = None
) -> None:
    """`resident` holds a token more, whose rows are copied to its places in the window, too.

    token: keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`; window: places of that shape, strided;
    queries: `[B, H, D]`, copied to asked, contiguous, if that is given. All of one dtype.
    Raises ValueError for other shapes or dtypes, before anything is held.
    """
    rows, keys, values = resident.rows, _near_by(token.keys), _near_by(token.values)
    queries, to_keys, to_values = _near_by(queries), window.keys, window.values
    (B, G, room, wide), D, H = rows.shape, keys.shape[-1], queries.shape[1]
    given = keys, values, to_keys, to_values, queries
    key, value = (B, G, 1, D), (B, G, 1, wide - D)
    shapes = key, value, key, value, (B, H, D)
    for name, tensor, shape in zip(NAMES, given, shapes, strict=True):
        if tensor.dtype is not rows.dtype or tensor.shape != shape:
            of_shape(name, of_type(name, tensor, rows.dtype), *shape)
    if len(resident) >= room:
        raise ValueError(
            f"resident: got {len(resident)} rows, allowed are fewer than its room of {room}"
        )
    steps: list[int] = []
    for tensor in given:
        steps += tensor.stride()[:2]
    launch(
        "step/stage_token.cu",
        "stage_token",
        (G, B),
        (THREADS,),
        *(keys, values, to_keys, to_values, rows, resident.count, queries, asked),
        *(*steps, room, resident.claim(1)),
        D=D,
        DV=wide - D,
        DTYPE=CODES[rows.dtype],
        GROUP=H // G,
    )


def _near_by(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it whose last dimension has no gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

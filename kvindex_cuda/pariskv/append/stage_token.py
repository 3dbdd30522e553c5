"""Copy the key, value and queries of a token to the buffers that a decode step reads, in one
launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex_cuda.runtime.arguments import CODES, of_shape, of_type
from kvindex_cuda.runtime.constants import STAGE_THREADS
from kvindex_cuda.runtime.launch import launch, load

NAMES = "keys", "values", "window.keys", "window.values", "queries"


def stage_token(
    resident: ResidentRows,
    token: Rows,
    window: Rows | None,
    queries: Tensor,
    graph_queries: Tensor | None = None,
    *,
    ticket: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Copy a token's key and value to two places: the end of the resident rows (sink and window),
    and the window's own tensors. Optionally copy its queries to the input of a CUDA graph.

    All tensors have the same dtype. If an error is raised, nothing is written.

    Args:
        resident: The resident rows.
        token: Keys `[B, G, 1, D]` and values `[B, G, 1, Dv]`.
        window: Views of the window's tensors at the token's position, with the shapes of `token`
            and any strides, or None.
        queries: `[B, H, D]`.
        graph_queries: Contiguous tensor to which the queries are copied, or None.
        ticket: A counter for the kernel, int32 `[1]`, 0 between launches. With a ticket, the kernel
            reads the token's place from `resident.count` when it runs, and the caller updates the
            host's count. Resident rows with a count per sequence need a ticket. Without a ticket,
            this function takes the next place and updates the host's count itself.
        counts: Int64 `[B·T]`, on the device, or None. If given, there are `T` new tokens of each
            sequence, and the first dimension of all parts is `B·T`: all tokens of the first
            sequence, then those of the second, and so on. The tokens of a sequence are written
            after each other, and `counts` becomes the number of resident rows up to each token.
            This needs a ticket, and no `window` and `graph_queries`.

    Raises:
        ValueError: Shapes or dtypes do not fit, or there is no room for the token.
    """
    rows, keys, values = resident.rows, _near_by(token.keys), _near_by(token.values)
    queries, places = _near_by(queries), token if window is None else window
    to_keys, to_values = places.keys, places.values
    (B, G, room, wide), D, H, consecutive = rows.shape, keys.shape[-1], queries.shape[1], 1
    if counts is not None:
        tokens = len(of_type("counts", counts, torch.int64))
        if ticket is None or resident.ragged:
            raise ValueError("counts: got a tensor, allowed with a ticket and equal lengths")
        if not tokens or tokens % B:
            raise ValueError(f"counts: got {tokens} tokens, allowed is a multiple of {B} sequences")
        B, consecutive = tokens, tokens // B
    given = keys, values, to_keys, to_values, queries
    key, value = (B, G, 1, D), (B, G, 1, wide - D)
    shapes = key, value, key, value, (B, H, D)
    for name, tensor, shape in zip(NAMES, given, shapes, strict=True):
        if tensor.dtype is not rows.dtype or tensor.shape != shape:
            of_shape(name, of_type(name, tensor, rows.dtype), *shape)
    if ticket is not None:
        of_shape("ticket", of_type("ticket", ticket, torch.int32), 1)
    elif resident.ragged:
        raise ValueError(
            "ticket: got None, allowed is an int32 tensor [1], because sequences of this batch can "
            "have different numbers of tokens in sink and window"
        )
    elif len(resident) >= room:
        raise ValueError(
            f"resident: got {len(resident)} rows, allowed is less than {room}, because the buffer "
            f"has room for {room} rows and the new token needs one"
        )
    launch(
        "step/stage_token.cu",
        "stage_token",
        (G, B),
        (STAGE_THREADS,),
        arguments=dict(
            keys=keys,
            values=values,
            window_keys=None if window is None else to_keys,
            window_values=None if window is None else to_values,
            resident=rows,
            resident_count=resident.count,
            counts=counts,
            ticket=ticket,
            queries=queries,
            graph_queries=graph_queries,
            keys_batch=keys.stride(0),
            keys_head=keys.stride(1),
            values_batch=values.stride(0),
            values_head=values.stride(1),
            window_keys_batch=to_keys.stride(0),
            window_keys_head=to_keys.stride(1),
            window_values_batch=to_values.stride(0),
            window_values_head=to_values.stride(1),
            queries_batch=queries.stride(0),
            queries_head=queries.stride(1),
            room=room,
            place=resident.claim(1) if ticket is None else 0,
            ragged=int(resident.ragged),
            consecutive=consecutive,
        ),
        overlap=True,
        **_defines(D, wide - D, rows.dtype, H // G),
    )


def token_to_stage(g: Geometry, resident: ResidentRows, token: Rows) -> Rows:
    """Return contiguous copies of a token's key and value, for a step whose first kernel appends
    them (`State.token`). Contiguous tensors are returned unchanged.

    Raises ValueError unless the shapes are `[B, G, 1, D]` and `[B, G, 1, Dv]` and the dtypes are
    those of the layer.
    """
    parts = dict(keys=(token.keys, g.head_dim), values=(token.values, g.value_dim))
    for name, (part, size) in parts.items():
        of_shape(name, of_type(name, part, g.dtype), len(resident.rows), g.kv_heads, 1, size)
    return Rows(token.keys.contiguous(), token.values.contiguous())


def load_stage_token(g: Geometry) -> None:
    """Compile `stage_token` and load it on the device, so that a CUDA graph can capture its first
    launch."""
    defines = _defines(g.head_dim, g.value_dim, g.dtype, g.group_size)
    load("step/stage_token.cu", "stage_token", g.device, **defines)


def _defines(D: int, Dv: int, dtype: torch.dtype, group: int) -> dict[str, int]:
    return dict(D=D, DV=Dv, DTYPE=CODES[dtype], GROUP=group)


def _near_by(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

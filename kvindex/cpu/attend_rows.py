"""Compute attention over selected rows and over the rows of sink and window, with one kernel.

The rows of sink and window are called resident rows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.resident import ResidentRows
from kvindex.cpu import threads
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.numbers import KINDS
from kvindex.cpu.kernels.step import attend_groups
from kvindex.cpu.kernels.vectors import FOUR
from kvindex.cpu.state import ResidentState

Arguments: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Arguments of the kernel `attend_groups` from `queries` on, before and after `count`."""


def arguments(
    geometry: Geometry,
    rows: np.ndarray,
    row_bytes: int,
    parts: int,
    queries: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray | None,
    most: int,
    resident_state: ResidentState,
) -> Arguments:
    """Return the arguments of the kernel `attend_groups`, except `count` and the results.

    Some arguments are buffers. They belong to the thread that calls this function. A group is one
    KV head of one sequence.

    Args:
        geometry: Sizes of heads and vectors.
        rows: Addresses of each group's rows, int64 `[B·G]`.
        row_bytes: Bytes of a row.
        parts: Number of parts into which the groups are divided, one part per thread.
        queries: Float32 `[B·G, g, D]`.
        ids: Int64 `[B·G, K]`.
        weights: Log weights, float32 `[B·G, g, K]`, or None.
        most: Largest number of rows in sink and window.
        resident_state: Addresses of the rows in sink and window.
    """
    g, array, (groups, heads, _) = geometry, BUFFERS.array, queries.shape
    if weights is None:
        weights = array("none", np.float32, groups, heads, 0)
    R = ids.shape[1] + most
    fours = -(-R // FOUR) * FOUR
    others_read = 1 if g.dtype == torch.float32 else R + 1
    room = (
        array("addresses", np.int64, parts, R),
        array("places", np.int64, parts, fours),
        array("keys", np.float32, parts, others_read, g.head_dim),
        array("values", np.float32, parts, others_read, g.value_dim),
        array("logits", np.float32, parts, heads * fours),
    )
    resident = resident_state.rows, resident_state.row_bytes, resident_state.mask
    value_bytes = g.value_start * g.dtype.itemsize  # the same for resident rows
    policy = KINDS[g.dtype], value_bytes, g.scale, g.softcap or 0.0
    return (queries, ids, rows, row_bytes, weights, *resident), (*policy, *room)


def attending(
    geometry: Geometry,
    rows: np.ndarray,
    row_bytes: int,
    most: int,
    queries: np.ndarray,
    ids: np.ndarray,
    log_weight: Tensor | None,
    resident: ResidentRows,
    resident_state: ResidentState,
) -> tuple[np.ndarray, np.ndarray, threads.Part]:
    """Prepare attention: allocate the output, and return a function that computes it.

    A group is one KV head of one sequence with its query heads. There are `B·G` groups. Each thread
    calls the returned function for some of the groups (`threads.run`).

    Args:
        geometry: Sizes of heads and vectors.
        rows: Address of each group's first row, int64 `[B·G]`.
        row_bytes: Bytes of a row.
        most: Largest number of threads among which the groups are divided.
        queries: Float32 `[B·G, g, D]`.
        ids: Token ids of the selected rows, int64 `[B·G, K]`; negative ids are unused.
        log_weight: Log weights of the selected rows, float32 `[B, H, K]`, or None if all are zero.
        resident: Rows in the sink and the window.
        resident_state: Addresses of `resident`.

    Returns:
        Output float32 `[B·G, g, Dv]`, log-sum-exp float32 `[B·G, g]`, and the function that writes
        both.
    """
    g, (groups, heads, _), K = geometry, queries.shape, ids.shape[1]
    weights = None
    if log_weight is not None:
        weights = log_weight.contiguous().view(groups, heads, K).numpy()
    count, parts = len(resident), threads.parts_of(most)
    asked = queries, ids, weights, count, resident_state
    before, after = arguments(g, rows, row_bytes, parts, *asked)
    output = np.empty((groups, heads, g.value_dim), np.float32)
    lse = np.empty((groups, heads), np.float32)

    def part(i: int, parts: int) -> None:
        attend_groups(i, parts, *before, count, *after, output, lse)

    return output, lse, part

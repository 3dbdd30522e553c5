"""Attend to selected rows and to resident rows (sink and local window), with one kernel."""

from __future__ import annotations

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
    g, array, count = geometry, BUFFERS.array, len(resident)
    (groups, heads, _), K = queries.shape, ids.shape[1]
    weights = array("none", np.float32, groups, heads, 0)
    if log_weight is not None:
        weights = log_weight.contiguous().view(groups, heads, K).numpy()
    stored = rows, row_bytes, weights
    others = resident_state.rows, resident_state.row_bytes, resident_state.mask, count
    R, parts = K + count, threads.parts_of(most)
    fours = -(-R // FOUR) * FOUR
    others_read = 1 if g.dtype == torch.float32 else R + 1
    room = (
        array("addresses", np.int64, parts, R),
        array("places", np.int64, parts, fours),
        array("keys", np.float32, parts, others_read, g.head_dim),
        array("values", np.float32, parts, others_read, g.value_dim),
        array("logits", np.float32, parts, heads, fours),
    )
    room[2][:, -1], room[3][:, -1] = 0, 0
    value_bytes = g.value_start * g.dtype.itemsize  # the same for resident rows
    output = np.empty((groups, heads, g.value_dim), np.float32)
    lse = np.empty((groups, heads), np.float32)

    def part(i: int, parts: int) -> None:
        policy = KINDS[g.dtype], value_bytes, g.scale, g.softcap or 0.0
        attend_groups(i, parts, queries, ids, *stored, *others, *policy, *room, output, lse)

    return output, lse, part

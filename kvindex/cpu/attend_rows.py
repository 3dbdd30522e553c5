"""Attention to rows of ids and to resident ones, where they lie: room for it, and the kernel."""

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
    """Room for output float32 `[B·G, g, Dv]` and lse `[B·G, g]`, and what writes them, a part
    of the groups at a time.

    rows: addresses of each group's, int64 `[B·G]`, of `row_bytes` each; most: parts at most;
    queries: float32 `[B·G, g, D]`; ids: int64 `[B·G, K]`; log_weight: float32 `[B, H, K]`, or None;
    beside: of `resident`.
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
    value_bytes = g.value_start * g.dtype.itemsize  # of a resident row, too: it has the key whole
    output = np.empty((groups, heads, g.value_dim), np.float32)
    lse = np.empty((groups, heads), np.float32)

    def part(i: int, parts: int) -> None:
        policy = KINDS[g.dtype], value_bytes, g.scale, g.softcap or 0.0
        attend_groups(i, parts, queries, ids, *stored, *others, *policy, *room, output, lse)

    return output, lse, part

"""Fetch: gather full-precision rows by id.

Source: ParisKV, section B.3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows of a table by id.

    Args:
        table: `[B, G, N, ...]`.
        ids: Int64 `[B, G, K]`, below `N`; a negative id gives zeros.

    Returns:
        `[B, G, K, ...]`, a copy.
    """
    B, G, _ = ids.shape
    batch = torch.arange(B, device=ids.device)[:, None, None]
    head = torch.arange(G, device=ids.device)[:, None]
    rows = table[batch, head, ids.clamp_min(0)]
    unused = (ids < 0).reshape(*ids.shape, *[1] * (table.ndim - 3))
    return rows.masked_fill_(unused, 0)  # indexing has made a copy

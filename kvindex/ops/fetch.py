"""Fetch: gather the keys and values of selected tokens.

Source: ParisKV, section B.3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather the rows of a tensor by token id.

    Args:
        table: Tensor such as keys, `[B, G, N, ...]`.
        ids: Int64 `[B, G, K]`, below `N`. A negative id gives a row of zeros.

    Returns:
        A copy of the rows, `[B, G, K, ...]`.
    """
    B, G, _ = ids.shape
    batch = torch.arange(B, device=ids.device)[:, None, None]
    head = torch.arange(G, device=ids.device)[:, None]
    rows = table[batch, head, ids.clamp_min(0)]
    unused = (ids < 0).reshape(*ids.shape, *[1] * (table.ndim - 3))
    return rows.masked_fill_(unused, 0)  # in place, because indexing has made a copy

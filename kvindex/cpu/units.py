"""Select the rows of the best units, which are clusters, segments or pages.

This is the compiled version of `kvindex.ops.units`.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from kvindex.core.protocol import Hits
from kvindex.cpu import views
from kvindex.cpu.kernels import units
from kvindex.cpu.state import addresses
from kvindex.ops import units as reference
from kvindex.ops.units import at, ranked, rows_at

__all__ = ["at", "best_rows", "ranked", "rows_at", "walk"]


def best_rows(
    scores: Tensor,
    starts: Tensor,
    sizes: Tensor,
    members: Tensor,
    k: int,
    singles: Tensor | None = None,
) -> Hits:
    """Return `k` rows of the best units, such as clusters.

    This is the compiled version of `ops.units.best_rows`.
    """
    if scores.dtype != torch.float32 or not views.on_cpu(scores, members):
        return reference.best_rows(scores, starts, sizes, members, k, singles)
    (B, G, U), S = scores.shape, starts.shape[-1]
    tokens = members if members.stride(-1) == 1 else members.contiguous()
    ids, best = np.empty((B, G, k), np.int64), np.empty((B, G, k), np.float32)
    single_ids = np.empty((B * G, 0), np.int64)
    if singles is not None:
        single_ids = views.array(singles[:, None].expand(B, G, -1), B * G, U - S)
    of = views.array(starts.long(), B * G, S), views.array(sizes.long(), B * G, U)
    read = addresses(tokens), tokens.element_size()
    found = ids.reshape(B * G, k), best.reshape(B * G, k)
    units.best_rows(views.array(scores, B * G, U), *of, *read, single_ids, *found)
    return Hits(torch.from_numpy(ids), torch.from_numpy(best))


def walk(sizes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the unit, such as a cluster, to which each row belongs.

    This is the compiled version of `ops.units.walk`.
    """
    if not views.on_cpu(sizes):
        return reference.walk(sizes, k)
    outer = sizes.shape[:-1]
    unit, offset = (np.empty((prod(outer), k), np.int64) for _ in range(2))
    units.walk(views.array(sizes.long(), len(unit), sizes.shape[-1]), unit, offset)
    return torch.from_numpy(unit).view(*outer, k), torch.from_numpy(offset).view(*outer, k)

"""Convert the rows that a decode step has selected to `Hits`, sorted by score."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED, Hits
from kvindex_cuda.pariskv.steps.base import BaseStep

LAST = torch.iinfo(torch.int64).min


def ordered_hits(step: BaseStep, places: Tensor) -> Hits:
    """Return the rows that a step has selected, by descending score. Rows with equal scores are
    sorted by ascending id.

    Args:
        step: The decode step.
        places: The integers from 0 to `k - 1`, `[k]`, on the device.
    """
    bits = (step.scores + 0.0).view(torch.int32)  # sort by one integer: score, then id
    order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | (0xFFFFFFFF - step.ids)
    order.masked_fill_(places >= step.found[:, None], LAST)
    order, at = order.sort(dim=-1, descending=True)
    unused = order == LAST
    ids = (0xFFFFFFFF - (order & 0xFFFFFFFF)).masked_fill_(unused, UNUSED)
    scores = step.scores.gather(-1, at).masked_fill_(unused, float("-inf"))
    shape = (step.batch, step.geometry.kv_heads, step.k)
    ids, scores = ids.view(shape), scores.view(shape)
    if step.weights is None:
        return Hits(ids, scores)
    weights = step.weights.gather(-1, at).masked_fill_(unused, float("-inf")).view(shape)
    return Hits(ids, scores, weights.repeat_interleave(step.geometry.group_size, dim=1))

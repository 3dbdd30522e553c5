"""Combine the scores that the query heads of a KV head give to a row into one score.

This is the compiled version of `kvindex.ops.group`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvindex.cpu import threads, views
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels import groups
from kvindex.ops import group as reference
from kvindex.ops.group import POLICIES, combine, fold

__all__ = ["POLICIES", "agree", "combine", "fold"]

COMPILED = "mean_share", "max_share"


def agree(
    estimates: Tensor,
    policy: str,
    *,
    scale: float,
    softcap: float | None,
    sizes: Tensor | None = None,
) -> Tensor:
    """Compute one score of each row for all query heads that share a KV head.

    This is the compiled version of `ops.group.agree`.
    """
    B, G, heads, C = estimates.shape
    plain = estimates.dtype == torch.float32 and views.on_cpu(estimates)
    if heads == 1 or C == 0 or policy not in COMPILED or not plain:
        return reference.agree(estimates, policy, scale=scale, softcap=softcap, sizes=sizes)
    some = views.array(estimates, B * G, heads, C)
    of = np.empty((B * G, 0), np.int64)
    if sizes is not None:
        of = views.array(sizes.long(), B * G, C)
    parts = threads.parts_of(views.parts(some.size, B * G))
    log_weights = BUFFERS.array("log weights", np.float32, parts, heads, C)
    agreed = np.empty((B * G, C), np.float32)

    def part(i: int, parts: int) -> None:
        policies = scale, softcap or 0.0, policy == "max_share"
        groups.agree(i, parts, some, of, *policies, log_weights, agreed)

    threads.run(part, parts)
    return torch.from_numpy(agreed).view(B, G, C)

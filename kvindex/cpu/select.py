"""Compiled version of `kvindex.ops.select`: select the keys or rows with the largest scores.

Of equal scores, the one with the lower id is selected.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from kvindex.cpu import threads, views
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels import top
from kvindex.cpu.kernels.select import SAMPLED
from kvindex.ops import select as reference


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest scores and their positions.

    This is the compiled version of `ops.select.top_k`.
    """
    if scores.dtype != torch.float32 or not views.on_cpu(scores):
        return reference.top_k(scores, k)
    outer = scores.shape[:-1]
    best, positions = np.empty((*outer, k), np.float32), np.empty((*outer, k), np.int64)
    rows = prod(outer)
    some = views.array(scores, rows, scores.shape[-1])
    top.top_rows(some, best.reshape(rows, k), positions.reshape(rows, k))
    return torch.from_numpy(best), torch.from_numpy(positions)


def candidates(votes: Tensor, limits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Select the keys with the largest coarse scores (votes) as candidates.

    This is the compiled version of `ops.select.candidates`.
    """
    if votes.dtype != torch.int32 or not views.on_cpu(votes):
        return reference.candidates(votes, limits, valid)
    B, G, g, n = votes.shape
    most, parts = int(limits.max()), threads.parts_of(views.parts(votes.numel(), B * G))
    flags = np.empty((B * G, n), np.bool_)
    some = views.array(votes, B * G, g, n)
    asked = views.array(limits.repeat_interleave(G), B * G)
    real = np.empty((B * G, 0), np.bool_)
    if valid is not None:
        real = views.array(valid[:, None].expand(B, G, n), B * G, n)
    room = (
        BUFFERS.array("votes of a head", np.int32, parts, n),
        BUFFERS.array("listed", np.int32, parts, n + 2 * SAMPLED),
        BUFFERS.array("numbers", np.int32, parts, n + 2 * SAMPLED),
        BUFFERS.array("chosen", np.int32, parts, most + 1),
    )

    def part(i: int, parts: int) -> None:
        top.flag_candidates(i, parts, some, asked, real, *room, flags)

    threads.run(part, parts)
    return compact(torch.from_numpy(flags).view(B, G, n))


def compact(chosen: Tensor) -> Tensor:
    """List the positions of the True elements of a mask.

    This is the compiled version of `ops.select.compact`.
    """
    if not views.on_cpu(chosen):
        return reference.compact(chosen)
    outer = chosen.shape[:-1]
    flags = views.array(chosen, prod(outer), chosen.shape[-1])
    ids = np.empty((len(flags), top.count_flags(flags)), np.int64)
    top.list_flags(flags, ids)
    return torch.from_numpy(ids).view(*outer, ids.shape[1])

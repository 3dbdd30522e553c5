"""Steps along a text: divergence from full attention, rows, bytes, time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvindex_adapters.evaluate.compare.answers import Steps
from kvindex_adapters.evaluate.compare.memory import forget_peak, peak
from kvindex_adapters.evaluate.compare.replay import FullAttention, Indexed
from kvindex_adapters.evaluate.fidelity import BLOCK

TIMED, UNTIMED = 12, 4
"""Steps whose time counts, and those before them: buffers are made, kernels compiled."""


@dataclass(frozen=True)
class Steady:
    """What a step costs that comes alone.

    step_s: seconds, median; rows_read, rows_full: rows per KV head that it attends to, and that
    full attention would read; step_bytes: copied out of the stores, all layers; nbytes: of the
    cache, by tier; peak_bytes: of the process, most in use.
    """

    step_s: float
    rows_read: float
    rows_full: float
    step_bytes: float
    nbytes: dict[str, int]
    peak_bytes: dict[str, int]


def dense_cost(full: FullAttention, ids: Tensor) -> Steady:
    """What a step of full attention costs along ids int64 `[T]`."""
    before = full.checkpoint()
    forget_peak()
    step_s = _timed(full, ids)
    rows, nbytes = float(full.cache.get_seq_length()), full.nbytes()
    full.rollback(before)
    return Steady(step_s, rows, rows, nbytes, {"rows": nbytes}, peak())


def cost(indexed: Indexed, ids: Tensor, *, k: int) -> Steady:
    """What a step through an index costs along ids int64 `[T]`; it stays as it is."""
    with indexed.branch(k):
        forget_peak()
        step_s, report = _timed(indexed, ids), indexed.cache.report()
        return Steady(
            step_s=step_s,
            rows_read=report.rows_read,
            rows_full=report.rows_full,
            step_bytes=report.bytes_fetched / max(report.steps, 1),
            nbytes=report.nbytes,
            peak_bytes=peak(),
        )


def dense_logits(full: FullAttention, ids: Tensor) -> Tensor:
    """Full attention's logits `[T, V]` after each of ids int64 `[T]`; it stays as it is."""
    before = full.checkpoint()
    logits = torch.cat([full.step(block) for block in torch.split(ids, BLOCK)])
    full.rollback(before)
    return logits


def divergence(indexed: Indexed, ids: Tensor, full: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """KL divergence from full attention after each of ids int64 `[T]`, and whether tokens agree.

    full: logits `[T, V]`. Gives nats, float64 `[T]`, and bool `[T]`: whether the most likely token
    is the same. The index stays as it is.
    """
    found = []
    with indexed.branch(k):
        indexed.begin()
        size = BLOCK if indexed.parallel else 1
        for block, want in zip(torch.split(ids, size), torch.split(full, size), strict=True):
            found.append(_differ(want, indexed.step(block)))
    kl, same = zip(*found, strict=True)
    return torch.cat(kl), torch.cat(same)


def _differ(full: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return kl.cpu(), (full.argmax(-1) == other.argmax(-1)).cpu()


def _timed(steps: Steps, ids: Tensor) -> float:
    """Seconds of a step that comes alone, median."""
    times = []
    for token in ids[: UNTIMED + TIMED, None]:
        start = time.perf_counter()
        steps.step(token)
        if token.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[UNTIMED:] or times)

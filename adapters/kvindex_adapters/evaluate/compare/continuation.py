"""Measure steps along a text: divergence from full attention, rows, bytes, time and memory."""

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
"""TIMED: steps that are timed. UNTIMED: steps before these, which allocate buffers and compile
kernels."""


@dataclass(frozen=True)
class Steady:
    """The cost of one decode step that does not run in parallel with others.

    Args:
        step_s: Seconds, the median.
        rows_read: Rows per KV head that the step attends to.
        rows_full: Rows per KV head that full attention would read.
        step_bytes: Bytes copied out of the stores of all layers.
        nbytes: Bytes of the cache, by memory tier.
        peak_bytes: Peak memory of the process.
    """

    step_s: float
    rows_read: float
    rows_full: float
    step_bytes: float
    nbytes: dict[str, int]
    peak_bytes: dict[str, int]


def dense_cost(full: FullAttention, ids: Tensor) -> Steady:
    """Measure the cost of steps with full attention that read ids int64 `[T]`."""
    before = full.checkpoint()
    forget_peak()
    step_s = _timed(full, ids)
    rows, nbytes = float(full.cache.get_seq_length()), full.nbytes()
    full.rollback(before)
    return Steady(step_s, rows, rows, nbytes, {"rows": nbytes}, peak())


def cost(indexed: Indexed, ids: Tensor, *, k: int) -> Steady:
    """Measure the cost of steps with an index that read ids int64 `[T]`, and restore the index."""
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
    """Return full attention's logits `[T, V]` after each of ids int64 `[T]`. The cache is
    restored."""
    before = full.checkpoint()
    logits = torch.cat([full.step(block) for block in torch.split(ids, BLOCK)])
    full.rollback(before)
    return logits


def divergence(indexed: Indexed, ids: Tensor, full: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Compare the predictions of an index with full attention's after each of ids int64 `[T]`.

    The index is restored afterwards.

    Args:
        indexed: The model with the index.
        ids: Int64 `[T]`.
        full: Full attention's logits `[T, V]`.
        k: Rows to retrieve.

    Returns:
        KL divergence in nats, float64 `[T]`, and bool `[T]`, True if the most likely token is the
        same.
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
    """Return the median time in seconds of steps that run one by one."""
    times = []
    for token in ids[: UNTIMED + TIMED, None]:
        start = time.perf_counter()
        steps.step(token)
        if token.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[UNTIMED:] or times)

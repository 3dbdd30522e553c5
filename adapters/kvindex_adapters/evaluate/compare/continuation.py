"""Measure decode steps that read a given text, with full attention and with an index.

The results are the KL divergence from full attention, recall, the number of keys and values that a
step reads, time, and memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer
from kvindex.layer.retrieval import row_bytes
from kvindex.wrappers.base import Wrapper
from kvindex_adapters.evaluate.compare.answers import Steps
from kvindex_adapters.evaluate.compare.found import Found, watched
from kvindex_adapters.evaluate.compare.memory import forget_peak, peak
from kvindex_adapters.evaluate.compare.replay import FullAttention, Indexed
from kvindex_adapters.evaluate.fidelity import BLOCK
from kvindex_adapters.hf.cache.report import RowsFound

TIMED, UNTIMED = 12, 4
"""Numbers of decode steps. `TIMED` steps are timed.

`UNTIMED` steps run before them, in which buffers are allocated and kernels are compiled.
"""


@dataclass(frozen=True)
class Steady:
    """The cost of one decode step, measured while steps run one after another.

    Args:
        step_s: Median time of a step in seconds.
        rows_read: Number of tokens per KV head whose keys and values a step reads.
        rows_full: Number of tokens per KV head that full attention would read.
        rows_found: How many of the tokens in `rows_read` the index has retrieved.
        step_bytes: Bytes of keys and values that a step copies from memory, in all layers.
        nbytes: Bytes of the KV cache, by memory tier.
        peak_bytes: Peak memory of the process in bytes, by "host" and "device".
        key_bytes: Bytes of codes and learned parameters that the index stores per token and KV
            head, mean over layers. None for full attention, or if the index does not report them.
    """

    step_s: float
    rows_read: float
    rows_full: float
    rows_found: float
    step_bytes: float
    nbytes: dict[str, int]
    peak_bytes: dict[str, int]
    key_bytes: float | None = None


def dense_cost(full: FullAttention, ids: Tensor) -> Steady:
    """Measure time and memory of decode steps with full attention.

    Each step reads one token of `ids`, int64 `[T]`. The KV cache is restored afterwards.
    """
    before = full.checkpoint()
    forget_peak()
    step_s = _timed(full, ids)
    rows, nbytes = float(full.cache.get_seq_length()), full.nbytes()
    full.rollback(before)
    return Steady(step_s, rows, rows, 0.0, nbytes, {"rows": nbytes}, peak())


def cost(indexed: Indexed, ids: Tensor, *, k: int | str) -> Steady:
    """Measure time and memory of decode steps with an index.

    Each step reads one token of `ids`, int64 `[T]`, and retrieves `k` tokens per KV head. The index
    is restored afterwards.
    """
    with indexed.branch(k):
        forget_peak()
        step_s, report = _timed(indexed, ids), indexed.cache.report()
        return Steady(
            step_s=step_s,
            rows_read=report.rows_read,
            rows_full=report.rows_full,
            rows_found=fmean(map(_rows_found, indexed.layers)),
            step_bytes=report.bytes_fetched / max(report.steps, 1),
            nbytes=report.nbytes,
            peak_bytes=peak(),
            key_bytes=_key_bytes([layer.index for layer in indexed.layers]),
        )


def dense_logits(full: FullAttention, ids: Tensor) -> Tensor:
    """Return the logits of full attention, `[T, V]`, after each token of ids int64 `[T]`.

    The KV cache is restored afterwards.
    """
    before = full.checkpoint()
    logits = torch.cat([full.step(block) for block in torch.split(ids, BLOCK)])
    full.rollback(before)
    return logits


def divergence(
    indexed: Indexed, ids: Tensor, full: Tensor, *, k: int | str
) -> tuple[Tensor, Tensor, Found, RowsFound | None]:
    """Compare the predictions of a model with an index and with full attention on a text.

    The index is restored afterwards.

    Args:
        indexed: The model with the index.
        ids: Token ids of the text, int64 `[T]`.
        full: Logits of full attention after each token, `[T, V]`.
        k: Number of tokens to retrieve per KV head in each step, or "auto".

    Returns:
        Four results: the KL divergence of the prediction with the index from that of full
        attention, in nats, float64 `[T]`; bool `[T]`, True where the two predictions have the same
        most likely token; the recall and coverage of the searches; and how many tokens they have
        found, if `k` is "auto".
    """
    with indexed.branch(k), watched(indexed.layers) as found:
        kl, same = _predictions(indexed, ids, full)
        rows = indexed.cache.report().rows_found
    return kl, same, found, rows


def predictions(indexed: Indexed, ids: Tensor, full: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Compare predictions as `divergence` does, without measuring searches.

    The arguments are those of `divergence`, and the results are its first two.
    """
    with indexed.branch(k):
        return _predictions(indexed, ids, full)


def _predictions(indexed: Indexed, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    parts = []
    indexed.begin()
    size = BLOCK if indexed.parallel else 1
    for block, want in zip(torch.split(ids, size), torch.split(full, size), strict=True):
        parts.append(_differ(want, indexed.step(block)))
    kl, same = zip(*parts, strict=True)
    return torch.cat(kl), torch.cat(same)


def _differ(full: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return kl.cpu(), (full.argmax(-1) == other.argmax(-1)).cpu()


def _rows_found(layer: AttentionLayer) -> float:
    """Return the mean number of rows per KV head that the searches of a layer have retrieved."""
    traffic, index = layer.traffic, layer.index
    size = row_bytes(index) * index.geometry.kv_heads * max(traffic.steps, 1)
    return float(traffic.bytes_fetched) / size


def _key_bytes(indexes: Sequence[KVIndex]) -> float | None:
    """Return the mean of the bytes that indexes store per token and KV head, without keys and
    values, or None if an index is empty or does not report these bytes."""
    found = sizes(indexes)
    return fmean(one["stored"] for one in found) if found else None


def sizes(indexes: Sequence[KVIndex]) -> list[dict[str, float]]:
    """Return `bytes_per_key` of the indexes inside all wrappers.

    Return [] if an index is empty or does not report these bytes.
    """
    found = []
    for index in indexes:
        while isinstance(index, Wrapper):
            index = index.inner
        if not isinstance(index, BaseIndex) or not len(index):
            return []
        found.append(index.bytes_per_key())
    return found


def _timed(steps: Steps, ids: Tensor) -> float:
    """Run up to `UNTIMED + TIMED` decode steps one after another.

    Return their median time in seconds, without the first `UNTIMED` steps.
    """
    times = []
    for token in ids[: UNTIMED + TIMED, None]:
        start = time.perf_counter()
        steps.step(token)
        if token.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[UNTIMED:] or times)

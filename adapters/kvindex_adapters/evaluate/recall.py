"""Measure recall and coverage of an index on queries and keys that a model computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex import BaseIndex, KVIndex
from kvindex.core.capability import required
from kvindex.core.protocol import ExpandsBatch
from kvindex.ops.select import top_k
from kvindex_adapters.evaluate.capture import Captured

SINK = 64
"""Number of tokens at the beginning of a text that are left out, because attention always reads
them without a search."""

TOKENS = 4096
"""Number of tokens in the index whose bytes per key are measured.

Memory that does not grow with the number of tokens is divided by this number.
"""


@dataclass(frozen=True)
class Recall:
    """Recall and coverage of each layer and query head, as means over queries, float64 `[L, H]`.

    Args:
        recall: Fraction of the `k` tokens with the largest `q·k` that the index retrieved.
        coverage: Sum of the attention weights of the retrieved tokens. The weights of all tokens in
            the index add up to 1.
        coverage_true: Sum of the attention weights of the `k` tokens with the largest `q·k`.
    """

    recall: Tensor
    coverage: Tensor
    coverage_true: Tensor


def measure(
    layers: Sequence[Captured], index: str, *, k: int, prompt: int, first: int | None = None
) -> Recall:
    """Measure recall and coverage of an index on the captured keys of a prompt.

    Each query head searches separately, as if it had its own KV head. The first `SINK` tokens are
    not in the index. The queries are those of tokens after the prompt.

    Args:
        layers: Captured queries, keys and values of the layers.
        index: Name and options of the index.
        k: Number of tokens to retrieve per query head.
        prompt: Number of tokens of the prompt.
        first: Number of tokens in the first append, from which the index may learn parameters such
            as centroids. None appends all tokens at once.

    Returns:
        Means over queries for each layer and query head.
    """
    measured = []
    for layer in layers:
        expanded, queries, scores = _prepare(layer, index, prompt, first)
        hits = expanded.search(queries, k=k)
        true = top_k(scores, k)[1]
        weight = (scores.double() * layer.scale).softmax(-1)
        retrieved = _flags(hits.ids, scores)
        parts = (
            retrieved.gather(-1, true).double().mean(-1),
            (weight * retrieved).sum(-1),
            weight.gather(-1, true).sum(-1),
        )
        measured.append([part.mean(0).cpu() for part in parts])
    return Recall(*(torch.stack(part) for part in zip(*measured, strict=True)))


def bytes_per_key(index: str, head_dim: int) -> dict[str, float]:
    """Return how many bytes an index needs per key, as a dict with one entry per kind of data.

    Keys are bfloat16 with `head_dim` coordinates.
    """
    options: dict[str, Any] = dict(q_heads=1, kv_heads=1, head_dim=head_dim, rope=torch.ones(1))
    trial = kvindex.create(index, dtype=torch.bfloat16, **options)
    assert isinstance(trial, BaseIndex)
    trial.append(*torch.ones(2, 1, 1, TOKENS, head_dim, dtype=torch.bfloat16))
    return trial.bytes_per_key()


def _prepare(
    layer: Captured, spec: str, prompt: int, first: int | None
) -> tuple[KVIndex, Tensor, Tensor]:
    """Return an index with the keys, the queries `[T, H, D]`, and the exact `q·k`, `[T, H, N]`.

    The index serves `T` sequences with the same keys, one for each query.
    """
    H, T, D = layer.queries.shape
    keys = layer.keys[None, :, SINK:prompt].repeat_interleave(H // len(layer.keys), dim=1)
    index = kvindex.create(
        spec,
        q_heads=H,
        kv_heads=H,
        head_dim=D,
        scale=layer.scale,
        softcap=layer.softcap,
        dtype=keys.dtype,
        device=keys.device,
    )
    step = first or keys.shape[2]
    for part in [keys[:, :, :step], keys[:, :, step:]]:
        index.append(part, part)
    queries = layer.queries.transpose(0, 1).contiguous()
    scores = (layer.queries.float() @ keys[0].float().mT).transpose(0, 1)
    return required(index, ExpandsBatch).expand_batch(T), queries, scores


def _flags(ids: Tensor, scores: Tensor) -> Tensor:
    """Return a bool tensor in the shape of `scores`, True at the token positions `ids`."""
    width = scores.shape[-1]
    flags = torch.zeros((*scores.shape[:-1], width + 1), dtype=torch.bool, device=scores.device)
    return flags.scatter_(-1, torch.where(ids < 0, width, ids), True)[..., :width]

"""Recall and attention coverage of an index on captured keys."""

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
"""Number of first tokens that are left out, because a layer always attends to them."""

TOKENS = 4096
"""Number of tokens by which the fixed bytes of an index are divided, to include them in bytes per
key."""


@dataclass(frozen=True)
class Recall:
    """Means over queries for each layer and query head, each float64 `[L, H]`.

    Args:
        recall: Fraction of the true top `k` rows by `q·k` that was retrieved.
        coverage: Total attention weight of the retrieved rows, where the softmax is over all rows
            of the index.
        coverage_true: Total attention weight of the true top `k` rows.
    """

    recall: Tensor
    coverage: Tensor
    coverage_true: Tensor


def measure(
    layers: Sequence[Captured], index: str, *, k: int, prompt: int, first: int | None = None
) -> Recall:
    """Measure recall. Each query head searches the prompt's rows separately (`G = H`).

    The sink's rows are left out. The queries are those captured after the first `prompt` tokens.

    Args:
        layers: Captured layers.
        index: Name and options of the index.
        k: Rows to retrieve.
        prompt: Tokens of the prompt.
        first: Number of tokens in the first append, from which an index may learn; None for all.
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
    """Return `BaseIndex.bytes_per_key` for keys in bfloat16."""
    options: dict[str, Any] = dict(q_heads=1, kv_heads=1, head_dim=head_dim, rope=torch.ones(1))
    trial = kvindex.create(index, dtype=torch.bfloat16, **options)
    assert isinstance(trial, BaseIndex)
    trial.append(*torch.ones(2, 1, 1, TOKENS, head_dim, dtype=torch.bfloat16))
    return trial.bytes_per_key()


def _prepare(
    layer: Captured, spec: str, prompt: int, first: int | None
) -> tuple[KVIndex, Tensor, Tensor]:
    """Return an index expanded to `T` sequences, queries `[T, H, D]`, and true `q·k` `[T, H,
    N]`."""
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
    """Return bool flags of the rows in `ids`, in the shape of `scores`."""
    width = scores.shape[-1]
    flags = torch.zeros((*scores.shape[:-1], width + 1), dtype=torch.bool, device=scores.device)
    return flags.scatter_(-1, torch.where(ids < 0, width, ids), True)[..., :width]

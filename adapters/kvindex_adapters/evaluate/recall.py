"""How much of the true top `k`, and of its attention coverage, an index finds on captured keys; and
whether the share of attention that it believes to hold is the true one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex import BaseIndex
from kvindex.ops.select import top_k
from kvindex_adapters.evaluate.capture import Captured

SINK = 64
"""Tokens left out at the start: a layer always attends to them."""

TOKENS = 4096
"""What tokens share is shared by so many where bytes per key are counted."""


@dataclass(frozen=True)
class Recall:
    """Per layer and query head, float64 `[L, H]`, means over queries.

    recall: share of the true top `k` rows by `q·k`; coverage: softmax coverage that the hits hold,
    and mass_true: that the true top `k` hold, over the rows of the index.
    """

    recall: Tensor
    coverage: Tensor
    mass_true: Tensor


@dataclass(frozen=True)
class Certified:
    """Per layer, query head and query, float64 `[L, H, T]`: of searches with a `coverage`.

    believed: `Hits.coverage`; true: the softmax coverage of the hits over the rows of the index;
    rows: how many the hits are.
    """

    believed: Tensor
    true: Tensor
    rows: Tensor


def measure(
    layers: Sequence[Captured], index: str, *, k: int, prompt: int, first: int | None = None
) -> Recall:
    """Search the prompt's rows (but the sink's) with each query head on its own (`G = H`).

    The queries are those captured after the first `prompt` tokens. first: tokens of the first
    append (what an index learns from); all of them by default.
    """
    found = []
    for layer in layers:
        searched, queries, scores = _prepared(layer, index, prompt, first)
        hits = searched.search(queries, k=k)
        true = top_k(scores, k)[1]
        share = (scores.double() * layer.scale).softmax(-1)
        mine = _flags(hits.ids, scores)
        parts = (
            mine.gather(-1, true).double().mean(-1),
            (share * mine).sum(-1),
            share.gather(-1, true).sum(-1),
        )
        found.append([part.mean(0).cpu() for part in parts])
    return Recall(*(torch.stack(part) for part in zip(*found, strict=True)))


def certify(
    layers: Sequence[Captured], index: str, *, k: int, coverage: float, prompt: int
) -> Certified:
    """As `measure`, with searches that stop where they believe to hold `coverage`."""
    found = []
    for layer in layers:
        searched, queries, scores = _prepared(layer, index, prompt, None)
        hits = searched.search(queries, k=k, coverage=coverage)
        assert hits.coverage is not None
        share = (scores.double() * layer.scale).softmax(-1)
        true = (share * _flags(hits.ids, scores)).sum(-1)
        rows = (hits.ids >= 0).sum(-1)
        found.append([part.double().mT.cpu() for part in (hits.coverage, true, rows)])
    return Certified(*(torch.stack(part) for part in zip(*found, strict=True)))


def bytes_per_key(index: str, head_dim: int) -> dict[str, float]:
    """`BaseIndex.bytes_per_key` of keys in bfloat16."""
    options: dict[str, Any] = dict(q_heads=1, kv_heads=1, head_dim=head_dim, rope=torch.ones(1))
    made = kvindex.create(index, dtype=torch.bfloat16, **options)
    assert isinstance(made, BaseIndex)
    made.append(*torch.ones(2, 1, 1, TOKENS, head_dim, dtype=torch.bfloat16))
    return made.bytes_per_key()


def _prepared(
    layer: Captured, spec: str, prompt: int, first: int | None
) -> tuple[BaseIndex, Tensor, Tensor]:
    """An index that serves `T` rows, their queries `[T, H, D]`, and true `q·k` `[T, H, N]`."""
    H, T, D = layer.queries.shape
    keys = layer.keys[None, :, SINK:prompt].repeat_interleave(H // len(layer.keys), dim=1)
    index: Any = kvindex.create(
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
    return index.expand_batch(T), queries, scores


def _flags(ids: Tensor, scores: Tensor) -> Tensor:
    """Which rows `ids` names, bool as `scores`."""
    width = scores.shape[-1]
    flags = torch.zeros((*scores.shape[:-1], width + 1), dtype=torch.bool, device=scores.device)
    return flags.scatter_(-1, torch.where(ids < 0, width, ids), True)[..., :width]

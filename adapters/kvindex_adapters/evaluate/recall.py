"""How much of the true top `k`, and of its attention mass, an index finds on captured keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvindex
from kvindex import BaseIndex
from kvindex.ops.select import top_k
from kvindex_adapters.capture import Captured

SINK = 64
"""Tokens left out at the start: a layer always attends to them."""


@dataclass(frozen=True)
class Recall:
    """Per layer and query head, float64 `[L, H]`, means over queries.

    recall: share of the true top `k` rows by `q·k`; mass: softmax mass that the hits hold, and
    mass_true: that the true top `k` hold, over the rows of the index.
    """

    recall: Tensor
    mass: Tensor
    mass_true: Tensor


def measure(layers: Sequence[Captured], index: str, *, k: int, prompt: int) -> Recall:
    """Search the prompt's rows (but the sink's) with each query head on its own (`G = H`).

    The queries are those captured after the first `prompt` tokens.
    """
    found = [_layer(layer, index, k, prompt) for layer in layers]
    return Recall(*(torch.stack(part) for part in zip(*found, strict=True)))


def bytes_per_key(index: str, head_dim: int) -> dict[str, float]:
    """`BaseIndex.bytes_per_key` of keys in bfloat16."""
    options = dict(q_heads=1, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    made = kvindex.create(index, **options)
    assert isinstance(made, BaseIndex)
    made.append(*torch.ones(2, 1, 1, 1, head_dim, dtype=torch.bfloat16))
    return made.bytes_per_key()


def _layer(layer: Captured, spec: str, k: int, prompt: int) -> tuple[Tensor, Tensor, Tensor]:
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
    index.append(keys, keys)
    queries = layer.queries.transpose(0, 1).contiguous()  # [T, H, D]
    hits = index.repeated(T).search(queries, k=k)
    scores = (layer.queries.float() @ keys[0].float().mT).transpose(0, 1)  # [T, H, N]
    true = top_k(scores, k)[1]
    share = (scores.double() * layer.scale).softmax(-1)
    found = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, hits.ids.clamp_min(0), True)
    recall = found.gather(-1, true).double().mean(-1)
    mass = (share * found).sum(-1)
    mass_true = share.gather(-1, true).sum(-1)
    return recall.mean(0).cpu(), mass.mean(0).cpu(), mass_true.mean(0).cpu()

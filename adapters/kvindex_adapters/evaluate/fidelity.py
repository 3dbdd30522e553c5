"""Fidelity to full attention: KL divergence, agreement and recall of teacher-forced steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvindex
from kvindex.core import check
from kvindex.core.protocol import KVIndex
from kvindex.wrappers import MeasureRecall
from kvindex_adapters.common.placement import default_placement
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import prefill

BLOCK = 128
"""Steps that run at once: bounds the rows gathered for them."""


@dataclass(frozen=True)
class Fidelity:
    """Means over teacher-forced steps.

    steps: tokens compared, means over none are 0; kl_mean: KL divergence of the index's next-token
    distribution from full attention's, nats; agreement: share of steps with the same most likely
    token; recall_at_k: share of each query head's own true top k that was retrieved, mean over
    layers and heads, None where no step searched; recall_limit: the same for exact search with as
    many rows per KV head.
    """

    steps: int
    kl_mean: float
    agreement: float
    recall_at_k: float | None
    recall_limit: float | None


def teacher_forced(
    model: PreTrainedModel,
    prompt: Tensor,
    continuation: Tensor,
    *,
    index: str = "pariskv",
    k: int = 100,
    chunk: int = 1024,
    attach_options: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Feed `continuation` int64 `[T]` after `prompt` int64 `[N]`, one token a step, and compare.

    Both runs read the same tokens; full attention reads them in one pass. Raises ValueError for
    tensors of another shape and what `attach` raises.
    """
    check.tensor("prompt", prompt, {"N": None}, torch.int64)
    check.tensor("continuation", continuation, {"T": None}, torch.int64)
    steps = check.at_least("continuation.shape[0]", len(continuation), 1)
    ids = torch.cat([prompt, continuation]).to(model.device)

    def measured(**geometry: Any) -> KVIndex:
        placement = default_placement(geometry.get("device"), index)
        return MeasureRecall(kvindex.create(index, **{**placement, **geometry}))

    with torch.no_grad():
        full = model(input_ids=ids[None], logits_to_keep=steps, use_cache=False).logits[0]
        with attach(model, index=measured, k=k, **(attach_options or {})) as cache:
            prefill(model, ids, cache, stop=len(prompt), chunk=chunk)
            return followed(model, cache, ids[len(prompt) :], full, on_progress=on_progress)


def followed(
    model: PreTrainedModel,
    cache: IndexCache,
    continuation: Tensor,
    full: Tensor,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """`teacher_forced` in a cache that has read the prompt, and now reads the continuation.

    continuation: int64 `[T]`, on the model's device; full: full attention's logits at each of its
    tokens, `[T, V]`. Indexes are measured from here on (`MeasureRecall`).
    """
    layers, steps, divergence, same = cache.attention_layers(), len(continuation), 0.0, 0
    for layer in layers:
        if not isinstance(layer.index, MeasureRecall):
            layer.index = MeasureRecall(layer.index)
    for step in range(steps):
        token = continuation[None, step : step + 1]
        logits = model(input_ids=token, past_key_values=cache).logits[0, -1]
        divergence += kl(full[step], logits)
        same += int(full[step].argmax() == logits.argmax())
        if on_progress:
            on_progress(step + 1, steps)
    measured = [index for index in cache.indexes() if isinstance(index, MeasureRecall)]
    return Fidelity(
        steps=steps,
        kl_mean=divergence / max(steps, 1),
        agreement=same / max(steps, 1),
        recall_at_k=_mean([index.recall() for index in measured]),
        recall_limit=_mean([index.limit() for index in measured]),
    )


def divergences(
    model: PreTrainedModel,
    prompt: Tensor,
    continuation: Tensor,
    full: Tensor,
    *,
    index: str = "pariskv",
    k: int = 100,
    chunk: int = 1024,
    attach_options: dict[str, Any] | None = None,
) -> Tensor:
    """KL divergence from full attention at each token of `continuation`, nats, float64 `[T]`.

    As `teacher_forced` measures it, but all steps between two updates run at once
    (`ParallelLayer`), which makes thousands of steps affordable. full: logits `[T, V]` of
    `full_logits`. Every step searches, whatever the length.
    """
    ids = torch.cat([prompt, continuation]).to(model.device)
    options: dict[str, Any] = {"dense_below": 0, **(attach_options or {})}
    divergence: list[Tensor] = []
    with torch.no_grad(), attach(model, index=index, k=k, layer=ParallelLayer, **options) as cache:
        prefill(model, ids, cache, stop=len(prompt), chunk=chunk)
        for layer in cache.attention_layers():
            assert isinstance(layer, ParallelLayer)
            layer.begin()
        for start in range(len(prompt), len(ids), BLOCK):
            block = ids[None, start : start + BLOCK]
            logits = model(input_ids=block, past_key_values=cache).logits[0]
            p = full[start - len(prompt) :][: len(logits)].double().log_softmax(-1)
            q = logits.double().log_softmax(-1)
            divergence.append((p.exp() * (p - q)).sum(-1).cpu())
    return torch.cat(divergence)


def full_logits(model: PreTrainedModel, prompt: Tensor, continuation: Tensor) -> Tensor:
    """Full attention's logits at each token of the continuation, `[T, V]`.

    With transformers' own cache and attention, some tokens at a time: at 64K tokens in float32 it
    would hold all logits of attention at once.
    """
    ids = torch.cat([prompt, continuation]).to(model.device)
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        prefill(model, ids, cache, stop=len(prompt), chunk=1024)
        for start in range(len(prompt), len(ids), 1024):
            block = ids[None, start : start + 1024]
            logits.append(model(input_ids=block, past_key_values=cache).logits[0])
    return torch.cat(logits)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def kl(full: Tensor, other: Tensor) -> float:
    """`KL(full ‖ other)` in nats between the distributions of two vectors of logits `[V]`."""
    p = full.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())

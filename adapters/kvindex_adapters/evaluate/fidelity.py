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
"""Number of steps that run in parallel. It limits the memory of the rows that are gathered for
these steps."""


@dataclass(frozen=True)
class Fidelity:
    """Means over teacher-forced steps; 0 if there is no step.

    Args:
        steps: Number of tokens compared.
        kl_mean: KL divergence of the index's next-token distribution from full attention's, in
            nats.
        agreement: Fraction of steps with the same most likely token.
        recall_at_k: Fraction of each query head's true top k that was retrieved, as a mean over
            layers and heads. None if no step searched.
        recall_limit: The same fraction for exact search with the same number of rows per KV head.
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
    """Feed a continuation token by token after a prompt, and compare with full attention.

    Both runs read the same tokens. Full attention reads them in one pass.

    Args:
        model: The transformers model.
        prompt: Int64 `[N]`.
        continuation: Int64 `[T]`.
        index: Name and options of the index.
        k: Rows to retrieve per KV head and step.
        chunk: Tokens of the prompt to read at a time.
        attach_options: Further options of `attach`.
        on_progress: Called with the steps done and the steps in total.

    Raises:
        ValueError: A tensor has another shape; also what `attach` raises.
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
    """Run `teacher_forced` in a cache that has read the prompt.

    After this call, the indexes are wrapped in `MeasureRecall`.

    Args:
        model: The attached model.
        cache: Its cache, which reads the continuation.
        continuation: Int64 `[T]`, on the model's device.
        full: Full attention's logits at each of these tokens, `[T, V]`.
        on_progress: Called with the steps done and the steps in total.
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
    """Compute the KL divergence from full attention at each token of a continuation.

    The result equals that of `teacher_forced`, but all steps between two updates run in parallel
    (`ParallelLayer`), so that thousands of steps are affordable. Every step searches, however short
    the sequence is.

    Args:
        model: The transformers model.
        prompt: Int64 `[N]`.
        continuation: Int64 `[T]`.
        full: Logits `[T, V]` of `full_logits`.
        index: Name and options of the index.
        k: Rows to retrieve per KV head and step.
        chunk: Tokens of the prompt to read at a time.
        attach_options: Further options of `attach`.

    Returns:
        KL divergence in nats, float64 `[T]`.
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
    """Return full attention's logits at each token of the continuation, `[T, V]`.

    The model reads a few tokens at a time with transformers' own cache, to limit the memory of
    attention logits.
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
    """Return `KL(full ‖ other)` in nats between the distributions of two vectors of logits
    `[V]`."""
    p = full.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())

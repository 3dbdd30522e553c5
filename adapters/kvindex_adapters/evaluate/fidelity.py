"""Compare a model with an index and the same model with full attention, token by token.

The model reads the same tokens in both cases (teacher forcing). The results are the KL divergence
of the next-token distributions, the fraction of equal predictions, and recall.
"""

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
from kvindex.layer.arguments import DEFAULT_K
from kvindex.wrappers import MeasureRecall
from kvindex_adapters.common.placement import default_placement
from kvindex_adapters.evaluate.parallel import ParallelLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.model.cache_argument import CACHE

BLOCK = 128
"""Number of decode steps that run in parallel.

More steps would need more memory for the keys and values that are gathered for them.
"""


@dataclass(frozen=True)
class Fidelity:
    """How closely a model with an index follows full attention, as means over decode steps.

    Args:
        steps: Number of decode steps. With 0 steps, `kl_mean` and `agreement` are 0.
        kl_mean: KL divergence of the next-token distribution with the index from that with full
            attention, in nats.
        agreement: Fraction of steps in which the most likely token with the index is that of full
            attention.
        recall_at_k: Fraction of the `k` tokens with the largest logits of a query head that the
            index retrieved, as a mean over layers and heads. None if no step searched.
        recall_limit: `recall_at_k` of an exact search that retrieves as many tokens per KV head.
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
    k: int = DEFAULT_K,
    chunk: int = 1024,
    attach_options: dict[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Compare a model with an index and with full attention at each token of a continuation.

    With the index, the model reads the continuation token by token, as in decoding. With full
    attention, it reads the same tokens in one forward pass.

    Args:
        model: The transformers model.
        prompt: Token ids of the prompt, int64 `[N]`.
        continuation: Token ids that follow the prompt, int64 `[T]`.
        index: Name and options of the index.
        k: Number of tokens to retrieve per KV head in each step.
        chunk: Number of tokens of the prompt that the model reads in one forward pass.
        attach_options: Further options of `attach`.
        on_progress: Function that is called with the number of steps done and of all steps.

    Returns:
        Means over the `T` steps.

    Raises:
        ValueError: A tensor has a wrong shape, or an option of `attach` is invalid.
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
            prefill(model, ids, cache, stop=len(prompt), chunk=chunk, prompt=len(prompt))
            return followed(model, cache, ids[len(prompt) :], full, on_progress=on_progress)


def followed(
    model: PreTrainedModel,
    cache: IndexCache,
    continuation: Tensor,
    full: Tensor,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Compare a model that attends through an index with given logits of full attention.

    The cache already contains a prompt. The model reads the continuation of the prompt token by
    token. Its indexes are wrapped in `MeasureRecall`, and remain so after this call.

    Args:
        model: The attached model.
        cache: The cache of the model, with the prompt. The continuation is appended to it.
        continuation: Token ids that follow the prompt, int64 `[T]`, on the model's device.
        full: Logits that full attention computed after each of these tokens, `[T, V]`.
        on_progress: Function that is called with the number of steps done and of all steps.

    Returns:
        Means over the `T` steps.
    """
    layers, steps, divergence, same = cache.attention_layers(), len(continuation), 0.0, 0
    for layer in layers:
        if not isinstance(layer.index, MeasureRecall):
            layer.index = MeasureRecall(layer.index)
    for step in range(steps):
        token = continuation[None, step : step + 1]
        logits = model(input_ids=token, **{CACHE: cache}).logits[0, -1]
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
    k: int = DEFAULT_K,
    chunk: int = 1024,
    attach_options: dict[str, Any] | None = None,
) -> Tensor:
    """Compute the KL divergence from full attention at each token of a continuation.

    The divergence is the same as in `teacher_forced`. But decode steps run in parallel until the
    next tokens are appended to the index (`ParallelLayer`), so that thousands of steps are
    affordable. Every step searches, even in a short sequence.

    Args:
        model: The transformers model.
        prompt: Token ids of the prompt, int64 `[N]`.
        continuation: Token ids that follow the prompt, int64 `[T]`.
        full: Logits of full attention, `[T, V]`, as `full_logits` returns them.
        index: Name and options of the index.
        k: Number of tokens to retrieve per KV head in each step.
        chunk: Number of tokens of the prompt that the model reads in one forward pass.
        attach_options: Further options of `attach`.

    Returns:
        KL divergence of the next-token distribution with the index from that with full attention,
        in nats, float64 `[T]`.
    """
    ids = torch.cat([prompt, continuation]).to(model.device)
    options: dict[str, Any] = {"dense_below": 0, **(attach_options or {})}
    divergence: list[Tensor] = []
    with torch.no_grad(), attach(model, index=index, k=k, layer=ParallelLayer, **options) as cache:
        prefill(model, ids, cache, stop=len(prompt), chunk=chunk, prompt=len(prompt))
        for layer in cache.attention_layers():
            assert isinstance(layer, ParallelLayer)
            layer.begin()
        for start in range(len(prompt), len(ids), BLOCK):
            block = ids[None, start : start + BLOCK]
            logits = model(input_ids=block, **{CACHE: cache}).logits[0]
            p = full[start - len(prompt) :][: len(logits)].double().log_softmax(-1)
            q = logits.double().log_softmax(-1)
            divergence.append((p.exp() * (p - q)).sum(-1).cpu())
    return torch.cat(divergence)


def full_logits(model: PreTrainedModel, prompt: Tensor, continuation: Tensor) -> Tensor:
    """Return the logits of a model with full attention after each token of a continuation.

    The model reads 1,024 tokens in each forward pass, to limit the memory of attention logits.

    Args:
        model: The transformers model.
        prompt: Token ids of the prompt, int64 `[N]`.
        continuation: Token ids that follow the prompt, int64 `[T]`.

    Returns:
        Logits `[T, V]`.
    """
    ids = torch.cat([prompt, continuation]).to(model.device)
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        prefill(model, ids, cache, stop=len(prompt), chunk=1024)
        for start in range(len(prompt), len(ids), 1024):
            block = ids[None, start : start + 1024]
            logits.append(model(input_ids=block, **{CACHE: cache}).logits[0])
    return torch.cat(logits)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def kl(full: Tensor, other: Tensor) -> float:
    """Return `KL(softmax(full) ‖ softmax(other))` in nats, for two vectors of logits `[V]`."""
    p = full.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())

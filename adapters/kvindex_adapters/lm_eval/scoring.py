"""Score the tokens of a continuation in decode steps that search the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import default_chunk, prefill
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import text_positions

PIECE = 64
"""Number of decode steps that run in one forward pass of the model. Tokens move from the window
into the index only between two pieces."""

Score = tuple[float, bool]
"""Log-likelihood of a continuation in nats, and whether greedy decoding would generate it."""


@contextmanager
def opened(model: PreTrainedModel, options: dict[str, Any] | None) -> Iterator[Any]:
    """Open an empty cache. `options` are those of `attach`, or None for full attention."""
    if options is None:
        yield DynamicCache(config=model.config)
        return
    with attach(model, **options) as cache:
        yield cache


def scores(
    model: PreTrainedModel,
    options: dict[str, Any] | None,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
) -> list[Score]:
    """Compute the log-likelihood of each continuation of a context.

    The model reads the context once, densely, except for its last token. This token and those of a
    continuation are decode steps. So each score, the first one included, comes from a step that
    searches the index, if the index contains a token.

    Args:
        model: The model.
        options: Keyword arguments of `attach`, or None for full attention.
        context: Token ids, at least one.
        continuations: Token ids of each continuation, at least one each.
    """
    ids = torch.tensor(context, dtype=torch.int64, device=model.device)
    with opened(model, options) as cache, torch.no_grad():
        if len(ids) > 1:
            stop = len(ids) - 1
            prefill(model, ids, cache, stop=stop, chunk=default_chunk(model), prompt=stop)
        found = []
        for number, continuation in enumerate(continuations):
            new = torch.tensor(continuation, dtype=torch.int64, device=model.device)
            steps = torch.cat([ids[-1:], new[:-1]])
            with _branched(cache, last=number == len(continuations) - 1) as branch:
                found.append(_score(model, branch, steps, new))
        return found


@contextmanager
def _branched(cache: Any, *, last: bool) -> Iterator[Any]:
    """Context manager that yields a cache for one continuation of a context.

    Afterwards `cache` has its former state, unless `last` is True.
    """
    if last:
        yield cache
    elif isinstance(cache, IndexCache) and not cache.overwrites:
        before = cache.checkpoint()
        try:
            yield cache
        finally:
            cache.rollback(before)
    else:
        yield deepcopy(cache)


def _score(model: PreTrainedModel, cache: Any, steps: Tensor, targets: Tensor) -> Score:
    """Return the score of the tokens `targets`, each of which follows a token of `steps`."""
    total, greedy = 0.0, True
    for start in range(0, len(steps), PIECE):
        logits = _decoded(model, cache, steps[start : start + PIECE]).float().log_softmax(-1)
        wanted = targets[start : start + PIECE]
        total += float(logits.gather(-1, wanted[:, None]).double().sum())
        greedy = greedy and bool((logits.argmax(-1) == wanted).all())
    return total, greedy


def _decoded(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    """Run decode steps that read the tokens `ids`, int64 `[T]`. Return their logits `[T, V]`."""
    start = cache.get_seq_length()
    positions = text_positions(model, start, start + len(ids))
    more = {} if positions is None else {"position_ids": positions}
    with ExitStack() as stack:
        for layer in _layers(cache):
            stack.enter_context(layer.speculating(len(ids)))
        logits: Tensor = model(input_ids=ids[None], use_cache=True, **{CACHE: cache}, **more).logits
    return logits[0]


def _layers(cache: Any) -> list[AttentionLayer]:
    return cache.attention_layers() if isinstance(cache, IndexCache) else []

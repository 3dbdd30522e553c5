"""Prompts that continue a conversation in a cache with tokens, or branch from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.unsupported import UnsupportedError

USED = ("refuse", "continue", "branch")
"""What `generate` may do with a cache that holds tokens."""

HISTORY_OPTIONS: dict[str, Any] = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0)
"""Options of `model.generate` that look at ids before the prompt -> value without effect."""


def check_follows(cache: object, used: str, *, allowed: tuple[str, ...] = USED) -> IndexCache:
    """`cache`, if a prompt may be read into it. Raises ValueError, or RuntimeError once closed."""
    if not isinstance(cache, IndexCache):
        raise ValueError(
            f"cache: got {type(cache).__name__}, allowed is what attach() gave: "
            "with attach(model) as cache"
        )
    check.one_of("used", used, allowed)
    cache.check_usable()
    length = cache.get_seq_length()
    if length and used == "refuse":
        others = " or ".join(f'used="{name}"' for name in allowed if name != "refuse")
        raise ValueError(
            f"cache: got one that holds {length} tokens, allowed is an empty one; for a prompt "
            f"that follows them say {others}, to begin anew cache.reset()"
        )
    batch = max((layer.batch_size for layer in cache.attention_layers()), default=1)
    if batch > 1:
        raise ValueError(f"cache: got one of {batch} sequences, allowed is one sequence")
    if used == "branch" and any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        raise UnsupportedError(
            'used: got "branch", allowed is "continue" for a model with linear attention, whose '
            "state cannot go back; pass a copy.deepcopy of the cache to keep it as it is"
        )
    return cache


@contextmanager
def following(cache: IndexCache, used: str) -> Iterator[IndexCache]:
    """Give the cache, and roll it back after a failure or a branch."""
    before, ids, done = cache.checkpoint(), cache.ids, False
    try:
        yield cache
        done = used != "branch"
    finally:
        if not done:
            cache.rollback(before)
            cache.ids = ids


def past_ids(cache: Any) -> Tensor | None:
    """Ids int64 `[N]` of the cache's tokens, or None where others put tokens there."""
    if not cache.get_seq_length():
        return torch.empty(0, dtype=torch.int64)
    return getattr(cache, "ids", None)


def remember(cache: IndexCache, past: Tensor | None, ids: Tensor) -> None:
    """Record that the cache holds ids `[N]` after the past."""
    if past is not None:
        cache.ids = torch.cat([past.to(ids), ids])


def check_past_known(config: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for options that look at past ids, which are unknown."""
    for name, unused in HISTORY_OPTIONS.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value != unused:
            raise ValueError(
                f"{name}: got {value!r}, allowed is {unused!r} with a cache that holds tokens of "
                "other calls than kvhf.read and kvhf.generate: it looks at ids of the past"
            )

"""Rotary frequencies of the whole prompt for each of its chunks.

The embeddings of rope types `dynamic` and `longrope` derive their frequencies from the newest
position of a call (transformers' `dynamic_rope_update`). The first chunks of a prompt would thus
get the frequencies of a shorter sequence, and their keys would differ from those of a prompt that
is read in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@contextmanager
def counting_ahead(embeddings: Collection[nn.Module], tokens: int) -> Iterator[None]:
    """Make rotary embeddings count `tokens` more tokens than they are called with.

    Args:
        embeddings: `length_dependent` of a model. Each call gets one more position, that of the
            prompt's last token, and the angles of that position are removed from the result.
        tokens: Tokens of the prompt after the current chunk. Nothing is changed where it is 0.
    """
    hooks: list[Any] = []
    try:
        for embedding in embeddings if tokens else ():
            append = partial(_append_position, tokens)
            hooks.append(embedding.register_forward_pre_hook(append, with_kwargs=True))
            # before hooks of others, which then see the result that the model gets
            hooks.append(embedding.register_forward_hook(_remove_position, prepend=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _append_position(tokens: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Add the position of the prompt's last token to `position_ids`, `[..., T]`."""

    def longer(positions: Tensor) -> Tensor:
        return torch.cat([positions, positions[..., -1:] + tokens], dim=-1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
    hidden, positions, *others = args
    return (hidden, longer(positions), *others), kwargs


def _remove_position(module: nn.Module, args: Any, output: Any) -> Any:
    """Remove the last position from cosines and sines, `[..., T, F]` each."""
    return tree_map_only(Tensor, lambda angles: angles[..., :-1, :], output)

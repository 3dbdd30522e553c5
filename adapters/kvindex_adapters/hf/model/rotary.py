"""Rotary frequencies: those of a decoder layer, and those of a prompt that is read in chunks.

The frequencies of a layer are found by calling the layer itself. The embeddings of rope types
`dynamic` and `longrope` derive their frequencies from the newest position of a call (transformers'
`dynamic_rope_update`). The first chunks of a prompt would thus get the frequencies of a shorter
sequence, and their keys would differ from those of a prompt that is read in one call. Therefore
`counting_ahead` gives each chunk the frequencies of the whole prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kvindex.core.rope import rotate
from kvindex_adapters.hf.model.info import layer_device
from kvindex_adapters.hf.model.latent import is_latent

POSITIONS = (0, 1, 7)
"""Positions at which the probe places the same token."""

CLOSE = 0.05
"""Keys may differ by this fraction of the largest coordinate. bfloat16 rounds by 2^-8, and a layer
that rotates other pairs of coordinates differs by about 1."""


class _CaughtError(Exception):
    """Carries the keys that the layer passes to the cache."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _Catcher:
    """A cache that interrupts the layer when it passes its keys."""

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _CaughtError(keys)

    def get_seq_length(self, *args: Any) -> int:
        return 0


def depends_on_length(rope_type: object) -> bool:
    """Return True if frequencies of this `rope_type` depend on the length of the sequence.

    Args:
        rope_type: The attribute of a rotary embedding of transformers: a name, or a dict of names
            by type of layer. The conditions are those of transformers' `dynamic_rope_update`.
    """
    return any("dynamic" in name or name == "longrope" for name in _names(rope_type))


def _names(rope_type: object) -> list[str]:
    names = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return [name for name in names if isinstance(name, str)]


def length_dependent(model: nn.Module) -> list[nn.Module]:
    """Return the model's rotary embeddings whose frequencies depend on the sequence length."""
    modules = model.modules()
    return [module for module in modules if depends_on_length(getattr(module, "rope_type", None))]


def keeps_longest(model: nn.Module) -> bool:
    """Return True if frequencies depend on the longest sequence that the model has ever read.

    Embeddings of type `dynamic` store that length in the module, and removing tokens does not reset
    it.
    """
    return any(
        "dynamic" in name for one in length_dependent(model) for name in _names(one.rope_type)
    )


def rotary_frequencies(decoder: nn.Module, layer: int) -> Tensor | None:
    """Find the inverse rotary frequencies of a full-attention layer (`kvindex.core.rope`).

    Args:
        decoder: The decoder.
        layer: Number of the layer.

    Returns:
        Float32 `[F]`, all 0 for a layer without rotation. None if the frequencies are unknown: the
        decoder has no `rotary_emb`, the frequencies depend on the length, the layer rotates other
        pairs of coordinates, it caches latents, or it cannot be called separately.
    """
    embedding = getattr(decoder, "rotary_emb", None)
    kind, name = getattr(embedding, "rope_type", None), "inv_freq"
    more: tuple[str, ...] = ()
    if isinstance(kind, dict):  # the model has one embedding per type of layer
        kind, name = kind.get("full_attention"), "full_attention_inv_freq"
        more = ("full_attention",)
    rope = getattr(embedding, name, None)
    if not isinstance(rope, Tensor) or rope.is_meta or depends_on_length(kind):
        return None
    rope = rope.detach().float()
    for module in decoder.modules():
        if getattr(module, "layer_idx", None) == layer and not is_latent(module):
            keys = _probe(decoder, module, embedding, more, layer_device(decoder, layer))
            for candidate in (rope, torch.zeros_like(rope)):
                if keys is not None and _rotated_by(keys, candidate):
                    return candidate
    return None


@torch.no_grad()
def _probe(
    decoder: Any, module: nn.Module, embedding: Any, more: tuple[str, ...], device: torch.device
) -> Tensor | None:
    """Compute the keys `[1, G, T, D]` of one token at `POSITIONS`, or None if that fails."""
    parameters = inspect.signature(module.forward).parameters
    if "position_embeddings" not in parameters:
        return None
    positions = torch.tensor([POSITIONS], device=device)
    try:
        size = decoder.config.get_text_config().hidden_size
        token = torch.randn(size, generator=torch.Generator().manual_seed(0))
        states = token.to(device, decoder.dtype).expand(1, len(POSITIONS), -1)
        cache = "past_key_values" if "past_key_values" in parameters else "layer_past"
        options: dict[str, Any] = {"attention_mask": None, cache: _Catcher()}
        module(states, position_embeddings=embedding(states, positions, *more), **options)
    except _CaughtError as caught:
        return caught.keys
    except Exception:  # any error of the model's class means that frequencies are unknown
        return None
    return None


def _rotated_by(keys: Tensor, rope: Tensor) -> bool:
    """Return True if the keys at `POSITIONS` equal the first key, rotated by these frequencies."""
    keys, positions = keys.float(), torch.tensor(POSITIONS, device=keys.device)
    if 2 * len(rope) > keys.shape[-1]:
        return False
    rotated = rotate(keys[:, :, :1].expand_as(keys), positions, rope.to(keys.device))
    return bool((keys - rotated).abs().amax() <= CLOSE * keys.abs().amax())


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
            # run this hook before those of other code, so that these see the final result
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

"""Determine the rotary frequencies of a layer, and correct them for chunked prefill.

To determine a layer's frequencies, the layer itself is called.

Rotary embeddings of the types `dynamic` and `longrope` derive their frequencies from the newest
position of a call (transformers' `dynamic_rope_update`). In chunked prefill, the first chunks would
get the frequencies of a shorter sequence. `counting_ahead` gives each chunk the frequencies of the
whole prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kvindex.core.rope import rotate
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import device_of_modules, modules_by_layer
from kvindex_adapters.hf.model.latent import is_latent

POSITIONS = (0, 1, 7)
"""Positions at which a layer is called with the same token, to determine how it rotates keys."""

CLOSE = 0.05
"""Tolerance for comparing keys, as a fraction of the largest coordinate. Rounding in bfloat16
causes a difference of 2^-8. A layer that rotates other pairs of coordinates causes a difference of
about 1."""


class _CaughtError(Exception):
    """Ends the forward pass of a layer that has passed its keys to a `_Catcher` as its cache.

    The attribute `keys` contains these keys.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


class _Catcher:
    """A cache whose `update` raises an exception, to stop a layer after it has computed its
    keys."""

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _CaughtError(keys)

    def get_seq_length(self, *args: Any) -> int:
        return 0


def depends_on_length(rope_type: object) -> bool:
    """Return True if rotary frequencies of this type depend on the sequence length.

    The conditions are those of transformers' `dynamic_rope_update`.

    Args:
        rope_type: Attribute of a transformers rotary embedding: a name, or a dict of names by layer
            type.
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
    """Return True if frequencies depend on the longest sequence that the model has processed so
    far.

    Rotary embeddings of type `dynamic` store this length in the module, and do not reset it when
    tokens are removed.
    """
    return any(
        "dynamic" in name for one in length_dependent(model) for name in _names(one.rope_type)
    )


def rotary_frequencies(decoder: nn.Module, layers: Iterable[int]) -> dict[int, Tensor | None]:
    """Determine the inverse rotary frequencies of full-attention layers.

    All layers are called before the first result is read from the device, so the host waits for the
    device once.

    Args:
        decoder: The module of a transformers model that contains the decoder layers.
        layers: Numbers of the layers.

    Returns:
        For each layer float32 `[F]`, all 0 for a layer without rotation. None if they cannot be
        determined: the module `decoder` has no `rotary_emb`, the frequencies depend on the sequence
        length, the layer rotates other pairs of coordinates or caches latents, or the layer cannot
        be called separately.
    """
    found: dict[int, Tensor | None] = dict.fromkeys(layers)
    embedding = getattr(decoder, "rotary_emb", None)
    kind, name = getattr(embedding, "rope_type", None), "inv_freq"
    more: tuple[str, ...] = ()
    if isinstance(kind, dict):  # the model has one rotary embedding per layer type
        kind, name = kind.get("full_attention"), "full_attention_inv_freq"
        more = ("full_attention",)
    rope = getattr(embedding, name, None)
    if not isinstance(rope, Tensor) or rope.is_meta or depends_on_length(kind):
        return found
    rope = rope.detach().float()
    tried: list[tuple[int, Tensor, Tensor]] = []
    inputs: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for number, modules in modules_by_layer(decoder).items():
        if number not in found:
            continue
        device = device_of_modules((*modules, decoder))
        for module in modules:
            keys = None
            if not is_latent(module):
                keys = _probe(module, decoder, device, embedding, more, inputs)
            if keys is not None:
                for one in (rope, torch.zeros_like(rope)):
                    tried.append((number, one, _rotated_by(keys, one)))
    matches = torch.stack([match.to(rope.device) for _, _, match in tried]) if tried else rope[:0]
    for (number, one, _), match in zip(tried, matches.tolist(), strict=True):
        if match and found[number] is None:
            found[number] = one
    return found


def _inputs(decoder: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the hidden states `[1, T, hidden]` of one token at all `POSITIONS`, and the positions
    `[1, T]`."""
    size = decoder.config.get_text_config().hidden_size
    token = torch.randn(size, generator=torch.Generator().manual_seed(0))
    states = token.to(device, decoder.dtype).expand(1, len(POSITIONS), -1)
    return states, torch.tensor([POSITIONS], device=device)


@torch.no_grad()
def _probe(
    module: nn.Module,
    decoder: nn.Module,
    device: torch.device,
    embedding: Any,
    more: tuple[str, ...],
    inputs: dict[torch.device, tuple[Tensor, Tensor]],
) -> Tensor | None:
    """Call a layer with the same token at all `POSITIONS`. Return its keys `[1, G, T, D]`, or None
    if this fails. `inputs` are those for each device, and are added if they are missing."""
    parameters = inspect.signature(module.forward).parameters
    if "position_embeddings" not in parameters:
        return None
    try:
        if device not in inputs:
            inputs[device] = _inputs(decoder, device)
        states, positions = inputs[device]
        cache = CACHE if CACHE in parameters else "layer_past"
        options: dict[str, Any] = {"attention_mask": None, cache: _Catcher()}
        module(states, position_embeddings=embedding(states, positions, *more), **options)
    except _CaughtError as caught:
        return caught.keys
    except Exception:  # after any error of the model's class, the frequencies are unknown
        return None
    return None


def _rotated_by(keys: Tensor, rope: Tensor) -> Tensor:
    """Return a bool tensor `[]`: whether the keys at `POSITIONS` are the first key, rotated with
    the frequencies `rope`."""
    keys, positions = keys.float(), torch.tensor(POSITIONS, device=keys.device)
    if 2 * len(rope) > keys.shape[-1]:
        return torch.zeros((), dtype=torch.bool, device=keys.device)
    rotated = rotate(keys[:, :, :1].expand_as(keys), positions, rope.to(keys.device))
    return (keys - rotated).abs().amax() <= CLOSE * keys.abs().amax()


@contextmanager
def counting_ahead(embeddings: Collection[nn.Module], tokens: int) -> Iterator[None]:
    """Context manager that makes rotary embeddings use the frequencies of the whole prompt.

    Inside the `with` block, the model reads one chunk of the prompt. Some rotary embeddings choose
    their frequencies by the largest position that they receive. Therefore this function appends the
    position of the prompt's last token to the positions of each call, and removes the angles for
    this position from the result.

    Args:
        embeddings: The result of `length_dependent` for the model.
        tokens: Number of tokens in the prompt after the current chunk. 0 changes nothing.
    """
    hooks: list[Any] = []
    try:
        for embedding in embeddings if tokens else ():
            append = partial(_append_position, tokens)
            hooks.append(embedding.register_forward_pre_hook(append, with_kwargs=True))
            # run this hook before hooks of other code, so that they see the final result
            hooks.append(embedding.register_forward_hook(_remove_position, prepend=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _append_position(tokens: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: append the position of the prompt's last token to `position_ids`, `[...,
    T]`."""

    def longer(positions: Tensor) -> Tensor:
        return torch.cat([positions, positions[..., -1:] + tokens], dim=-1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
    hidden, positions, *others = args
    return (hidden, longer(positions), *others), kwargs


def _remove_position(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: remove the last position from cosines and sines, `[..., T, F]` each."""
    return tree_map_only(Tensor, lambda angles: angles[..., :-1, :], output)

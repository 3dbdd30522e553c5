"""Determine properties of a transformers model: its decoder, and the sizes and devices of its
layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.cache_argument import no_cache_argument, parameters, takes_cache
from kvindex_adapters.hf.unsupported import layer_configs

ONE_CALL = ("bamba", "jamba", "zamba")
"""Model types that must process a prompt in one call, because their linear attention starts from an
empty state in each call with several tokens. `tools/families.py` detects them."""

PREPARES_POSITIONS = "_prepare_position_ids_for_generation"
"""Name of the method with which transformers' `generate` makes `position_ids`."""


def reads_chunks(model: PreTrainedModel) -> bool:
    """Return True if chunked prefill has the same result as prefill in one call."""
    return model.config.get_text_config(decoder=True).model_type not in ONE_CALL


def one_call_error(model: PreTrainedModel, why: str) -> UnsupportedError:
    """Return the error for tokens that follow others in a model of `ONE_CALL`.

    `why` says what the caller tried, and what to do instead.
    """
    return UnsupportedError(
        f"model: got {type(model).__name__}, which must process a prompt in one call (its linear "
        f"attention starts from an empty state in each call with several tokens), {why}"
    )


def check_follows_none(model: PreTrainedModel, stored: int, count: int) -> None:
    """Raise UnsupportedError if the model would forget the tokens in its cache.

    Args:
        model: The model.
        stored: Number of tokens in the cache.
        count: Number of tokens that it is to process in the next call. A single token continues
            the state of the others.
    """
    if stored and count > 1 and not reads_chunks(model):
        raise one_call_error(
            model,
            f"but {count} tokens follow {stored} tokens in the cache; pass all tokens to an empty "
            "cache",
        )


def text_positions(model: PreTrainedModel, start: int, end: int) -> Tensor | None:
    """Return the `position_ids` to pass to a model for tokens `start` to `end - 1` of a text.

    They are the positions that transformers' `generate` would pass, int64 `[1, end - start]`. A
    model that is called without them may compute other positions: for roberta, they start at the
    padding id. The result is None for models without the argument `position_ids`, and for models
    with their own method to compute positions (for images).
    """
    usual, own = (getattr(one, PREPARES_POSITIONS, None) for one in (GenerationMixin, type(model)))
    if usual is not own or "position_ids" not in parameters(model):
        return None
    return torch.arange(start, end, device=model.device)[None]


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the module whose forward method takes the KV cache and runs the layers.

    Raises UnsupportedError if there is no such module.
    """
    modules = model.get_decoder(), model.base_model, model
    for module in modules:
        if takes_cache(module):
            return module
    raise no_cache_argument(model, modules)


def layer_device(decoder: nn.Module, number: int) -> torch.device:
    """Return the device on which a decoder layer runs.

    This is the device of the layer's weights, or the device to which accelerate copies offloaded
    weights.

    Args:
        decoder: The module of a transformers model that contains the decoder layers.
        number: The layer's `layer_idx`.
    """
    return device_of_modules((*modules_by_layer(decoder).get(number, ()), decoder))


def modules_by_layer(decoder: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules that have a `layer_idx`, as a dict from layer numbers."""
    found: dict[int, list[nn.Module]] = {}
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int):
            found.setdefault(number, []).append(module)
    return found


def device_of_modules(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first weight of modules and their submodules. `layer_device` says
    what this means for offloaded weights."""
    places = (_device_of(module) for part in modules for module in part.modules())
    return next((place for place in places if place is not None), torch.device("cpu"))


def _device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's own weights during its forward pass, or None if unknown."""
    weight = next(module.parameters(recurse=False), None)
    if weight is None or weight.device.type != "meta":
        return None if weight is None else weight.device
    hook: Any = getattr(module, "_hf_hook", None)  # accelerate's hook, if it offloads weights
    for each in getattr(hook, "hooks", (hook,)):
        if (place := getattr(each, "execution_device", None)) is not None:
            return torch.device(place)
    return None


def layer_geometry(config: Any, decoder: nn.Module, number: int) -> dict[str, Any]:
    """Return the keyword arguments of `Geometry` for a layer: heads and head dimension, from the
    configuration, and the device on which the layer runs (`layer_device`)."""
    layers, device = layer_configs(config), layer_device(decoder, number)
    config = layers[number] if len(layers) > 1 else config
    heads = getattr(config, "num_attention_heads", 1)
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:  # latent attention, in which the index stores latents (latent.py)
        width = rank + config.qk_rope_head_dim
        latent = {"head_dim": width, "value_dim": rank, "value_in_key": True}
        return {"q_heads": heads, "kv_heads": 1, **latent, "device": device}
    per_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "q_heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": per_head,
        "device": device,
    }


def attention_request(model: PreTrainedModel, name: str) -> dict[str, str]:
    """Return the argument for `set_attn_implementation` that changes only the decoder's attention.

    Raises UnsupportedError if the decoder's configuration is not a direct part of the model's
    configuration.
    """
    config = model.config.get_text_config(decoder=True)
    if config is model.config:
        return {"": name}
    for part in model.config.sub_configs:
        if getattr(model.config, part) is config:
            return {part: name}
    raise UnsupportedError(
        f"model: got {type(model).__name__}, whose decoder's configuration is not a direct part of "
        "the model's configuration"
    )

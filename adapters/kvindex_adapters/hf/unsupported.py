"""Check that a transformers model and its calls are supported. Raise UnsupportedError if not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.cache_argument import CACHE

UNKNOWN_TERMS = (
    "alibi",  # adds a term to the logits
    *("indices", "block_indices", "cache"),  # tokens that the model chooses itself
    *("cu_seq_lens_q", "cu_seq_lens_k"),  # several sequences packed into one tensor
)
"""Arguments of an attention call that change the result and that no index supports."""

OWN_CACHES = ("minimax", "xlstm")
"""Model types that accept only a cache of their own class."""

SINKS = ("s_aux", "sinks")
"""Names of the argument of an attention call with the logits of learned sinks."""

INDEXED = ("DynamicIndexedLayer", "MiniMaxM3VLSparseCacheLayer")
"""Names of transformers' cache-layer classes that also store keys of a trained indexer. Names are
used because some versions of transformers lack these classes."""

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options of `model.generate` that turn on assisted decoding."""


def has_full_attention(layer: Any) -> bool:
    """Return True if a cache layer of transformers stores the keys and values of all tokens."""
    kinds = DynamicLayer, LinearAttentionAndFullAttentionLayer
    return type(layer) in kinds or has_indexer(layer)


def has_indexer(layer: Any) -> bool:
    """Return True if a cache layer also stores keys of a trained indexer."""
    return type(layer).__name__ in INDEXED


def check_model(model: PreTrainedModel) -> Any:
    """Check that the adapter supports a model.

    Args:
        model: The model to attach to.

    Returns:
        The configuration of the model's text decoder (`get_text_config`).

    Raises:
        UnsupportedError: The model is not supported.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"model: got {name}, an encoder-decoder; allowed are decoders")
    if False in _values(config, "is_causal"):
        raise UnsupportedError(
            f"model: got {name}, which attends in both directions; allowed is causal"
        )
    if pools := _values(config, "index_kpool"):
        raise UnsupportedError(
            f"model: got {name}, whose trained indexer chooses pools of {pools[0]} tokens. It "
            "requires that update() of the cache appends new tokens immediately, but an index "
            "appends them only later, in the attention function"
        )
    if _values(config, "kv_lora_rank") and sharing_of(config):
        raise UnsupportedError(
            f"model: got {name}, in which layers attend to latents of other layers, but project "
            "them with weights of their own, which is not supported"
        )
    if config.model_type in OWN_CACHES:
        raise UnsupportedError(f"model: got {name}, which only accepts a cache of its own class")
    if any(_values(config, "num_kv_shared_layers")) and not sharing_of(config):
        raise UnsupportedError(
            f"model: got {name}, in which some layers use the keys and values of other layers, but "
            "the configuration does not say of which layers"
        )
    if any(getattr(module, "lambda_q1", None) is not None for module in model.modules()):
        raise UnsupportedError(
            f"model: got {name}, whose layers attend twice for each update of the cache, with half "
            "of the values each (differential attention)"
        )
    if any(_values(config, "cross_attention_layers")):
        raise UnsupportedError(f"model: got {name}, which has cross-attention layers")
    if True in _values(config, "output_attentions"):
        raise UnsupportedError(
            "model.config.output_attentions: got True, allowed is False, because a search does not "
            "compute the attention weights of all tokens"
        )
    layers = DynamicCache(config=config).layers
    if not any(has_full_attention(layer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UnsupportedError(
            f"model: got {name}, which has no full-attention layer (its cache layers: {kinds}); "
            "there is nothing to index"
        )
    return config


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer, or a list with only the model's configuration if all
    layers are alike."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def sharing_of(config: Any) -> dict[int, int]:
    """Find the layers that use the keys and values of another layer.

    Return a dict from the number of each such layer to the number of the layer whose keys and
    values it uses.
    """
    try:
        modes = getattr(config, "kv_sharing_modes", None) or []
    except ValueError:  # raised if all layers use the keys and values of another model
        return {}
    if not modes:
        return _sharing_by_count(config)
    stored: dict[str, int] = {}
    shared = {}
    for number, (mode, kind) in enumerate(zip(modes, config.layer_types, strict=True)):
        if mode == "store":
            stored[kind] = number
        elif mode is not None:
            shared[number] = stored[kind]
    return shared


COUNTED = "gemma3n_text", "gemma4_text"
"""Model types whose last layers have no keys of their own.

Such a layer uses the keys of the last layer of the same layer type that has keys.
"""


def _sharing_by_count(config: Any) -> dict[int, int]:
    """Find the layers that use the keys and values of another layer, in transformers 5.17.

    This version has no field `kv_sharing_modes`, so the field `num_kv_shared_layers` is read.
    """
    if config.model_type not in COUNTED:
        return {}
    kinds = config.layer_types
    first = len(kinds) - (config.num_kv_shared_layers or 0)
    if first <= 0:
        return {}
    return {n: first - 1 - kinds[:first][::-1].index(kinds[n]) for n in range(first, len(kinds))}


def _values(config: Any, name: str) -> list[Any]:
    """Return the values of a field in the configurations of all layers, except None."""
    values = [getattr(layer, name, None) for layer in layer_configs(config)]
    return [value for value in values if value is not None]


def check_dense(
    dense_layers: Any, layers: int, full: list[int], sharing: Mapping[int, int]
) -> None:
    """Check the option `dense_layers` of `attach`.

    Args:
        dense_layers: Numbers of the layers to keep dense.
        layers: Number of layers of the model.
        full: Numbers of the layers with full attention.
        sharing: Maps each layer without keys to the layer whose keys it uses.

    Raises:
        ValueError: A layer number does not exist, no layer with an index would remain, or a dense
            layer uses the keys of a layer that is not dense.
    """
    if not isinstance(dense_layers, Collection):
        raise ValueError(f"dense_layers: got {dense_layers!r}, allowed is a tuple of layer numbers")
    for number in dense_layers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < layers:
            raise ValueError(f"dense_layers: got {number!r}, allowed are layers 0 to {layers - 1}")
        if sharing.get(number) in set(full) - set(dense_layers):
            raise ValueError(
                f"dense_layers: got {number}, but this layer attends to the keys of layer "
                f"{sharing[number]}; pass {sharing[number]} as well"
            )
    if set(full) <= set(dense_layers):
        raise ValueError(
            f"dense_layers: got {list(dense_layers)}, which leaves no layer with an index; leave "
            f"out at least one of the full-attention layers {full}"
        )


def assisted(config: Any, options: dict[str, Any]) -> str | None:
    """Return the name of the option that turns on assisted decoding, or None.

    In assisted decoding, the first forward pass of transformers gets all ids, even if the cache
    already contains some of their tokens.
    """
    values = {name: options.get(name, getattr(config, name, None)) for name in ASSISTED}
    return next((name for name, value in values.items() if value not in (None, False)), None)


def check_generate(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of `model.generate`, and make sure that it uses the cache that is passed.

    Args:
        model: The attached model.
        args: Positional arguments of `model.generate`.
        options: Keyword arguments of `model.generate`.

    Returns:
        The keyword arguments to use, in which a `cache_implementation` of the generation
        configuration is turned off.

    Raises:
        UnsupportedError: The arguments would make the model run with another cache.
    """
    given = options.get("generation_config", args[1] if len(args) > 1 else None)
    config = given or model.generation_config
    kind = options.get("cache_implementation", getattr(given, "cache_implementation", None))
    if kind is not None:
        raise UnsupportedError(
            f"cache_implementation: got {kind!r}, allowed inside attach() is None, because the "
            "model uses the cache that attach() yielded"
        )
    if getattr(model.generation_config, "cache_implementation", None) is not None:
        options = {**options, "cache_implementation": None}
    for name, allowed in (("guidance_scale", (None, 1)), ("assistant_early_exit", (None,))):
        value = options.get(name, getattr(config, name, None))
        if value not in allowed:
            raise UnsupportedError(
                f"{name}: got {value}, allowed inside attach() is None, because the model would "
                "run a second time, with another cache"
            )
    cache, assistant = options.get(CACHE), options.get("assistant_model")
    if assisted(config, options) and cache is not None and cache.get_seq_length():
        raise UnsupportedError(
            f"{CACHE}: got a cache of {cache.get_seq_length()} tokens with assisted "
            "decoding, which needs an empty cache, because it processes all ids again"
        )
    if isinstance(assistant, nn.Module) and any(part in attached for part in assistant.modules()):
        raise UnsupportedError(
            "assistant_model: got an attached model, allowed is a model outside of attach(), "
            "because the assistant runs with another cache"
        )
    return options


def layer_number(module: nn.Module) -> int:
    """Return the number of the layer that an attention module belongs to, or -1 if unknown."""
    return int(getattr(module, "layer_idx", -1))


def attends_across_layers(module: Any) -> bool:
    """Return True if a module attends to states of the same token in other layers, not to tokens.

    Such a module belongs to no layer of the cache. Inkling2 has them from transformers 5.24 on.
    """
    return layer_number(module) < 0 and getattr(module, "is_causal", True) is False


def sink_logits_of(name: str, module: Any, extra: Any) -> Tensor | None:
    """Return the logits of learned sinks that an attention call passes.

    Args:
        name: The layer's name, for the error message.
        module: The attention module.
        extra: Further keyword arguments of the call.

    Returns:
        The logits `[H]` or `[B, H, T]`, or None if there are none.

    Raises:
        UnsupportedError: The module has learned sinks, but the call does not pass their logits.
    """
    given = next((extra[key] for key in SINKS if extra.get(key) is not None), None)
    if given is None and getattr(module, "sinks", None) is not None:
        raise UnsupportedError(
            f"{name}: got learned sinks that the attention call does not pass; the call must pass "
            f"them as {' or '.join(SINKS)}"
        )
    return given[..., 0] if given is not None and given.ndim == 4 else given


def check_attention(name: str, module: Any, tokens: int, dropout: float, extra: Any) -> None:
    """Check that an attention call is a plain softmax over keys and values.

    Args:
        name: The layer's name, for the error message.
        module: The attention module.
        tokens: Number of new tokens. Pass 1 if the argument `is_causal` of the call has no effect,
            because the call has a mask or the layer has past tokens.
        dropout: The dropout probability.
        extra: Further keyword arguments of the call.

    Raises:
        UnsupportedError: The call has an argument that changes the attention in another way.
    """
    for key in UNKNOWN_TERMS:
        if extra.get(key) is not None:
            raise UnsupportedError(
                f"{name}: got {key} in the attention call, which an index does not support"
            )
    if extra.get("output_attentions"):
        raise UnsupportedError("output_attentions: got True, allowed is False")
    causal = extra.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if tokens > 1 and not causal:
        raise UnsupportedError(
            f"{name}: got attention that is not causal; allowed is causal attention, or a mask of "
            "the tokens that each token attends to (for PaliGemma: pass token_type_ids)"
        )
    if dropout:
        raise UnsupportedError(f"dropout: got {dropout}, allowed is 0; call model.eval()")

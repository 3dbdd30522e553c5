"""What the adapter does not serve, refused in words rather than served wrongly."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer


class UnsupportedError(ValueError):
    """A model or a call that the adapter does not serve."""


UNKNOWN = (
    *("s_aux", "sinks", "position_bias", "alibi"),  # terms of the softmax
    *("indices", "block_indices", "cache"),  # rows that the model chooses itself
    *("cu_seq_lens_q", "cu_seq_lens_k"),  # several sequences packed into one
)
"""What a model's class may hand to attention that changes its result."""


def check_model(model: PreTrainedModel) -> Any:
    """The configuration of the model's decoder, if the adapter serves the model.

    Raises TypeError for what is no transformers model, UnsupportedError for one it cannot serve.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, allowed is a transformers model")
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"model: got {name}, an encoder-decoder; allowed are decoders")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError(
            f"model: got {name}, which attends in both directions; allowed is causal"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"model: got {name}, which uses multi-head latent attention (kv_lora_rank = "
            f"{config.kv_lora_rank}): its cache holds no keys that an index could search"
        )
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedError(
            f"model: got {name}, whose layers share keys and values with each other"
        )
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        raise UnsupportedError(
            f"model: got {name}, whose attention has learnt sinks in the softmax; the index's "
            "attention does not know them"
        )
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedError(f"model: got {name}, which has cross-attention layers")
    if getattr(config, "output_attentions", False):
        raise UnsupportedError(
            "model.config.output_attentions: got True, allowed is False: no step computes the "
            "attention weights of all tokens"
        )
    layers = DynamicCache(config=config).layers
    if not any(type(layer) is DynamicLayer for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UnsupportedError(
            f"model: got {name}, which has no full-attention layer (its cache layers: {kinds}); "
            "there is nothing to index"
        )
    return config


def check_attention(name: str, module: Any, tokens: int, dropout: float, extra: Any) -> None:
    """Refuse an attention call that asks for what the exact softmax over rows does not do.

    extra: keyword arguments of the call that the adapter has no use for. Raises UnsupportedError.
    """
    for key in UNKNOWN:
        if extra.get(key) is not None:
            raise UnsupportedError(
                f"{name}: got {key} in its attention, which the index does not know"
            )
    if extra.get("output_attentions"):
        raise UnsupportedError("output_attentions: got True, allowed is False")
    causal = extra.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if tokens > 1 and not causal:
        raise UnsupportedError(
            f"{name}: got attention that is not causal, allowed is causal attention"
        )
    if dropout:
        raise UnsupportedError(f"dropout: got {dropout}, allowed is 0: call model.eval()")

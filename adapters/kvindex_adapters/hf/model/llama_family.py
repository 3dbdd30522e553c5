"""Check that a transformers model computes exactly the forward pass of the Llama family."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.activations import ACT2FN

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.model.rotary import depends_on_length

CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Classes of the Llama family. Their subclasses are not allowed, because they may differ."""

PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"]))
"""Classes of modules that a model may contain in addition to those of its own file."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module in which torch stores hooks."""


def check_family(model: PreTrainedModel) -> None:
    """Raise UnsupportedError unless the model computes exactly the Llama family's forward."""
    if type(model) not in CLASSES:
        names = sorted(allowed.__name__ for allowed in CLASSES)
        got = type(model).__name__
        got = _full_name(type(model)) if got in names else got
        raise UnsupportedError(
            f"model: got {got}, allowed are the classes {', '.join(names)} of transformers"
        )
    check_modules(model)


def check_modules(model: PreTrainedModel) -> None:
    """Check the modules and the configuration of a model or decoder whose class is allowed.

    Call it again to notice changes.
    """
    _check_config(model.config.to_dict())
    _check_modules(model)
    body = model.base_model
    _check_rotary(body.rotary_emb, body.layers[0].self_attn.head_dim)
    _check_place(model)


def _check_config(config: dict[str, Any]) -> None:
    """Raise UnsupportedError for attention to only some tokens, or another activation."""
    kinds = config.get("layer_types")
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        if others:
            raise UnsupportedError(
                f"layer_types: got {', '.join(others)}, allowed is full_attention"
            )
    elif config.get("sliding_window") is not None:
        raise UnsupportedError(
            f"sliding_window: got {config['sliding_window']}, allowed is None: a layer attends to "
            "all tokens"
        )
    if config["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act: got {config['hidden_act']!r}, allowed is 'silu'")


def _check_modules(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for replaced modules, replaced forward methods, and hooks."""
    for name, module in model.named_modules():
        kind = type(module)
        if name.endswith(("_proj", "lm_head")) and kind is not nn.Linear:
            raise UnsupportedError(
                f"{name}: got {_full_name(kind)}, allowed is torch.nn.Linear: weights that are not "
                "quantized, with adapters merged into them (peft: merge_and_unload()); kvhf.attach "
                "runs models with other layers"
            )
        if kind.__module__ != type(model).__module__ and kind not in PLAIN:
            raise UnsupportedError(
                f"{name}: got {_full_name(kind)}, allowed is the model's own layer, from "
                f"{type(model).__module__}; kvhf.attach runs models with other layers"
            )
        own = vars(module)
        if "forward" in own or any(own[hooks] for hooks in HOOKS):
            raise UnsupportedError(
                f"{name or 'model'}: got a forward or hooks of its own, which the decoder does not "
                "call; allowed is none; kvhf.attach calls them"
            )


def _full_name(kind: type) -> str:
    """Return the name of a class with its module, because names occur in several libraries."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_rotary(rotary: Any, head_dim: int) -> None:
    """Raise UnsupportedError if rotary frequencies depend on the length or skip coordinates."""
    if depends_on_length(rotary.rope_type):
        raise UnsupportedError(
            f"rope_type: got {rotary.rope_type!r}, whose frequencies depend on the length of the "
            "sequence; allowed are those that do not"
        )
    if 2 * len(rotary.inv_freq) != head_dim:
        raise UnsupportedError(
            f"rotary_emb.inv_freq: got {len(rotary.inv_freq)} frequencies, allowed are "
            f"{head_dim // 2}, half of the head dimension"
        )


def _check_place(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for weights on several devices, of several dtypes, or on "meta"."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise UnsupportedError(f"model: got weights on {', '.join(devices)}, allowed is one device")
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    if len(dtypes) > 1:
        raise UnsupportedError(f"model: got weights of {', '.join(dtypes)}, allowed is one dtype")

"""Check that a model's forward pass is exactly that of the Llama family."""

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
"""Supported model classes. Subclasses are not allowed, because they may compute something else."""

PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"]))
"""Module classes that a model may contain in addition to the classes in its own source file."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Module attributes in which torch stores forward hooks."""


def check_family(model: PreTrainedModel) -> None:
    """Raise UnsupportedError unless the model's forward pass is exactly that of the Llama
    family."""
    if type(model) not in CLASSES:
        names = sorted(allowed.__name__ for allowed in CLASSES)
        got = type(model).__name__
        got = _full_name(type(model)) if got in names else got
        raise UnsupportedError(
            f"model: got {got}, allowed are the classes {', '.join(names)} of transformers"
        )
    check_modules(model)


def check_modules(model: PreTrainedModel) -> None:
    """Check the modules and the configuration of a model or decoder of a supported class.

    Raises UnsupportedError. Call this again to detect changes of the model.
    """
    _check_config(model.config.to_dict())
    _check_modules(model)
    body = model.base_model
    _check_rotary(body.rotary_emb, body.layers[0].self_attn.head_dim)
    _check_place(model)


def _check_config(config: dict[str, Any]) -> None:
    """Raise UnsupportedError for sliding-window layers, or an activation other than SiLU."""
    kinds = config.get("layer_types")
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        if others:
            raise UnsupportedError(
                f"layer_types: got {', '.join(others)}, allowed is full_attention"
            )
    elif config.get("sliding_window") is not None:
        raise UnsupportedError(
            f"sliding_window: got {config['sliding_window']}, allowed is None (full attention)"
        )
    if config["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act: got {config['hidden_act']!r}, allowed is 'silu'")


def _check_modules(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for replaced modules, replaced forward methods, and hooks."""
    for name, module in model.named_modules():
        kind = type(module)
        if name.endswith(("_proj", "lm_head")) and kind is not nn.Linear:
            raise UnsupportedError(
                f"{name}: got {_full_name(kind)}, allowed is torch.nn.Linear; load the model "
                "without quantization, merge adapters into it (peft: merge_and_unload()), or use "
                "kvhf.attach, which supports other layers"
            )
        if kind.__module__ != type(model).__module__ and kind not in PLAIN:
            raise UnsupportedError(
                f"{name}: got {_full_name(kind)}, allowed are classes from "
                f"{type(model).__module__}; use kvhf.attach, which supports other layers"
            )
        own = vars(module)
        if "forward" in own or any(own[hooks] for hooks in HOOKS):
            raise UnsupportedError(
                f"{name or 'model'}: got a replaced forward method or a hook, which the decoder "
                "does not call; remove it, or use kvhf.attach, which calls it"
            )


def _full_name(kind: type) -> str:
    """Return the name of a class with its Python module, because several libraries have classes of
    the same name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_rotary(rotary: Any, head_dim: int) -> None:
    """Raise UnsupportedError if rotary frequencies depend on the sequence length, or leave
    coordinates unrotated."""
    if depends_on_length(rotary.rope_type):
        raise UnsupportedError(
            f"rope_type: got {rotary.rope_type!r}, whose frequencies depend on the sequence "
            "length; allowed are types with fixed frequencies"
        )
    if 2 * len(rotary.inv_freq) != head_dim:
        raise UnsupportedError(
            f"rotary_emb.inv_freq: got {len(rotary.inv_freq)} frequencies, allowed is half of the "
            f"head dimension, {head_dim // 2}"
        )


def _check_place(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for weights on several devices, on the device "meta", or of several
    dtypes."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise UnsupportedError(f"model: got weights on {', '.join(devices)}, allowed is one device")
    dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
    if len(dtypes) > 1:
        raise UnsupportedError(f"model: got weights of {', '.join(dtypes)}, allowed is one dtype")

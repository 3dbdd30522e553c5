"""`unwrapped`: get the transformers model inside a `PeftModel`.

Any other object around a model raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from kvindex_adapters.common.unsupported import UnsupportedError


@runtime_checkable
class Adapted(Protocol):
    """Protocol that recognizes a `PeftModel` by its attributes, without importing peft."""

    peft_config: Mapping[str, Any]

    def get_base_model(self) -> nn.Module:
        """Return the base model, to which PEFT added adapters such as LoRA."""
        ...


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model to attach to.

    Args:
        model: A model of transformers, or a `PeftModel` around one.

    Returns:
        `model` itself, or the model inside the `PeftModel`.

    Raises:
        TypeError: `model` is neither. If it contains a transformers model, the message names the
            attribute.
        UnsupportedError: The `PeftModel` changes more than the weights of its base model.
    """
    if isinstance(model, PreTrainedModel):
        return model
    base = model.get_base_model() if isinstance(model, Adapted) else None
    if not isinstance(model, Adapted) or not isinstance(base, PreTrainedModel):
        raise no_model(model)
    name, configs = type(model).__name__, model.peft_config.values()
    if any(config.is_prompt_learning for config in configs):
        raise UnsupportedError(
            f"model: got {name} with prompt learning, which adds tokens or keys before the "
            "prompt; allowed are adapters that change only weights, such as LoRA"
        )
    if any(vars(config).get("alora_invocation_tokens") for config in configs):
        raise UnsupportedError(
            f"model: got {name} with alora_invocation_tokens, which change the weights within "
            "a prompt; allowed are adapters that apply to all tokens"
        )
    return base


def no_model(model: Any) -> TypeError:
    """Return the TypeError for an argument that is not a transformers model.

    Args:
        model: The argument. If it contains a transformers model, the message names the attribute.
    """
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = next((path for path, part in named if isinstance(part, PreTrainedModel)), None)
    message = f"model: got {type(model).__name__}, allowed is a transformers model"
    if inside is None:
        return TypeError(message)
    return TypeError(f"{message}; pass the transformers model inside it, model.{inside}")

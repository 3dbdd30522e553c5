"""Find the transformers model inside a `PeftModel`; raise an error for other wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from kvindex_adapters.common.unsupported import UnsupportedError


@runtime_checkable
class Adapted(Protocol):
    """The attributes by which a `PeftModel` is recognized without an import of peft."""

    peft_config: Mapping[str, Any]

    def get_base_model(self) -> nn.Module:
        """The model to which the adapters were added."""
        ...


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model to attach to.

    Args:
        model: A model of transformers, or a `PeftModel` around one.

    Returns:
        `model` itself, or the model inside the `PeftModel`.

    Raises:
        TypeError: `model` is something else. If a transformers model is inside it, the error names
            its attribute.
        UnsupportedError: The `PeftModel` does more than its base model when it is called.
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
            "prompt; allowed are adapters of the model's weights, such as LoRA"
        )
    if any(vars(config).get("alora_invocation_tokens") for config in configs):
        raise UnsupportedError(
            f"model: got {name} with alora_invocation_tokens, which change the weights within "
            "a prompt; allowed are adapters that apply to all tokens"
        )
    return base


def no_model(model: Any) -> TypeError:
    """Make the error for an argument that is not a transformers model.

    Args:
        model: The argument. If a transformers model is inside it, the error names its attribute.
    """
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = next((path for path, part in named if isinstance(part, PreTrainedModel)), None)
    message = f"model: got {type(model).__name__}, allowed is a transformers model"
    if inside is None:
        return TypeError(message)
    return TypeError(f"{message}: pass the one inside it, model.{inside}")

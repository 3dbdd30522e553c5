"""Models inside wrappers: adapters of peft are unwrapped, for others an error names the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedModel

from kvindex_adapters.hf.unsupported import UnsupportedError


@runtime_checkable
class Adapted(Protocol):
    """What a `PeftModel` has, which is known without an import of peft."""

    peft_config: Mapping[str, Any]

    def get_base_model(self) -> nn.Module:
        """The model that the adapters are in."""
        ...


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model to attach to: `model`, or the one inside a `PeftModel`.

    Raises TypeError for what is no transformers model, which says where one is inside it, and
    UnsupportedError for a `PeftModel` that does more than its base model when it is called.
    """
    if isinstance(model, PreTrainedModel):
        return model
    base = model.get_base_model() if isinstance(model, Adapted) else None
    if not isinstance(model, Adapted) or not isinstance(base, PreTrainedModel):
        raise no_model(model)
    name, configs = type(model).__name__, model.peft_config.values()
    if any(config.is_prompt_learning for config in configs):
        raise UnsupportedError(
            f"model: got {name} with prompt learning, which puts tokens or keys of its own before "
            "the prompt; allowed are adapters of the model's weights, such as LoRA"
        )
    if any(vars(config).get("alora_invocation_tokens") for config in configs):
        raise UnsupportedError(
            f"model: got {name} with alora_invocation_tokens, by which weights change within a "
            "prompt; allowed are adapters that hold for all tokens"
        )
    return base


def no_model(model: Any) -> TypeError:
    """The error for what is no transformers model; it says where one is inside it."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    inside = next((path for path, part in named if isinstance(part, PreTrainedModel)), None)
    message = f"model: got {type(model).__name__}, allowed is a transformers model"
    if inside is None:
        return TypeError(message)
    return TypeError(f"{message}: pass the one inside it, model.{inside}")

"""Checks that run whenever vLLM constructs an attention implementation or a metadata builder.

In an engine that uses kvindex, every attention layer must belong to the plug-in. Registering the
plug-in's backends does not guarantee this:

- vLLM may reuse an attention class that it selected for another engine of the process.
- Some models in vLLM choose an attention class themselves.
- Another plug-in may register its own class.

Therefore the checks run in `AttentionImplBase.__new__`, which constructs every implementation, and
in `AttentionMetadataBuilder.__new__`, which constructs every builder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionImplBase,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)

from kvindex_adapters.vllm.engine import CodesLayer, PluginAttention, options_of
from kvindex_adapters.vllm.unsupported import (
    refuse_dense_model,
    refuse_implementation,
    refuse_latent,
    refuse_layer,
)


def install() -> None:
    """Install the checks in this process. Repeated calls have no effect."""
    _check_before(AttentionImplBase, check_implementation)
    _check_before(AttentionMetadataBuilder, check_builder)


def check_implementation(made: type, *given: Any, **named: Any) -> None:
    """Check an attention implementation before vLLM constructs it.

    Args:
        made: The class of the attention implementation.
        *given: Positional arguments of the constructor.
        **named: Keyword arguments of the constructor.

    Raises:
        ValueError: The current engine uses kvindex, and the class does not belong to the plug-in.
    """
    config = get_current_vllm_config_or_none()
    if config is None or options_of(config) is None or issubclass(made, PluginAttention):
        return
    if issubclass(made, MLAAttentionImpl):
        refuse_latent(made.__name__)
    refuse_implementation(made.__name__)


def check_builder(made: type, *given: Any, **named: Any) -> None:
    """Check the layers of an engine before vLLM constructs a metadata builder.

    vLLM constructs builders after all layers. So this also detects layers with a cache but no
    attention implementation, and models without full attention.

    Args:
        made: The class of the builder.
        *given: Positional arguments of the constructor.
        **named: Keyword arguments of the constructor.

    Raises:
        ValueError: The engine uses kvindex, and a layer with a cache does not belong to the
            plug-in.
    """
    for config in (*given, *named.values()):
        if isinstance(config, VllmConfig) and options_of(config) is not None:
            check_layers(config.compilation_config.static_forward_context)


def check_layers(layers: dict[str, Any]) -> None:
    """Check that every layer with a cache belongs to the plug-in, and that at least one has an
    index.

    Subclasses of vLLM's `Attention` are not supported, because they change the mask, the cache or
    the block table.

    Args:
        layers: Maps names to the layers of an engine that uses kvindex.

    Raises:
        ValueError: A layer does not belong to the plug-in, or no layer has an index.
    """
    from vllm.model_executor.layers.attention import (
        Attention,
    )  # cannot be imported while vLLM loads plug-ins

    for name, layer in layers.items():
        if isinstance(layer, CodesLayer) or not isinstance(layer, AttentionLayerBase):
            continue
        if type(layer) is not Attention or not isinstance(layer.impl, PluginAttention):
            refuse_layer(name, type(layer).__name__)
    if not any(isinstance(layer, CodesLayer) for layer in layers.values()):
        refuse_dense_model()


def _check_before(base: Any, check: Callable[..., None]) -> None:
    """Patch `base.__new__` to call `check` first, with the same arguments."""
    own = base.__new__
    if own.__module__ == __name__:
        return

    def new(cls: type, *given: Any, **named: Any) -> Any:
        check(cls, *given, **named)
        return own(cls) if own is object.__new__ else own(cls, *given, **named)

    base.__new__ = staticmethod(new)

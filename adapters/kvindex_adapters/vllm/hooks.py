"""Checks that run whenever vLLM constructs an attention implementation or a metadata builder.

If an engine uses kvindex, all its attention must go through the plug-in. Registering backends does
not ensure this:

- vLLM caches a selected class for all engines of a process.
- Some models of vLLM name a class themselves.
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
    """Install the checks in this process. Further calls change nothing."""
    _check_before(AttentionImplBase, check_implementation)
    _check_before(AttentionMetadataBuilder, check_builder)


def check_implementation(made: type, *given: Any, **named: Any) -> None:
    """Check an attention implementation before vLLM constructs it.

    Args:
        made: The class.
        *given: Positional arguments of its constructor.
        **named: Keyword arguments of its constructor.

    Raises:
        ValueError: The current engine uses kvindex, and the class is not the plug-in's.
    """
    config = get_current_vllm_config_or_none()
    if config is None or options_of(config) is None or issubclass(made, PluginAttention):
        return
    if issubclass(made, MLAAttentionImpl):
        refuse_latent(made.__name__)
    refuse_implementation(made.__name__)


def check_builder(made: type, *given: Any, **named: Any) -> None:
    """Check the layers of an engine before vLLM constructs a metadata builder.

    vLLM constructs the builders after all layers. So this also finds layers without an attention
    implementation, and models without attention.

    Args:
        made: The class of the builder.
        *given: Positional arguments of its constructor.
        **named: Keyword arguments of its constructor.

    Raises:
        ValueError: The engine uses kvindex, and a layer with a cache does not go through the
            plug-in.
    """
    for config in (*given, *named.values()):
        if isinstance(config, VllmConfig) and options_of(config) is not None:
            check_layers(config.compilation_config.static_forward_context)


def check_layers(layers: dict[str, Any]) -> None:
    """Check that every layer with a cache goes through the plug-in, and that one searches.

    Subclasses of vLLM's `Attention` are not supported, because they change the mask, the cache or
    the block table.

    Args:
        layers: The layers of an engine that uses kvindex, by name.

    Raises:
        ValueError: A layer does not go through the plug-in, or none searches.
    """
    from vllm.model_executor.layers.attention import Attention  # not while plug-ins are loaded

    for name, layer in layers.items():
        if isinstance(layer, CodesLayer) or not isinstance(layer, AttentionLayerBase):
            continue
        if type(layer) is not Attention or not isinstance(layer.impl, PluginAttention):
            refuse_layer(name, type(layer).__name__)
    if not any(isinstance(layer, CodesLayer) for layer in layers.values()):
        refuse_dense_model()


def _check_before(base: Any, check: Callable[..., None]) -> None:
    """Call `check` with the same arguments before each call of `base.__new__`."""
    own = base.__new__
    if own.__module__ == __name__:
        return

    def new(cls: type, *given: Any, **named: Any) -> Any:
        check(cls, *given, **named)
        return own(cls) if own is object.__new__ else own(cls, *given, **named)

    base.__new__ = staticmethod(new)

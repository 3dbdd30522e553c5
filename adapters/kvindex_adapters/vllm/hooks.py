"""Checks that run wherever vLLM makes an attention implementation or a metadata builder.

An engine that asks for kvindex must not attend in any other way. Registered backends alone do not
ensure this: vLLM caches a selected class for all engines of a process, some of its models name a
class themselves, and another plug-in may register its own. Every implementation is made by
`AttentionImplBase.__new__`, though, and every builder by `AttentionMetadataBuilder.__new__`.
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
    """Run the checks in this process from now on. Further calls change nothing."""
    _check_before(AttentionImplBase, check_implementation)
    _check_before(AttentionMetadataBuilder, check_builder)


def check_implementation(made: type, *given: Any, **named: Any) -> None:
    """Raise ValueError for a class that is not the plug-in's, if the current engine asks for it."""
    config = get_current_vllm_config_or_none()
    if config is None or options_of(config) is None or issubclass(made, PluginAttention):
        return
    if issubclass(made, MLAAttentionImpl):
        refuse_latent(made.__name__)
    refuse_implementation(made.__name__)


def check_builder(made: type, *given: Any, **named: Any) -> None:
    """Raise ValueError for an engine that asks for the plug-in and has a layer without it.

    vLLM makes the builders once all layers exist. This finds layers that have no implementation,
    and models that have no attention.
    """
    for config in (*given, *named.values()):
        if isinstance(config, VllmConfig) and options_of(config) is not None:
            check_layers(config.compilation_config.static_forward_context)


def check_layers(layers: dict[str, Any]) -> None:
    """Raise ValueError for a layer with a cache that is not the plug-in's, or if none searches.

    Subclasses of vLLM's `Attention` change the mask, the cache or the block table.
    """
    from vllm.model_executor.layers.attention import Attention  # too early for `install`

    for name, layer in layers.items():
        if isinstance(layer, CodesLayer) or not isinstance(layer, AttentionLayerBase):
            continue
        if type(layer) is not Attention or not isinstance(layer.impl, PluginAttention):
            refuse_layer(name, type(layer).__name__)
    if not any(isinstance(layer, CodesLayer) for layer in layers.values()):
        refuse_dense_model()


def _check_before(base: Any, check: Callable[..., None]) -> None:
    """Call `check` with the arguments of each `base.__new__`, before it."""
    own = base.__new__
    if own.__module__ == __name__:
        return

    def new(cls: type, *given: Any, **named: Any) -> Any:
        check(cls, *given, **named)
        return own(cls) if own is object.__new__ else own(cls, *given, **named)

    base.__new__ = staticmethod(new)

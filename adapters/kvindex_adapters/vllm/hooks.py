"""Checks that run whenever vLLM constructs a configuration, an attention implementation or a
metadata builder.

The configuration is checked in the process that starts the engine, before any other process starts.
So one error reports all settings that do not fit, and nothing hides it. What depends on the model's
layers is checked when they are constructed, which may be in another process.

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
from functools import wraps
from typing import Any

import vllm.v1.engine.utils as engine_processes
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionImplBase,
    AttentionMetadataBuilder,
)
from vllm.v1.executor.abstract import Executor

from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm import metrics, reports, request_hooks
from kvindex_adapters.vllm.engine import CodesLayer, PluginAttention, options_of
from kvindex_adapters.vllm.options import is_named
from kvindex_adapters.vllm.unsupported import (
    can_pack,
    engine_reasons,
    has_draft_model,
    on_a_cpu,
    refuse,
    refuse_dense_model,
    refuse_implementation,
    refuse_layer,
)


def install() -> None:
    """Install the checks in this process. Repeated calls have no effect."""
    _check_before(AttentionImplBase, check_implementation)
    _check_before(AttentionMetadataBuilder, check_builder)
    if VllmConfig.__init__.__module__ != __name__:
        VllmConfig.__init__ = _checked(VllmConfig.__init__)
    if on_a_cpu():
        _keep_settings(type(current_platform))
    request_hooks.install()
    Executor.__init__ = reports.restating(Executor.__init__)
    engine_processes.wait_for_engine_startup = reports.restating(
        engine_processes.wait_for_engine_startup
    )


def prepare(attention: Any, cache: Any, scheduler: Any) -> None:
    """Set what the plug-in needs in an engine that uses kvindex, where the user has set nothing.

    - Blocks have 256 tokens.
    - If codes have pages of their own, layers with full attention and sliding-window layers have
      one block table.

    Args:
        attention: The engine's `AttentionConfig`, or None.
        cache: The engine's `CacheConfig`, or None.
        scheduler: The engine's `SchedulerConfig`, or None.
    """
    if not is_named(attention):
        return
    if cache is not None and not cache.user_specified_block_size:
        cache.block_size = BLOCK
        cache.user_specified_block_size = True  # so vLLM does not choose another size
    unset = scheduler is not None and scheduler.disable_hybrid_kv_cache_manager is None
    if unset and not can_pack():
        scheduler.disable_hybrid_kv_cache_manager = True


def settings_to_keep(config: VllmConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that vLLM would change on a CPU in models with multi-head latent
    attention, although the plug-in supports them.

    vLLM's own attention needs blocks of 16 tokens, whole prompts in one step, and no prefix
    caching.

    Args:
        config: The configuration of an engine on a CPU.

    Returns:
        Name of a setting -> object that has it, and its value. Empty for engines that do not search
        latents.
    """
    latents = config.model_config is not None and config.model_config.use_mla
    if not latents or not is_named(config.attention_config):
        return {}
    cache, scheduler = config.cache_config, config.scheduler_config
    return {
        name: (owner, vars(owner)[name])
        for owner, names in (
            (cache, ("block_size", "enable_prefix_caching")),
            (scheduler, ("enable_chunked_prefill", "max_num_batched_tokens")),
        )
        for name in names
    }


def check_config(config: VllmConfig) -> None:
    """Check an engine's configuration, before vLLM starts other processes.

    Args:
        config: The engine's configuration.

    Raises:
        ValueError: The engine uses kvindex, and a setting does not fit. The message reports all of
            them.
    """
    refuse(*engine_reasons(config))
    if is_named(config.attention_config):
        reports.open_folder()
        reports.take()  # reasons of an earlier engine that nothing has read
        metrics.report()


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
            layers = config.compilation_config.static_forward_context
            # with pipeline parallelism, the layers of another process may have indexes
            alone = config.parallel_config.pipeline_parallel_size == 1
            check_layers(layers, index_required=alone, drafts=has_draft_model(config))


def check_layers(
    layers: dict[str, Any], *, index_required: bool = True, drafts: bool = False
) -> None:
    """Check that every layer with a cache of keys and values belongs to the plug-in, and that at
    least one has an index.

    Layers of linear attention have a state of fixed size instead of such a cache.

    Other subclasses of vLLM's `Attention` and `MLAAttention` than `ChunkedLocalAttention` are not
    supported, because they change the mask, the cache or the block table.

    Args:
        layers: Maps names to the layers of an engine that uses kvindex.
        index_required: Whether at least one of the layers must have an index.
        drafts: Whether there are also layers of a draft model. They use vLLM's own attention. An
            attention layer of the model itself cannot do so (see `check_implementation`).

    Raises:
        ValueError: A layer does not belong to the plug-in, or no layer has an index.
    """
    # these cannot be imported while vLLM loads plug-ins
    from vllm.model_executor.layers.attention import (
        Attention,
        ChunkedLocalAttention,
        MLAAttention,
    )
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    for name, layer in layers.items():
        if isinstance(layer, CodesLayer | MambaBase) or not isinstance(layer, AttentionLayerBase):
            continue
        kind = type(layer)
        known = kind in (Attention, MLAAttention, ChunkedLocalAttention)
        ours = known and (drafts or isinstance(layer.impl, PluginAttention))
        chunked = kind is ChunkedLocalAttention
        if not ours or (chunked and vars(layer.impl).get("codes") is not None):
            refuse_layer(name, kind.__name__)
    if index_required and not any(isinstance(layer, CodesLayer) for layer in layers.values()):
        refuse_dense_model()


def _checked(own: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of `VllmConfig` that prepares and checks the configuration."""

    @wraps(own)
    def construct(self: Any, *given: Any, **named: Any) -> None:
        parts = (named.get(f"{name}_config") for name in ("attention", "cache", "scheduler"))
        prepare(*parts)
        own(self, *given, **named)
        check_config(self)

    construct.__module__ = __name__
    return construct


def _keep_settings(platform: Any) -> None:
    """Patch the method by which vLLM adapts an engine's configuration to a CPU."""
    own = platform.check_and_update_config
    if own.__module__ == __name__:
        return

    @wraps(own)
    def update(config: VllmConfig) -> None:
        kept = settings_to_keep(config)
        own(config)
        for name, (owner, value) in kept.items():
            setattr(owner, name, value)

    update.__module__ = __name__
    platform.check_and_update_config = staticmethod(update)


def _check_before(base: Any, check: Callable[..., None]) -> None:
    """Patch `base.__new__` to call `check` first, with the same arguments."""
    own = base.__new__
    if own.__module__ == __name__:
        return

    def new(cls: type, *given: Any, **named: Any) -> Any:
        check(cls, *given, **named)
        return own(cls) if own is object.__new__ else own(cls, *given, **named)

    base.__new__ = staticmethod(new)

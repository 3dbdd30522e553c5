"""The changes that `attach_batch` makes to a model: its class, and the attention of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.generation import ContinuousBatchingConfig

from kvindex_adapters.common.parallel import rank
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.attention import NAME
from kvindex_adapters.hf.batching.state import Batching
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.patch import IMPLEMENTATION, Substitute, copied_as
from kvindex_adapters.hf.model.rotary import length_dependent
from kvindex_adapters.hf.unsupported import has_indexer, layer_configs, layer_number, sharing_of

NOT_TRIED = (
    *("use_cuda_graph", "q_padding_interval_size", "kv_padding_interval_size"),
    *("varlen_compile_config", "decode_compile_config", "default_compile_level"),
    *("use_async_batching", "cpu_offload_space"),
)
"""Options of `ContinuousBatchingConfig` that `attach_batch` rejects, because they change the
forward pass and were not tested."""


class BatchedModel(nn.Module):
    """Mixin that makes each forward call of a model one step of continuous batching with
    indexes."""

    _supports_flash_attn = False  # otherwise transformers would switch to flash attention

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then make transformers' continuous-batching manager."""
        parent: Any = super()
        batching = _batching(self)
        if batching is None:
            return parent.init_continuous_batching(*args, **kwargs)
        signature = inspect.signature(parent.init_continuous_batching)
        check_batching(signature.bind(*args, **kwargs).arguments)
        manager = parent.init_continuous_batching(*args, **kwargs)
        batching.managers.add(manager)
        return manager

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate_batch`. Re-raise an UnsupportedError from its worker
        thread."""
        parent: Any = super()
        batching = _batching(self)
        if batching is None:
            return parent.generate_batch(*args, **kwargs)
        batching.refused = None
        try:
            results = parent.generate_batch(*args, **kwargs)
        finally:
            batching.forget()
        if batching.refused is not None:
            raise batching.refused
        return results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass as one step of continuous batching."""
        parent: Any = super()
        batching = _batching(self)
        if batching is None:
            return parent.__call__(*args, **kwargs)
        with attached[self].exclusive(), batching.running(kwargs.get("cache")):
            return parent.__call__(*args, **kwargs)


def _batching(model: nn.Module) -> Batching | None:
    """Return the object that `attach_batch` yielded, or None outside of its context."""
    attachment = attached.get(model)
    return None if attachment is None else attachment.batching


@contextmanager
def own_attention(decoder: nn.Module, layers: Collection[int]) -> Iterator[None]:
    """Context manager that switches some layers to the adapter's attention function.

    Only these layers get changed copies of their configurations. The model's configuration stays
    the same, because masks, other layers and transformers' checks use it. Raises UnsupportedError
    if a layer has no configuration.
    """
    replaced = list[tuple[nn.Module, str, PreTrainedConfig, PreTrainedConfig]]()
    try:
        for module in decoder.modules():
            if layer_number(module) not in layers:
                continue
            for name, config in list(vars(module).items()):
                if isinstance(config, PreTrainedConfig):
                    own = copy(config)
                    vars(own)[IMPLEMENTATION] = Substitute.of(NAME, config)
                    copied_as(own, config)
                    vars(module)[name] = own
                    replaced.append((module, name, config, own))
        without = set(layers) - {layer_number(module) for module, *_ in replaced}
        if without:
            raise UnsupportedError(
                f"model: got {type(decoder).__name__}, whose layers {sorted(without)} do not go "
                "through transformers' AttentionInterface"
            )
        yield
    finally:
        for module, name, config, own in replaced:
            if vars(module).get(name) is own:
                vars(module)[name] = config


def check_paged_model(model: nn.Module, config: Any, layers: list[Any]) -> None:
    """Raise UnsupportedError for a model that `attach_batch` does not support.

    Args:
        model: The model.
        config: The configuration of the model's text decoder (`get_text_config`).
        layers: The layers of a transformers cache for this model.
    """
    name = type(model).__name__
    implementation = vars(config)[IMPLEMENTATION]
    kinds = {type(layer).__name__ for layer in layers}
    refused = (
        (implementation != "sdpa", f"attention {implementation!r}", "'sdpa'"),
        (sharing_of(config), "layers that share keys", "a model whose layers each have keys"),
        (vars(config).get("kv_lora_rank"), "latent attention", "keys and values"),
        (
            len(layer_configs(config)) > 1,
            "layers of several shapes",
            "a model with layers of equal shape",
        ),
        (any(map(has_indexer, layers)), "a sparse-attention indexer", "plain attention"),
        (
            kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"},
            f"cache layers {sorted(kinds)}",
            "full and sliding attention, which transformers' paged cache supports",
        ),
        (
            length_dependent(model),
            "rotary frequencies that depend on the length",
            "fixed frequencies: all requests would get the frequencies of the longest request",
        ),
        (
            vars(config).get("compile_config"),
            "a compile_config",
            "None (compilation was not tested)",
        ),
        (rank()[1] > 1, f"{rank()[1]} processes", "1 (other numbers were not tested)"),
    )
    for found, got, allowed in refused:
        if found:
            raise UnsupportedError(
                f"model: got {name} with {got}, allowed in attach_batch() is {allowed}"
            )


def check_batching(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for batching options that were not tested with `attach_batch`.

    Args:
        arguments: The arguments of `init_continuous_batching`.
    """
    generation = arguments.get("generation_config")
    nested = None if generation is None else vars(generation).get("continuous_batching_config")
    for given in (arguments.get("continuous_batching_config"), nested):
        if not isinstance(given, ContinuousBatchingConfig):
            continue
        for name in NOT_TRIED:
            value = vars(given).get(name)
            chosen = any(value) if isinstance(value, tuple) else bool(value)
            if chosen:
                raise UnsupportedError(
                    f"{name}: got {value}, but attach_batch() reads lengths on the host, and was "
                    f"not tested with {name}; leave this option out"
                )

"""`probe`: run a model on a few fixed tokens, so that a saved cache can recognize its model.

The decoder processes fixed ids with eager attention and an empty transformers cache. The probe is a
sample of the keys and values of each layer, and of the last hidden states. It depends on all
weights (also if offloaded or quantized), adapters and hooks. It does not depend on settings that
affect only long texts, such as rotary frequencies beyond a length; compare configurations to detect
those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from kvindex.core.transaction import in_plain_torch
from kvindex.storage.state import State
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import layer_device
from kvindex_adapters.hf.model.patch import IMPLEMENTATION

SEQUENCES, TOKENS = 8, 8
"""Number of sequences in the probe, and number of tokens in each. In mixture-of-experts models,
rounding may send a token to another expert. With several sequences, this changes only one of
them."""

SAMPLES = 521
"""Number of evenly spaced elements to store of each tensor. It is prime, so that the spacing is not
a multiple of a head dimension. The samples of 36 layers take 150 KB."""

PLAIN = "eager"
"""Name of the attention implementation that every transformers model supports on every device."""

ROUNDINGS = 3.0
"""Tolerance in units of `eps * (1 / 2 + sqrt(layer))`, because rounding errors add up over the
layers.

The following relative differences from exact arithmetic were measured in bfloat16 and float16:

- The keys and values of the first layer differ by up to 0.5 `eps`.
- The keys and values of later layers differ by up to 0.8 units in SmolLM2-135M and in random models
of up to 80 layers, and by up to 1.6 units in tiny random models of 150 families.
- The difference between two devices is larger by the square root of 2.

For comparison, a LoRA adapter of queries and values with 5% of the norm of the weights changes the
values of SmolLM2's first layer by 13 `eps` of bfloat16. With half of this norm, the adapter changes
the values by 6.6 `eps`."""

EXACT, TF32 = 2.0**-17, 2.0**-10
"""Relative rounding errors (`eps`) that are assumed for float32 models.

`EXACT` is for CPUs. It is 64 times the rounding error of float32, 2^-23. Differences of up to 3
times this error were measured. `TF32` is for devices that may round products to TF32, which has 10
fraction bits.
"""


class Probe(NamedTuple):
    """A sample of the keys, values and hidden states that a model computes.

    Args:
        dtype: The dtype of the hidden states.
        eps: The relative rounding error of matrix products in the model.
        parts: Maps "layer.name" to samples, float32 `[n]` on the CPU. Names are "keys", "values"
            and "hidden_states".
    """

    dtype: torch.dtype
    eps: float
    parts: State


class Difference(NamedTuple):
    """The tensor in which two probes differ most.

    Args:
        layer: Number of the layer.
        name: "keys", "values" or "hidden_states".
        size: The relative difference.
        tolerance: The largest relative difference that is considered to be a rounding error.
    """

    layer: int
    name: str
    size: float
    tolerance: float


@in_plain_torch
@torch.no_grad()
def probe(decoder: nn.Module, config: Any) -> Probe:
    """Run a decoder once on fixed tokens. This also works inside `attach`.

    Modules, configurations and random number generators are restored afterwards. Hooks are called,
    because they may change what the model computes.

    Args:
        decoder: The module with a forward pass that takes the cache.
        config: The configuration from which caches of the model are made.

    Returns:
        A sample of the keys, values and last hidden states.

    Raises:
        RuntimeError: The decoder failed on these tokens.
    """
    words = config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 2 * SEQUENCES * TOKENS, 2) * words // (2 * SEQUENCES * TOKENS)
    cache, device = DynamicCache(config=config), layer_device(decoder, 0)
    given = {CACHE: cache, "use_cache": True}
    try:
        with _plain(decoder):
            # call the model without its own `__call__`, because inside `attach` that method
            # accepts only a cache of the class `IndexCache`
            output = nn.Module.__call__(
                decoder, input_ids=ids.reshape(SEQUENCES, TOKENS).to(device), **given
            )
        hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        parts = {f"{len(cache.layers)}.hidden_states": _sample(hidden)}
        for number, layer in enumerate(cache.layers):
            for name in ("keys", "values"):
                rows = vars(layer).get(name)
                if isinstance(rows, Tensor) and rows.numel():
                    parts[f"{number}.{name}"] = _sample(rows)
    except Exception as error:
        raise RuntimeError(
            f"model: got {type(decoder).__name__}, which failed on {SEQUENCES} sequences of "
            f"{TOKENS} tokens with {PLAIN!r} attention ({type(error).__name__}: {error}). A saved "
            "cache needs the keys and values of these fixed tokens to identify its model"
        ) from error
    return Probe(hidden.dtype, _eps(hidden), parts)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], eps: float) -> Difference:
    """Return the tensor in which two probes differ most, relative to the tolerance.

    The relative difference is the median absolute difference, divided by the median absolute value
    of `other`. A few large coordinates, or a few tokens that another expert processes, do not
    affect these medians. Tensors that only one probe has (because of another version of
    transformers) are skipped.

    Args:
        one: `Probe.parts` of a model.
        other: `Probe.parts` of the model to compare with.
        eps: The larger of the relative rounding errors of the two probes.
    """
    found = []
    for part in one.keys() & other.keys():
        number, _, name = part.partition(".")
        tolerance = ROUNDINGS * eps * (0.5 + int(number) ** 0.5)
        found.append(Difference(int(number), name, _size(one[part], other[part]), tolerance))
    return max(found, key=lambda each: each.size / each.tolerance)


def _eps(hidden: Tensor) -> float:
    """Return the relative rounding error of a model's matrix products."""
    if hidden.dtype.itemsize < torch.float32.itemsize:
        return torch.finfo(hidden.dtype).eps
    exact = torch.get_float32_matmul_precision() == "highest" and hidden.device.type == "cpu"
    return EXACT if exact else TF32


def _size(one: Tensor, other: Tensor) -> float:
    """Return the median absolute difference of two tensors, relative to the second tensor.

    The difference is divided by the median absolute value of the second tensor's elements.

    NaN and infinity are replaced by 0. If the shapes differ, the result is infinity.
    """
    if one.shape != other.shape:
        return torch.inf
    one, other = (part.nan_to_num(0, 0, 0) for part in (one, other))
    apart, scale = float((one - other).abs().median()), float(other.abs().median())
    return apart / scale if scale else torch.inf if apart else 0.0


def _sample(tensor: Tensor) -> Tensor:
    """Return at most `SAMPLES` evenly spaced elements of a tensor, float32 on the CPU."""
    flat = tensor.reshape(-1)
    count = min(len(flat), SAMPLES)
    return flat[torch.arange(count, device=flat.device) * len(flat) // count].float().cpu()


@contextmanager
def _plain(decoder: nn.Module) -> Iterator[None]:
    """Context manager that sets evaluation mode and eager attention, and restores the model at the
    end.

    It also restores the attributes and buffers of modules, because some rotary embeddings change
    their buffers with the sequence length.
    """
    own = [vars(module) for module in decoder.modules()]
    before = [(each, dict(each), each["_buffers"], dict(each["_buffers"])) for each in own]
    configs = {
        id(value): vars(value)
        for each in own
        for value in each.values()
        if isinstance(value, PreTrainedConfig)
    }.values()
    attention = [(config, config.get(IMPLEMENTATION)) for config in configs]
    places = {layer_device(decoder, 0), *(weight.device for weight in decoder.parameters())}
    try:
        for each in own:
            each["training"] = False
        for config in configs:
            config[IMPLEMENTATION] = PLAIN
        with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
            yield
    finally:
        for config, name in attention:
            config[IMPLEMENTATION] = name
        for each, attributes, buffers, earlier in before:
            for name in each.keys() - attributes.keys():
                del each[name]
            each.update(attributes)
            buffers.clear()
            buffers.update(earlier)

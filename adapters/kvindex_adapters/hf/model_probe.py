"""What a model computes for a few fixed tokens: by this a saved cache recognizes its model.

The decoder reads fixed ids with plain attention and an empty cache of transformers. The probe is a
sample of the keys and values in that cache, layer by layer, and of the last hidden states. So it
sees weights wherever they are stored (offloaded, quantized, in buffers), adapters and hooks. It
does not see settings that need a long text, such as rotary frequencies beyond a length: for those
compare the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig

from kvindex.core.guard import in_plain_torch
from kvindex.storage.state import State
from kvindex_adapters.hf.model_info import layer_device
from kvindex_adapters.hf.model_patch import IMPLEMENTATION

SEQUENCES, TOKENS = 8, 8
"""Sequences of the probe, and tokens of each. Several, because another order of sums may choose
another expert for one token: that changes its sequence, and leaves the others as they are."""

SAMPLES = 521
"""Numbers that are stored of each tensor, evenly spaced. A prime, so that no head dimension divides
the distance between two of them. 36 layers take 150 KB."""

PLAIN = "eager"
"""The attention that every model of transformers has on every device."""

ROUNDINGS = 3.0
"""Tolerance in units of `eps * (1 / 2 + sqrt(layer))`, as roundings add up from layer to layer.

Measured in bfloat16 and float16, as the distance from exact products: keys and values of the first
layer are off by up to 0.5 `eps`. Later ones of SmolLM2-135M and of random models of up to 80 layers
are off by up to 0.8 units, of tiny random models of 150 families by up to 1.6. Two devices differ
by the root of 2 times that. A low-rank adapter for queries and values, of 5% of the norm of the
weights, changes the values of SmolLM2's first layer by 13 `eps` of bfloat16; scaling it by half
changes them by 6.6."""

EXACT, TF32 = 2.0**-17, 2.0**-10
"""`eps` of float32 on a CPU: 64 roundings of it, where 3 were measured; and where products may be
rounded to TF32, whose fraction has 10 bits (convolutions on a GPU are by default)."""


class Probe(NamedTuple):
    """A sample of what a model computes.

    dtype: of its hidden states; eps: their relative rounding; parts: "layer.name" -> float32 `[n]`,
    on the CPU.
    """

    dtype: torch.dtype
    eps: float
    parts: State


class Difference(NamedTuple):
    """Where two probes differ most: which part of which layer, how far, and what may be rounding.

    size, tolerance: relative to the part's numbers.
    """

    layer: int
    name: str
    size: float
    tolerance: float


@in_plain_torch
@torch.no_grad()
def probe(decoder: nn.Module, config: Any) -> Probe:
    """Run the decoder once over fixed tokens, also while it is attached.

    Modules, configurations and random generators are afterwards as before. Hooks of the modules
    are called, since they may change what the model computes.

    Args:
        decoder: The module whose forward takes `past_key_values`.
        config: The configuration that a cache of the model is made with.

    Raises:
        RuntimeError: The decoder fails.
    """
    words = config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 2 * SEQUENCES * TOKENS, 2) * words // (2 * SEQUENCES * TOKENS)
    cache, device = DynamicCache(config=config), layer_device(decoder, 0)
    given = dict(past_key_values=cache, use_cache=True)
    try:
        with _plain(decoder):
            # not the decoder's own __call__: `attach` puts a transaction around that
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
            f"model: got {type(decoder).__name__}, which fails for {SEQUENCES} sequences of "
            f"{TOKENS} tokens with {PLAIN!r} attention ({type(error).__name__}: {error}); what it "
            "computes for them tells which model a saved cache is of"
        ) from error
    return Probe(hidden.dtype, _eps(hidden), parts)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], eps: float) -> Difference:
    """The part in which two probes differ most, in units of what rounding by `eps` explains.

    The size of a difference is the median of the parts' differences over the median of their
    numbers, so that neither a few large coordinates nor a few tokens with another expert decide.
    Parts that only one of them has, as with another version of transformers, do not count.
    """
    found = []
    for part in one.keys() & other.keys():
        number, _, name = part.partition(".")
        tolerance = ROUNDINGS * eps * (0.5 + int(number) ** 0.5)
        found.append(Difference(int(number), name, _size(one[part], other[part]), tolerance))
    return max(found, key=lambda each: each.size / each.tolerance)


def _eps(hidden: Tensor) -> float:
    """How far a model's products are rounded, relative to them."""
    if hidden.dtype.itemsize < torch.float32.itemsize:
        return torch.finfo(hidden.dtype).eps
    exact = torch.get_float32_matmul_precision() == "highest" and hidden.device.type == "cpu"
    return EXACT if exact else TF32


def _size(one: Tensor, other: Tensor) -> float:
    """The relative difference of two samples; numbers that are not finite count as 0."""
    if one.shape != other.shape:
        return torch.inf
    one, other = (part.nan_to_num(0, 0, 0) for part in (one, other))
    apart, scale = float((one - other).abs().median()), float(other.abs().median())
    return apart / scale if scale else torch.inf if apart else 0.0


def _sample(tensor: Tensor) -> Tensor:
    """Numbers of a tensor, evenly spaced, float32 on the CPU."""
    flat = tensor.reshape(-1)
    count = min(len(flat), SAMPLES)
    return flat[torch.arange(count, device=flat.device) * len(flat) // count].float().cpu()


@contextmanager
def _plain(decoder: nn.Module) -> Iterator[None]:
    """Evaluation mode and plain attention while it lasts; afterwards all is as it was.

    Attributes and buffers of modules, too, which rotary embeddings change with the length.
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
        for each, attributes, buffers, held in before:
            for name in each.keys() - attributes.keys():
                del each[name]
            each.update(attributes)
            buffers.clear()
            buffers.update(held)

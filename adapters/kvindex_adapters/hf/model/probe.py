"""Run a model on a few fixed tokens, so that a saved cache can recognize its model.

The decoder reads fixed ids with plain attention and an empty cache of transformers. The probe is a
sample of the keys and values of each layer in that cache, and of the last hidden states. So it
depends on the weights, wherever they are stored (offloaded, quantized, in buffers), and on adapters
and hooks. It does not depend on settings that only affect long texts, such as rotary frequencies
beyond a length. Compare the configurations to detect a change of such settings.
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
from kvindex_adapters.hf.model.info import layer_device
from kvindex_adapters.hf.model.patch import IMPLEMENTATION

SEQUENCES, TOKENS = 8, 8
"""Sequences of the probe, and tokens of each. There are several sequences because rounding may
choose another expert for a token in mixture-of-experts models, which only changes the sequence of
that token."""

SAMPLES = 521
"""How many evenly spaced numbers of each tensor are stored. The count is prime, so that the
distance between samples is not a multiple of a head dimension. The samples of 36 layers take 150
KB."""

PLAIN = "eager"
"""The attention implementation that every model of transformers supports on every device."""

ROUNDINGS = 3.0
"""Tolerance in units of `eps * (1 / 2 + sqrt(layer))`: rounding errors add up over the layers.

Measured in bfloat16 and float16, as the difference from exact products:

- The keys and values of the first layer differ by up to 0.5 `eps`.
- Those of later layers differ by up to 0.8 units in SmolLM2-135M and in random models of up to 80
  layers, and by up to 1.6 units in tiny random models of 150 families.
- The difference between two devices is larger by the square root of 2.

For comparison, a low-rank adapter for queries and values with 5% of the norm of the weights changes
the values of SmolLM2's first layer by 13 `eps` of bfloat16. Scaling it by half changes them by 6.6
`eps`."""

EXACT, TF32 = 2.0**-17, 2.0**-10
"""`eps` for float32. EXACT is used on a CPU and allows 64 rounding errors; 3 were measured. TF32 is
used where products may be rounded to TF32, which has a fraction of 10 bits."""


class Probe(NamedTuple):
    """A sample of the keys, values and hidden states that a model computes.

    Args:
        dtype: The dtype of the hidden states.
        eps: Their relative rounding error.
        parts: "layer.name" -> float32 `[n]`, on the CPU.
    """

    dtype: torch.dtype
    eps: float
    parts: State


class Difference(NamedTuple):
    """The part in which two probes differ most.

    Args:
        layer: Number of the layer.
        name: "keys", "values" or "hidden_states".
        size: The relative difference.
        tolerance: The relative difference that rounding explains.
    """

    layer: int
    name: str
    size: float
    tolerance: float


@in_plain_torch
@torch.no_grad()
def probe(decoder: nn.Module, config: Any) -> Probe:
    """Run the decoder once over fixed tokens. It may be attached.

    Modules, configurations and random generators are restored afterwards. Hooks of the modules are
    called, because they may change the model's output.

    Args:
        decoder: The module with a forward pass that takes `past_key_values`.
        config: The configuration from which caches of the model are made.

    Returns:
        A sample of the keys, values and last hidden states.

    Raises:
        RuntimeError: The decoder fails.
    """
    words = config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 2 * SEQUENCES * TOKENS, 2) * words // (2 * SEQUENCES * TOKENS)
    cache, device = DynamicCache(config=config), layer_device(decoder, 0)
    given = dict(past_key_values=cache, use_cache=True)
    try:
        with _plain(decoder):
            # not the decoder's own `__call__`, which `attach` replaces by one with a transaction
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
            f"{TOKENS} tokens with {PLAIN!r} attention ({type(error).__name__}: {error}); a saved "
            "cache recognizes its model by the keys and values of these tokens"
        ) from error
    return Probe(hidden.dtype, _eps(hidden), parts)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], eps: float) -> Difference:
    """Find the part in which two probes differ most, relative to its tolerance.

    The size of a difference is the median absolute difference, divided by the median absolute value
    of `other`. So a few large coordinates, or a few tokens that another expert computes, do not
    matter. Parts that only one probe has, because of another version of transformers, are skipped.

    Args:
        one: `Probe.parts` of a model.
        other: `Probe.parts` of the model to compare with.
        eps: The relative rounding error, the larger one of both probes.
    """
    found = []
    for part in one.keys() & other.keys():
        number, _, name = part.partition(".")
        tolerance = ROUNDINGS * eps * (0.5 + int(number) ** 0.5)
        found.append(Difference(int(number), name, _size(one[part], other[part]), tolerance))
    return max(found, key=lambda each: each.size / each.tolerance)


def _eps(hidden: Tensor) -> float:
    """Return the relative rounding error of a model's products."""
    if hidden.dtype.itemsize < torch.float32.itemsize:
        return torch.finfo(hidden.dtype).eps
    exact = torch.get_float32_matmul_precision() == "highest" and hidden.device.type == "cpu"
    return EXACT if exact else TF32


def _size(one: Tensor, other: Tensor) -> float:
    """Compute the relative difference of two samples. Numbers that are not finite count as 0."""
    if one.shape != other.shape:
        return torch.inf
    one, other = (part.nan_to_num(0, 0, 0) for part in (one, other))
    apart, scale = float((one - other).abs().median()), float(other.abs().median())
    return apart / scale if scale else torch.inf if apart else 0.0


def _sample(tensor: Tensor) -> Tensor:
    """Take evenly spaced numbers of a tensor, float32 on the CPU."""
    flat = tensor.reshape(-1)
    count = min(len(flat), SAMPLES)
    return flat[torch.arange(count, device=flat.device) * len(flat) // count].float().cpu()


@contextmanager
def _plain(decoder: nn.Module) -> Iterator[None]:
    """Use evaluation mode and plain attention inside the context; restore everything afterwards.

    This includes attributes and buffers of modules, because some rotary embeddings change them with
    the length.
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

"""`attach`: a context in which a model's attention runs through indexes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import kvindex
from kvindex.core.config import parse_spec
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.attachment import claimed
from kvindex_adapters.hf.attention import NAME
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.guard import GuardedDecoder, GuardedModel
from kvindex_adapters.hf.place import placed
from kvindex_adapters.hf.restored import own_configurations, subclassed
from kvindex_adapters.hf.rope import rotary
from kvindex_adapters.hf.unsupported import UnsupportedError, check_model, layer_configs

IndexFactory = Callable[..., KVIndex]
"""Makes an index from its geometry: the keywords of `kvindex.create` without the name."""


@contextmanager
def attach(
    model: PreTrainedModel,
    *,
    index: str | IndexFactory = "pariskv",
    k: int = 100,
    coverage: float | None = None,
    sink: int = 64,
    local_window: int = 256,
    update_every: int = 256,
    dense_below: int = 2048,
    dense_layers: Sequence[int] = (),
    index_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[int, Mapping[str, Any]] | None = None,
    layer: type[AttentionLayer] = AttentionLayer,
    graphs: bool = True,
) -> Iterator[IndexCache]:
    """A cache for `past_key_values`; inside the context the model attends through it, or through
    deep copies of it (`copy.deepcopy`).

    index: a name, a line such as `"pariskv:beta=.05"`, or a factory called with the geometry;
    k: rows per KV head that a step retrieves; coverage: fewer, where the index believes that fewer
    hold this share of its attention; sink, local_window, update_every: sizes of the regions
    (`AttentionLayer`); dense_below: below this many tokens the index fills but attention is
    dense; dense_layers: layers that keep transformers' own cache; index_options: more keywords
    for the index (`preset`, `store`, …), but not its geometry, which the model decides;
    layer_options: the same for single layers, by number. An index by name runs on the kernels where
    the model is on a GPU that can (`place.placed`).
    layer: the class around each index (`kvindex_adapters.evaluate` has another). graphs: on a GPU,
    steps of a layer that are all alike are replayed as a CUDA graph (`AttentionLayer`). Afterwards
    the model is as it was, and as it was changed meanwhile (hooks, options of its configuration).

    One thread at a time calls the model or a cache. Raises UnsupportedError (a ValueError) for a
    model that cannot be served, ValueError for a bad argument or a model that is attached, before
    anything is changed.
    """
    config = check_model(model)
    _check_options(index, index_options, layer_options)
    decoder, options = _decoder(model), dict(index_options or {})

    def make(number: int, **geometry: Any) -> AttentionLayer:
        own, rope = {**options, **(layer_options or {}).get(number, {})}, ropes[number]
        if rope is not None:
            geometry["rope"] = rope.to(geometry.get("device", "cpu"))
        if isinstance(index, str):
            place = placed(geometry.get("device"), index, own)
            made: KVIndex = kvindex.create(index, **{**place, **geometry, **own})
        else:
            made = index(**{**geometry, **own})
        turn = cache.indexed.index(number) / len(cache.indexed)
        sizes = dict(sink=sink, local_window=local_window, update_every=update_every)
        sizes |= dict(k=k, dense_below=dense_below)
        return layer(made, coverage=coverage, update_phase=turn, graphs=graphs, **sizes)

    with claimed(model) as attachment:
        cache = IndexCache(config, make, dense_layers, attachment)
        ropes = {number: rotary(decoder, number) for number in cache.indexed}
        # bad arguments raise here, not in the first forward
        for number in _telling(ropes, layer_options):
            make(number, **_geometry(config, number))
        with own_configurations(model, NAME):
            model.set_attn_implementation(_request(model))
            if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
                raise UnsupportedError(
                    f"model: got {type(model).__name__}, whose attention does not go through "
                    "transformers' AttentionInterface"
                )
            generates = hasattr(model, "generate")
            asked = subclassed(model, GuardedModel) if generates else nullcontext()
            with subclassed(decoder, GuardedDecoder), asked:
                attachment.decoder = decoder
                yield cache


def _telling(ropes: dict[int, Any], layer_options: Mapping[int, Any] | None) -> set[int]:
    """Layers for which an index is made to see whether it can be. Raises ValueError."""
    given = set(layer_options or {})
    if not given <= ropes.keys():
        raise ValueError(
            f"layer_options: got {sorted(given - ropes.keys(), key=str)}, allowed are layers with "
            f"an index, {sorted(ropes)}"
        )
    return {min(ropes, key=lambda number: ropes[number] is not None), *given}


def _check_options(index: object, index_options: object, layer_options: object) -> None:
    """Raises ValueError for what names no index, and for options that do not fit."""
    if not isinstance(layer_options, Mapping | None):
        raise ValueError(
            f"layer_options: got {layer_options!r}, allowed is a mapping from a layer's number to "
            "its options"
        )
    named = {f"layer_options[{i!r}]": options for i, options in (layer_options or {}).items()}
    for name, options in {"index_options": index_options, **named}.items():
        if not isinstance(options, Mapping | None):
            raise ValueError(f"{name}: got {options!r}, allowed is a mapping from name to value")
        check_index(index, options)


def check_index(index: object, index_options: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError for what names no index, and for options that the model decides."""
    given = set(index_options or {})
    if isinstance(index, str):
        given |= set(parse_spec(index.partition("+")[0])[1])
    elif not callable(index):
        raise ValueError(
            f"index: got {index!r}, allowed is a name, a line name:option=value:… or a factory"
        )
    decided = given & {field.name for field in dataclasses.fields(Geometry)}
    if decided:
        raise ValueError(
            f"index_options: got {', '.join(sorted(decided))}, which the model decides; allowed "
            "are the index's own options, preset, store, rows, backend and check"
        )


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose forward takes `past_key_values` and runs the layers.

    Raises UnsupportedError for a model without.
    """
    for module in (model.get_decoder(), model.base_model, model):
        if isinstance(module, nn.Module) and "past_key_values" in _parameters(module):
            return module
    raise UnsupportedError(
        f"model: got {type(model).__name__}, whose forward takes no past_key_values; allowed are "
        "decoders with a cache of keys and values"
    )


def _parameters(module: nn.Module) -> Collection[str]:
    return inspect.signature(type(module).forward).parameters


def _geometry(config: Any, number: int) -> dict[str, Any]:
    """The geometry that a configuration shows of a layer, as far as it does."""
    layers = layer_configs(config)
    config = layers[number] if len(layers) > 1 else config
    heads = getattr(config, "num_attention_heads", 1)
    per_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "q_heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": per_head,
    }


def _request(model: PreTrainedModel) -> dict[str, str]:
    """What to ask of `set_attn_implementation` so that only the decoder changes."""
    config = model.config.get_text_config(decoder=True)
    if config is model.config:
        return {"": NAME}
    for name in model.config.sub_configs:
        if getattr(model.config, name) is config:
            return {name: NAME}
    raise UnsupportedError(
        f"model: got {type(model).__name__}, whose decoder's configuration is nested too deeply"
    )

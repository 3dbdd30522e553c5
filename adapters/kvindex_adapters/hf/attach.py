"""`attach`: a context in which a model's attention runs through indexes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvindex
from kvindex.config import parse_spec
from kvindex.geometry import Geometry
from kvindex.layer import AttentionLayer
from kvindex.protocol import KVIndex
from kvindex_adapters.hf.attention import NAME, attached
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.place import placed
from kvindex_adapters.hf.refuse import UnsupportedError, check_model
from kvindex_adapters.hf.rope import rotary

IndexFactory = Callable[..., KVIndex]
"""Makes an index from its geometry: the keywords of `kvindex.create` without the name."""


@contextmanager
def attach(
    model: PreTrainedModel,
    *,
    index: str | IndexFactory = "pariskv",
    k: int = 100,
    mass: float | None = None,
    sink: int = 64,
    local: int = 256,
    update_every: int = 256,
    full_threshold: int = 2048,
    dense_layers: Sequence[int] = (),
    index_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[int, Mapping[str, Any]] | None = None,
    layer: type[AttentionLayer] = AttentionLayer,
    graphs: bool = True,
) -> Iterator[IndexCache]:
    """A cache for `past_key_values`; inside the context the model attends through it.

    index: a name, a line such as `"pariskv:beta=.05"`, or a factory called with the geometry;
    k: rows per KV head that a step retrieves; mass: fewer, where the index believes that fewer
    hold this share of its attention; sink, local, update_every: sizes of the regions
    (`kvindex.layer`); full_threshold: below this many tokens the index fills but attention is
    dense; dense_layers: layers that keep transformers' own cache; index_options: more keywords
    for the index (`preset`, `store`, …), but not its geometry, which the model decides;
    layer_options: the same for single layers, by number. An index by name runs on the kernels where
    the model is on a GPU that can (`place.placed`).
    layer: the class around each index (`kvindex_adapters.evaluate` has another). graphs: on a GPU,
    steps of a layer that are all alike are replayed as a CUDA graph (`kvindex.layer`). Afterwards
    the model is as it was.

    Raises UnsupportedError (a ValueError) for a model that cannot be served, ValueError for a bad
    argument, before anything is changed.
    """
    config = check_model(model)
    for given in (index_options, *(layer_options or {}).values()):
        check_index(index, given)
    decoder, options = _decoder(model), dict(index_options or {})
    if any(module in attached for module in model.modules()):
        raise ValueError("model: got one that is attached already, allowed is one attach() a time")

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
        sizes = dict(sink=sink, local=local, update_every=update_every)
        sizes |= dict(k=k, full_threshold=full_threshold)
        return layer(made, mass=mass, turn=turn, graphs=graphs, **sizes)

    cache = IndexCache(config, make, dense_layers)
    ropes = {number: rotary(decoder, number) for number in cache.indexed}
    # bad arguments raise here, not in the first forward
    for number in _telling(ropes, layer_options):
        make(number, **_geometry(config))
    before = [(c, c._attn_implementation) for c in _configs(model)]
    forward = vars(decoder).get("forward")  # accelerate puts one there, too
    try:
        model.set_attn_implementation(_request(model, config))
        if config._attn_implementation != NAME:
            raise UnsupportedError(
                f"model: got {type(model).__name__}, whose attention does not go through "
                "transformers' AttentionInterface"
            )
        attached.update((module, cache) for module in model.modules())
        decoder.forward = _guarded(decoder.forward, cache)
        yield cache
    finally:
        cache.close()
        vars(decoder).pop("forward", None)
        if forward is not None:
            decoder.forward = forward
        for module in model.modules():
            attached.pop(module, None)
        for some, implementation in before:
            some._attn_implementation_internal = implementation


def _telling(ropes: dict[int, Any], layer_options: Mapping[int, Any] | None) -> set[int]:
    """Layers for which an index is made to see whether it can be. Raises ValueError."""
    given = set(layer_options or {})
    if not given <= ropes.keys():
        raise ValueError(
            f"layer_options: got {sorted(given - ropes.keys(), key=str)}, allowed are layers with "
            f"an index, {sorted(ropes)}"
        )
    return {min(ropes, key=lambda number: ropes[number] is not None), *given}


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


def _guarded(forward: Callable[..., Any], cache: IndexCache) -> Callable[..., Any]:
    """A decoder's forward that refuses another cache and undoes a step that fails half way."""

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_attentions"):
            raise UnsupportedError("output_attentions: got True, allowed is False inside attach()")
        given = kwargs.get("past_key_values")
        if given is not cache:
            raise UnsupportedError(
                f"past_key_values: got {type(given).__name__}, allowed inside attach() is the "
                "cache that it gave: model.generate(…, past_key_values=cache)"
            )
        cache.check_usable()
        marks = cache.marks()
        ids = args[0] if args else kwargs.get("input_ids")
        cache.tokens = ids if isinstance(ids, Tensor) and ids.dtype == torch.int64 else None
        try:
            output = forward(*args, **kwargs)
            cache.check_taken()
        except BaseException:  # an interrupt, too, leaves layers of different lengths
            cache.back_to(marks)
            raise
        finally:
            cache.tokens = None
            cache.padding.forget()
        return output

    return guarded


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose forward takes `past_key_values` and runs the layers."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, nn.Module) else model


def _geometry(config: Any) -> dict[str, Any]:
    """The geometry that a configuration shows, as far as it does."""
    heads = getattr(config, "num_attention_heads", 1)
    per_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "q_heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": per_head,
    }


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration object of the model and its parts, once."""
    found: dict[int, Any] = {id(model.config): model.config}
    queue = [model.config]
    while queue:
        config = queue.pop()
        for name in getattr(config, "sub_configs", {}):
            sub = getattr(config, name, None)
            if sub is not None and id(sub) not in found:
                found[id(sub)] = sub
                queue.append(sub)
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def _request(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """What to ask of `set_attn_implementation` so that only the decoder changes."""
    if config is model.config:
        return {"": NAME}
    for name in model.config.sub_configs:
        if getattr(model.config, name) is config:
            return {name: NAME}
    raise UnsupportedError(
        f"model: got {type(model).__name__}, whose decoder's configuration is nested too deeply"
    )

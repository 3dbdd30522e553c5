"""`attach`: route a transformers model's attention through indexes while a context lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

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
from kvindex_adapters.hf.model_info import attention_request, find_decoder, layer_geometry
from kvindex_adapters.hf.model_patch import private_configurations, subclassed
from kvindex_adapters.hf.placement import default_placement
from kvindex_adapters.hf.rotary import rotary_frequencies
from kvindex_adapters.hf.unsupported import UnsupportedError, check_model

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
    search_up_to: int = 1,
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
    dense; search_up_to: a step of up to so many tokens searches, a longer one attends to everything
    (above 1 for assisted decoding); dense_layers: layers that keep transformers' own cache;
    index_options: more keywords for the index (`preset`, `store`, …), but not its geometry, which
    the model decides; layer_options: the same for single layers, by number. An index by name runs
    on the kernels where the model is on a GPU that can (`default_placement`).
    layer: the class around each index (`kvindex_adapters.evaluate` has another). graphs: on a GPU,
    steps of a layer that are all alike are replayed as a CUDA graph (`AttentionLayer`). Afterwards
    the model is as it was, and as it was changed meanwhile (hooks, options of its configuration).

    One thread at a time calls the model or a cache. Raises UnsupportedError (a ValueError) for a
    model that cannot be served, ValueError for a bad argument or a model that is attached, before
    anything is changed.
    """
    config = check_model(model)
    _check_options(index, index_options, layer_options)
    decoder, shared = find_decoder(model), dict(index_options or {})

    def make(number: int, **geometry: Any) -> AttentionLayer:
        options, rope = {**shared, **(layer_options or {}).get(number, {})}, ropes[number]
        if rope is not None:
            geometry["rope"] = rope.to(geometry.get("device", "cpu"))
        if isinstance(index, str):
            placement = default_placement(geometry.get("device"), index, options)
            layer_index: KVIndex = kvindex.create(index, **{**placement, **geometry, **options})
        else:
            layer_index = index(**{**geometry, **options})
        phase = list(ropes).index(number) / len(ropes)
        sizes = dict(sink=sink, local_window=local_window, update_every=update_every)
        sizes |= dict(k=k, dense_below=dense_below, search_up_to=search_up_to)
        return layer(layer_index, coverage=coverage, update_phase=phase, graphs=graphs, **sizes)

    with claimed(model) as attachment:
        cache = IndexCache(config, make, dense_layers, attachment)
        ropes = {number: rotary_frequencies(decoder, number) for number in cache.indexed}
        # bad arguments raise here, not in the first forward
        for number in _probe_layers(ropes, layer_options):
            make(number, **layer_geometry(config, number))
        with private_configurations(model, NAME):
            model.set_attn_implementation(attention_request(model, NAME))
            if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
                raise UnsupportedError(
                    f"model: got {type(model).__name__}, whose attention does not go through "
                    "transformers' AttentionInterface"
                )
            generates = hasattr(model, "generate")
            guarded = subclassed(model, GuardedModel) if generates else nullcontext()
            with subclassed(decoder, GuardedDecoder), guarded:
                attachment.decoder = decoder
                yield cache


def _probe_layers(ropes: dict[int, Any], layer_options: Mapping[int, Any] | None) -> set[int]:
    """Layers whose index is created at attach, so that bad options raise there."""
    configured = set(layer_options or {})
    if not configured <= ropes.keys():
        raise ValueError(
            f"layer_options: got {sorted(configured - ropes.keys(), key=str)}, allowed are layers "
            f"with an index, {sorted(ropes)}"
        )
    return {min(ropes, key=lambda number: ropes[number] is not None), *configured}


def _check_options(index: object, index_options: object, layer_options: object) -> None:
    """Raises ValueError for what is no index, and for options that are no mapping."""
    if not isinstance(layer_options, Mapping | None):
        raise ValueError(
            f"layer_options: got {layer_options!r}, allowed is a mapping from a layer's number to "
            "its options"
        )
    named = {f"layer_options[{i!r}]": options for i, options in (layer_options or {}).items()}
    for name, options in {"index_options": index_options, **named}.items():
        if not isinstance(options, Mapping | None):
            raise ValueError(f"{name}: got {options!r}, allowed is a mapping from name to value")
        check_spec(index, options)


def check_spec(index: object, index_options: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError for what is no index, and for options that the model decides."""
    names = set(index_options or {})
    if isinstance(index, str):
        names |= set(parse_spec(index.partition("+")[0])[1])
    elif not callable(index):
        raise ValueError(
            f"index: got {index!r}, allowed is a name, a line name:option=value:… or a factory"
        )
    decided = names & {field.name for field in dataclasses.fields(Geometry)}
    if decided:
        raise ValueError(
            f"index_options: got {', '.join(sorted(decided))}, which the model decides; allowed "
            "are the index's own options, preset, store, row_codec, backend and check"
        )

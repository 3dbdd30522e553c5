"""`attach_batch`: continuous batching (`model.generate_batch`) through indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from kvindex.core.protocol import KVIndex
from kvindex_adapters.common.layer_options import IndexFactory, LayerOptions, Ropes
from kvindex_adapters.hf.batching.layer import PagedLayer, Regions, check_index
from kvindex_adapters.hf.batching.model import BatchedModel, check_paged_model, own_attention
from kvindex_adapters.hf.batching.state import Batching
from kvindex_adapters.hf.model.attachment import claimed
from kvindex_adapters.hf.model.info import find_decoder, layer_geometry
from kvindex_adapters.hf.model.patch import subclassed
from kvindex_adapters.hf.model.rotary import rotary_frequencies
from kvindex_adapters.hf.model.wrapped import unwrapped
from kvindex_adapters.hf.unsupported import check_dense, check_model, has_full_attention


@contextmanager
def attach_batch(
    model: PreTrainedModel,
    *,
    index: str | IndexFactory = "pariskv",
    k: int = 100,
    sink: int = 64,
    local_window: int = 256,
    update_every: int = 256,
    dense_below: int = 2048,
    dense_layers: Sequence[int] = (),
    index_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[int, Mapping[str, Any]] | None = None,
) -> Iterator[Batching]:
    """Let requests of continuous batching attend through indexes inside a context.

    Use `model.generate_batch`, or a manager of continuous batching that is made inside the context.
    transformers still manages requests, shared prefixes, chunks and preemption. In full-attention
    layers, a step of one token of a long request searches the request's index. All other steps
    attend exactly, with the model's own attention. The index of a request is made from its rows
    (one token's key and value each) in the paged cache when the request first searches. When the
    context ends, the model is restored.

    Args:
        model: A model of transformers, or a `PeftModel` with adapters of the model's weights.
        index: Name of an index, a name with options such as `"pariskv:beta=.05"`, or a function
            that makes an index from its geometry, as in `attach`.
        k: Rows that a decode step retrieves per KV head, at least 1.
        sink: Number of first tokens that every step attends to exactly.
        local_window: Number of newest tokens that every step attends to exactly.
        update_every: Number of tokens that are collected before they are appended to the index.
            Until then, steps attend to them exactly, too.
        dense_below: In requests of fewer tokens, attention is dense.
        dense_layers: Numbers of the layers that keep the model's own attention.
        index_options: Further keyword arguments of the index (`preset`, `store`, …), except its
            geometry, which the model determines.
        layer_options: Further keyword arguments of the index of single layers, by layer number.

    Yields:
        The state, with `report()` and `explain()`.

    Raises:
        UnsupportedError: The model is not supported. `UnsupportedError` is a ValueError.
        ValueError: An argument is wrong, or the model is already attached. In both cases nothing
            is changed.
        TypeError: `model` is not a transformers model.
    """
    model = unwrapped(model)
    config = check_model(model)
    options = LayerOptions(
        index=index,
        k=k,
        sink=sink,
        local_window=local_window,
        update_every=update_every,
        dense_below=dense_below,
        dense_layers=dense_layers,
        index_options=index_options,
        layer_options=layer_options,
    )
    kinds = DynamicCache(config=config).layers
    check_paged_model(model, config, kinds)
    full = [number for number, kind in enumerate(kinds) if has_full_attention(kind)]
    check_dense(dense_layers, len(kinds), full, {})
    decoder, indexed = find_decoder(model), [n for n in full if n not in dense_layers]
    with claimed(model) as attachment:
        ropes: Ropes = {number: rotary_frequencies(decoder, number) for number in indexed}
        for made in options.probe(ropes, partial(layer_geometry, config)):
            check_index(made)
        regions = Regions(k, sink, local_window, update_every, dense_below)
        layers = {
            number: PagedLayer(regions, partial(_make, options, ropes, number))
            for number in indexed
        }
        attachment.batching = batching = Batching(config, layers)
        with own_attention(decoder, indexed), subclassed(model, BatchedModel):
            yield batching


def _make(options: LayerOptions, ropes: Ropes, number: int, **geometry: Any) -> KVIndex:
    return options.make(ropes, number, **geometry).index

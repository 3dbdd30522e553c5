"""`attach_batch`: continuous batching (`model.generate_batch`) whose requests search their rows."""

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
    """Inside the context `model.generate_batch`, and a manager of continuous batching, search.

    Requests, prefix sharing, chunks and preemption stay transformers'. A request's step of one
    token searches in full-attention layers, once it is long enough; all else attends exactly, by
    the model's own attention. Options are those of `attach`; an index is made of a request's rows
    in the paged cache when it first searches. Afterwards the model is as it was.

    Raises UnsupportedError (a ValueError) for a model that cannot be served, ValueError for a bad
    argument or a model that is attached, before anything is changed.
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

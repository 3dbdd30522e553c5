"""`attach_batch`: context manager for continuous batching (`model.generate_batch`) with indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from kvindex.core.protocol import KVIndex
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.common.context import context
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


@context("with attach_batch(model, …) as batching:")
def attach_batch(
    model: PreTrainedModel,
    *,
    index: str | IndexFactory = "pariskv",
    k: int = DEFAULT_K,
    sink: int = 64,
    local_window: int = 256,
    update_every: int = 256,
    dense_below: int = 2048,
    dense_layers: Sequence[int] = (),
    index_options: Mapping[str, Any] | None = None,
    layer_options: Mapping[int, Mapping[str, Any]] | None = None,
) -> Iterator[Batching]:
    """Context manager inside which continuous batching uses indexes for long requests.

    Call `model.generate_batch` inside the `with` block, or make a continuous-batching manager
    there. transformers still manages requests, shared prefixes, chunked prefill and preemption. In
    full-attention layers, the decode steps of a long request search the request's index. All other
    attention is the model's own. A request's index is built from its keys and values in the paged
    cache, at the first decode step that searches. At the end of the block the model is restored.

    Args:
        model: A transformers model, or a `PeftModel` whose adapters change only the weights.
        index: Name of an index, a name with options such as `"pariskv:beta=.05"`, or a function
            that makes an index from the keyword arguments of `kvindex.create`.
        k: Number of rows (a row is one token's key and value) that a decode step retrieves per KV
            head, at least 1.
        sink: Number of first tokens that every step attends to exactly.
        local_window: Number of newest tokens that every step attends to exactly.
        update_every: Number of tokens after which new tokens are appended to the index. Until then,
            each step attends to the new tokens exactly.
        dense_below: Requests with fewer tokens use full attention.
        dense_layers: Numbers of the layers that keep the model's own attention.
        index_options: Further keyword arguments of the index (`preset`, `store`, …). Sizes such as
            `head_dim` are not allowed, because the model determines them.
        layer_options: Maps a layer number to keyword arguments for the index of this layer only.

    Yields:
        An object with the methods `report()` and `explain()`.

    Raises:
        UnsupportedError: The model is not supported. (UnsupportedError is a ValueError.)
        ValueError: An argument is wrong, or the model is already attached. The model is unchanged.
        TypeError: `model` is not a transformers model, or an argument is unknown.
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
    if isinstance(k, str):
        raise ValueError(
            f"k: got {k!r}, allowed with attach_batch is a number, because a request's index is "
            "built from cached keys and values, without outputs from which the limit of the error "
            "follows"
        )
    kinds = DynamicCache(config=config).layers
    check_paged_model(model, config, kinds)
    full = [number for number, kind in enumerate(kinds) if has_full_attention(kind)]
    check_dense(dense_layers, len(kinds), full, {})
    decoder, indexed = find_decoder(model), [n for n in full if n not in dense_layers]
    with claimed(model) as attachment:
        ropes = rotary_frequencies(decoder, indexed)
        for made in options.probe(ropes, partial(layer_geometry, config, decoder)):
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

"""`attach_batch`: continuous batching (`model.generate_batch`) whose requests search their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvindex.core.protocol import KVIndex
from kvindex_adapters.common.layer_options import IndexFactory, LayerOptions, Ropes
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.layer import PagedLayer, Regions, check_index
from kvindex_adapters.hf.batching.model import BatchedModel, check_paged_model, own_attention
from kvindex_adapters.hf.batching.step import Step
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.model.attachment import claimed
from kvindex_adapters.hf.model.info import find_decoder, layer_geometry
from kvindex_adapters.hf.model.patch import IMPLEMENTATION, subclassed
from kvindex_adapters.hf.model.rotary import rotary_frequencies
from kvindex_adapters.hf.model.wrapped import unwrapped
from kvindex_adapters.hf.unsupported import check_dense, check_model, has_full_attention


class Batching:
    """What `attach_batch` gives: layers whose requests search, and what they have read.

    layers: by number, those with indexes.
    """

    def __init__(self, config: Any, layers: Mapping[int, PagedLayer]) -> None:
        self.layers = layers
        self.managers: WeakSet[Any] = WeakSet()
        """Those of continuous batching that were made inside the context."""
        self.step: Step | None = None
        """The one that runs."""
        self.attended: set[int] = set()
        """Layers that have attended in it."""
        self.refused: UnsupportedError | None = None
        """What the last step that failed was refused for."""
        self._config, self._longest = config, 0

    def plain_attention(self) -> Callable[..., Any]:
        """The attention function that the model has without indexes."""
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[vars(self._config)[IMPLEMENTATION]]
        return function

    @contextmanager
    def running(self, cache: object) -> Iterator[None]:
        """A step over a paged cache. Where it fails, all indexes go: the pages have what they had.

        Raises UnsupportedError for another call of the model, or a layer that attends by itself.
        """
        try:
            self.step = Step.of(self._processor(cache))
            yield
            if self.attended != self.layers.keys():
                lacking = sorted(self.layers.keys() - self.attended)
                raise UnsupportedError(
                    f"model: got layers {lacking} whose attention does not go through "
                    "transformers' AttentionInterface"
                )
            self._longest = max(self._longest, *(part.length for part in self.step.parts))
        except BaseException as error:
            self.forget()
            self.refused = error if isinstance(error, UnsupportedError) else None
            raise
        finally:
            self.step, self.attended = None, set()

    def forget(self) -> None:
        """Give up the indexes of all requests."""
        for layer in self.layers.values():
            layer.keep(())

    def report(self) -> Report:
        """What searching steps have read so far; bytes of the indexes of requests that are open.

        The paged cache is not counted. tokens: of the longest request.
        """
        layers = list(self.layers.values())
        traffic = [layer.tally.traffic for layer in layers]
        steps = max(part.steps for part in traffic)
        return Report(
            tokens=self._longest,
            layers=len(layers),
            steps=steps,
            rows_read=sum(float(part.rows_read) for part in traffic) / max(steps, 1),
            rows_full=sum(float(part.rows_full) for part in traffic) / max(steps, 1),
            bytes_fetched=sum(int(part.bytes_fetched) for part in traffic),
            nbytes={"indexes": sum(layer.held_bytes for layer in layers)},
            dense_below=layers[0].regions.dense_below,
            k=layers[0].regions.k,
        )

    def explain(self) -> str:
        """How steps run, and each layer's index, once one has searched."""
        how = "one query of a long request: through the index; all else: transformers' attention"
        pools = {number: layer.pool for number, layer in self.layers.items()}
        return "\n".join(
            [
                how,
                *(f"layer {n}: {pool.explain()}" for n, pool in pools.items() if pool is not None),
            ]
        )

    def _processor(self, cache: object) -> Any:
        """What has prepared the step over a paged cache."""
        processors = [manager.batch_processor for manager in self.managers]
        for processor in processors:
            if cache is not None and processor is not None and processor.cache is cache:
                return processor
        raise UnsupportedError(
            "model: got a call that is no step of continuous batching begun inside "
            "attach_batch(), allowed is model.generate_batch; destroy a manager that was made "
            "before (model.destroy_cached_continuous_batching_manager())"
        )


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

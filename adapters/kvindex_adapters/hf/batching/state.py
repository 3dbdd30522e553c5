"""`Batching`: the state of one `attach_batch`, with the layers whose requests search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.layer import PagedLayer
from kvindex_adapters.hf.batching.step import Step
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.model.patch import IMPLEMENTATION


class Batching:
    """The state that `attach_batch` yields: its layers with indexes, and the rows they have read.

    Args:
        config: The configuration of the model's decoder.
        layers: Number of each layer with an index -> the layer.
    """

    def __init__(self, config: Any, layers: Mapping[int, PagedLayer]) -> None:
        self.layers = layers
        self.managers: WeakSet[Any] = WeakSet()
        """Managers of continuous batching that were made inside the context."""
        self.step: Step | None = None
        """The current step, or None between steps."""
        self.attended: set[int] = set()
        """Numbers of the layers that have attended in the current step."""
        self.refused: UnsupportedError | None = None
        """The UnsupportedError with which the last step has failed, or None."""
        self._config, self._longest = config, 0

    def plain_attention(self) -> Callable[..., Any]:
        """Return the attention function that the model uses without indexes."""
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[vars(self._config)[IMPLEMENTATION]]
        return function

    @contextmanager
    def running(self, cache: object) -> Iterator[None]:
        """Run one step of continuous batching inside the context.

        If the step fails, all indexes are dropped. They are made again from the pages, which still
        contain all rows.

        Args:
            cache: The paged cache with which the model is called.

        Raises:
            UnsupportedError: The call is not a step of continuous batching that was started inside
                `attach_batch`, or the attention of a layer cannot be replaced.
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
        """Drop the indexes of all requests."""
        for layer in self.layers.values():
            layer.keep(())

    def report(self) -> Report:
        """Report the rows that searching steps have read so far, and the memory of the indexes.

        The memory is that of the indexes of open requests, without the paged cache. The number of
        tokens is that of the longest request.

        Returns:
            The report.
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
            nbytes={"indexes": sum(layer.stored_bytes for layer in layers)},
            dense_below=layers[0].regions.dense_below,
            k=layers[0].regions.k,
        )

    def explain(self) -> str:
        """Describe how steps run, and the index of each layer after the first search.

        Returns:
            One line about the steps, and one for each layer that has searched.
        """
        how = "one query of a long request: through the index; all else: transformers' attention"
        pools = {number: layer.pool for number, layer in self.layers.items()}
        return "\n".join(
            [
                how,
                *(f"layer {n}: {pool.explain()}" for n, pool in pools.items() if pool is not None),
            ]
        )

    def _processor(self, cache: object) -> Any:
        """Find the processor of continuous batching that has prepared a step over a paged cache."""
        processors = [manager.batch_processor for manager in self.managers]
        for processor in processors:
            if cache is not None and processor is not None and processor.cache is cache:
                return processor
        raise UnsupportedError(
            "model: got a call that is no step of continuous batching started inside "
            "attach_batch(), allowed is model.generate_batch; destroy a manager that was made "
            "before (model.destroy_cached_continuous_batching_manager())"
        )

"""`Batching`: the object that `attach_batch` yields, with the methods `report` and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.cache import held_back
from kvindex_adapters.hf.batching.layer import PagedLayer
from kvindex_adapters.hf.batching.step import Step
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.model.patch import IMPLEMENTATION


class Batching:
    """The state of one `attach_batch`: its layers, and statistics about their indexes.

    Args:
        config: The configuration of the model's text decoder (`get_text_config`).
        layers: Maps the number of each layer with an index to the layer.
    """

    def __init__(self, config: Any, layers: Mapping[int, PagedLayer]) -> None:
        self.layers = layers
        self.managers: WeakSet[Any] = WeakSet()
        """Continuous-batching managers that were made while `attach_batch` was active."""
        self.step: Step | None = None
        """The requests in the current forward pass, or None between forward passes."""
        self.cache: Any = None
        """The paged cache of the current forward pass, or None between forward passes."""
        self.attended: set[int] = set()
        """Numbers of the layers whose attention has run in the current forward pass."""
        self.refused: UnsupportedError | None = None
        """The UnsupportedError that the last forward pass raised, or None."""
        self._config, self._longest = config, 0

    def plain_attention(self) -> Callable[..., Any]:
        """Return the attention function that the model uses without `attach_batch`."""
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[vars(self._config)[IMPLEMENTATION]]
        return function

    @contextmanager
    def running(self, cache: object) -> Iterator[None]:
        """Context manager around one forward pass of continuous batching.

        If the forward pass fails, all indexes are deleted. They are rebuilt from the paged cache,
        which still contains all keys and values.

        Args:
            cache: The paged cache with which the model is called.

        Raises:
            UnsupportedError: The call does not come from continuous batching that was started
                inside `attach_batch`, or the attention of a layer cannot be replaced.
        """
        try:
            self.step, self.cache = Step.of(self._processor(cache)), cache
            with held_back(cache, self.layers):
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
            self.step, self.cache, self.attended = None, None, set()

    def forget(self) -> None:
        """Delete the indexes of all requests."""
        for layer in self.layers.values():
            layer.keep(())

    def report(self) -> Report:
        """Report how many rows decode steps have read from the indexes, and the memory of the
        indexes.

        The memory is that of the indexes of running requests, without the paged cache. The field
        `tokens` is the length of the longest request so far.

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
        """Describe which requests use an index, and how the index of each layer runs.

        Returns:
            One line about the requests, and one line for each layer that has searched.
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
        """Return transformers' `ContinuousBatchProcessor` that uses this paged cache."""
        processors = [manager.batch_processor for manager in self.managers]
        for processor in processors:
            if cache is not None and processor is not None and processor.cache is cache:
                return processor
        raise UnsupportedError(
            "model: got a call that does not come from continuous batching started inside "
            "attach_batch(); call model.generate_batch, and first destroy a manager that was made "
            "earlier (model.destroy_cached_continuous_batching_manager())"
        )

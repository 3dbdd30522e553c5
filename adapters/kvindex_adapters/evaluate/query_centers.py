"""Calibrate the index `triattention` for a model: average the queries of each layer over a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvindex
from kvindex.core import check
from kvindex.core.protocol import KVIndex, ObservesQueries
from kvindex.indexes.triattention import Centers
from kvindex.wrappers import Wrapper
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.prefill import prefill


class _Averager(Wrapper):
    """A wrapper that computes the mean of all queries that an attention layer passes to its
    index."""

    own = frozenset({ObservesQueries})

    def __init__(self, inner: KVIndex) -> None:
        super().__init__(inner)
        self.count = 0
        self.centers: Centers | None = None

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        rope, count = self.geometry.rope, len(positions)
        assert rope is not None
        valid = torch.ones((1, count), dtype=torch.bool, device=queries.device)
        new, fraction = Centers.of(queries, positions, valid, rope), count / (self.count + count)
        mean, size = new.mean[0], new.size[0]
        if self.centers is not None:
            mean = torch.lerp(self.centers.mean, mean, fraction)
            size = torch.lerp(self.centers.size, size, fraction)
        self.centers, self.count = Centers(mean, size), self.count + count
        super().observe_queries(queries, positions)


def calibrate_centers(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    chunk: int = 1024,
    on_progress: Progress | None = None,
) -> dict[int, dict[str, Centers]]:
    """Compute the mean query of each full-attention layer, which the index `triattention` needs.

    The model reads a text with full attention. Pass the result to `attach(layer_options=…)`.

    Args:
        model: The transformers model.
        ids: Token ids of the text, int64 `[N]`, at least two.
        chunk: Number of tokens that the model reads in one forward pass.
        on_progress: Function that is called with the phase ("prefill"), the number of tokens read,
            and the number of all tokens.

    Returns:
        A dict from the number of a layer to the options of the layer's index.

    Raises:
        ValueError: `ids` has a wrong shape or fewer than two tokens, the model's rotary frequencies
            are unknown, or `attach` does not support the model.

    Source: TriAttention (docs/indexes/triattention.md).
    """
    check.tensor("ids", ids, {"N": None}, torch.int64)
    check.at_least("ids.shape[0]", len(ids), 2)

    def averager(**geometry: Any) -> KVIndex:
        if geometry.get("rope") is None:
            raise ValueError(
                "model: got a model whose rotary embedding is unknown, allowed is a rotary "
                "embedding with fixed frequencies that pairs the two halves of the coordinates"
            )
        return _Averager(kvindex.create("exact", **geometry))

    # Without a local window, every token is appended to the index immediately. `dense_below` is
    # larger than any text, so the model always uses full attention.
    regions: Any = dict(sink=0, local_window=0, update_every=1, dense_below=2**62)
    with attach(model, index=averager, **regions) as cache, torch.no_grad():
        prefill(model, ids.to(model.device), cache, stop=len(ids), chunk=chunk, report=on_progress)
        layers = zip(cache.indexed, cache.indexes(), strict=True)
        return {
            number: {"centers": index.centers}
            for number, index in layers
            if isinstance(index, _Averager) and index.centers is not None
        }

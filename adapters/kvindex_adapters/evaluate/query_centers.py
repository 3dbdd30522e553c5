"""Calibrate `triattention` for a model: average the queries of each layer over a text."""

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
    """Averages the observed queries and counts them."""

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
    """Return the query centers of each full-attention layer, for `attach(layer_options=…)`.

    The model reads the text with full attention.

    Args:
        model: The transformers model.
        ids: Text, int64 `[N]`, at least two tokens.
        chunk: Tokens to read at a time.
        on_progress: Called with the phase, the tokens done and the tokens in total.

    Returns:
        Layer number -> options of the index.

    Raises:
        ValueError: `ids` has another shape or too few tokens, or the model's rotary frequencies are
            unknown; also what `attach` raises.

    Source: TriAttention (docs/indexes/triattention.md).
    """
    check.tensor("ids", ids, {"N": None}, torch.int64)
    check.at_least("ids.shape[0]", len(ids), 2)

    def averager(**geometry: Any) -> KVIndex:
        if geometry.get("rope") is None:
            raise ValueError(
                "model: got one whose rotary embedding is unknown, allowed is one with fixed "
                "frequencies that rotates coordinates in two halves"
            )
        return _Averager(kvindex.create("exact", **geometry))

    # Without a window, each token is in the index after its step. `dense_below` is so large that no
    # step searches.
    regions: Any = dict(sink=0, local_window=0, update_every=1, dense_below=2**62)
    with attach(model, index=averager, **regions) as cache, torch.no_grad():
        prefill(model, ids.to(model.device), cache, stop=len(ids), chunk=chunk, report=on_progress)
        layers = zip(cache.indexed, cache.indexes(), strict=True)
        return {
            number: {"centers": index.centers}
            for number, index in layers
            if isinstance(index, _Averager) and index.centers is not None
        }

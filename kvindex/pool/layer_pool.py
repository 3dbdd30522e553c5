"""LayerPool: an attention layer of many sequences, each with sink, window and index of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import Explains
from kvindex.layer.attention_layer import AttentionLayer
from kvindex.pool.report import Report
from kvindex.pool.sequences import Sequences, all_or_nothing, check_queries, check_tokens


class LayerPool(Sequences[AttentionLayer]):
    """Sequences of one attention layer, as an engine steps them: prompts, pieces, tokens.

    layer: empty; each sequence is a copy of it, with a batch of 1.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__(layer)
        self.geometry = self._like.index.geometry

    def step(
        self, sequences: Sequence[int], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Append `T` tokens to each and attend from them, causally: `[n, H, T, Dv]`.

        queries `[n, H, T, D]`, keys `[n, G, T, D]`, values `[n, G, T, Dv]`, row `i` of
        `sequences[i]`. Raises as `AttentionLayer.step`, and ValueError for sequences that are not
        open or come twice; then all are as they were.
        """
        some, g = self._several(sequences), self.geometry
        check_tokens(keys, values, len(some), g)
        check_queries(queries, len(some), g, keys.shape[2])
        rows = [slice(i, i + 1) for i in range(len(some))]
        with all_or_nothing(some):
            outputs = [
                layer.step(queries[row], keys[row], values[row])
                for layer, row in zip(some, rows, strict=True)
            ]
        return torch.cat(outputs)

    def explain(self) -> str:
        """How a list of sequences is stepped, and how each index runs, a line each."""
        explains = capability(self._like.index, Explains)
        how = "sequences: one after the other, each by the graphs and kernels of its index"
        return how + ("" if explains is None else f"\n{explains.explain()}")

    def report(self) -> Report:
        """What the indexes of all sequences hold together, and what of it they share.

        tokens: in the indexes; sink and window are each sequence's own.
        """
        indexes = [layer.index for layer in self._open.values()]
        return Report.of(indexes, sum(map(len, indexes)))

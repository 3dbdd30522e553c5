"""LayerPool: one attention layer for many sequences, each with its own sink, window and index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import Explains, JoinsBatch, LimitsSteps
from kvindex.core.transaction import in_plain_torch
from kvindex.layer.attention_layer import AttentionLayer
from kvindex.pool.report import LayersReport, Report
from kvindex.pool.sequences import Sequences, check_queries, check_tokens, undone
from kvindex.pool.together import LayersTogether


class LayerPool(Sequences[AttentionLayer]):
    """Many sequences of one attention layer, for a serving engine that batches them in any way.

    Args:
        layer: An empty layer. Each sequence gets a copy of this layer, with batch size 1.

    Raises:
        ValueError: The layer is not empty.
    """

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__(layer)
        self.geometry = self._like.index.geometry
        self._together: LayersTogether | None = None
        plain = type(layer).step is AttentionLayer.step
        limits = capability(self._like.index, LimitsSteps) is not None
        plain = plain and layer.coverage is None and (layer.error is None or limits)
        if plain and capability(self._like.index, JoinsBatch) is not None:
            self._together = LayersTogether(self._like, graphs=layer.graphs)
        self._joined = self._alone = 0  # steps that ran together and alone

    @in_plain_torch
    def step(
        self, sequences: Sequence[int], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Append `T` tokens to each of `n` sequences, and return their causal attention.

        If the index supports it, each kernel is launched once for all sequences that search their
        index or attend only to their window (see `explain`). If the call fails, all sequences are
        unchanged.

        Args:
            sequences: Numbers of open sequences, without duplicates.
            queries: `[n, H, T, D]`, after the rotary embedding; entry `i` belongs to
                `sequences[i]`.
            keys: `[n, G, T, D]`, after the rotary embedding.
            values: `[n, G, T, Dv]`.

        Returns:
            Attention outputs `[n, H, T, Dv]`.

        Raises:
            ValueError: A sequence is not open or occurs twice, or `AttentionLayer.step` raised it.
            TypeError: An argument is not a tensor, or `sequences` is a single number.
        """
        some, g = self._several(sequences), self.geometry
        check_tokens(keys, values, len(some), g)
        check_queries(queries, len(some), g, T := keys.shape[2])
        check.at_least("queries.shape[2] (tokens)", T, 1)
        given = queries.detach(), keys.detach(), values.detach()
        ways_back = list[Callable[[], None]]()
        with undone(ways_back):
            joined = self._joining(some, T, ways_back)
            outputs = dict[int, Tensor]()
            for i in [i for i in range(len(some)) if i not in joined]:
                layer = some[i]
                ways_back.append(partial(layer.rollback, layer.checkpoint()))
                outputs[i] = layer.step(*(part[i : i + 1] for part in given))
            if joined and self._together is not None:
                mine = given if not outputs else [part[joined] for part in given]
                output = self._together.step([some[i] for i in joined], *mine)
                outputs |= zip(joined, output.tensor_split(len(joined)), strict=True)
            if len(joined) < len(some):
                output = torch.cat([outputs[i] for i in range(len(some))])
        self._joined, self._alone = (
            self._joined + len(joined),
            self._alone + len(some) - len(joined),
        )
        return output

    def _joining(
        self, layers: list[AttentionLayer], tokens: int, ways_back: list[Callable[[], None]]
    ) -> list[int]:
        """Prepare a decode step that runs several layers together.

        Args:
            layers: The layers of the sequences.
            tokens: Number of tokens of the decode step.
            ways_back: A list to which functions are added that undo the changes to the layers.

        Returns:
            Positions in `layers` of the layers that the decode step runs together.
        """
        if self._together is None:
            return []
        decoding = [i for i, layer in enumerate(layers) if layer.decodes(tokens)]
        if len(decoding) < 2:
            return []
        for i in decoding:
            ways_back.append(layers[i].way_back(tokens))
            layers[i].begin_decoding()
        joining = [i for i in decoding if self._alike(layers[i]) and layers[i].joins(tokens)]
        several = len(joining) > 1 and any(len(layers[i].index) for i in joining)
        return joining if several else []

    def _alike(self, layer: AttentionLayer) -> bool:
        """Return True if a layer's searches have the same options as those of new sequences."""
        like = self._like
        return layer.k == like.k and (layer.error is None) == (like.error is None)

    def explain(self) -> str:
        """Explain which implementation computes a step.

        Returns:
            A line that says whether the same kernels compute several sequences together, or each
            sequence runs separately. It is followed by the index's explanation.
        """
        explains = capability(self._like.index, Explains)
        how = "one after the other, each by the graphs and kernels of its index"
        if self._together is not None and self._like.error is not None:
            how = (
                "tokens that search, together, by kernels; prompts, and sequences that have only a "
                "window, have too few measured outputs for a number of rows, or attend densely to "
                f"an index, {how}"
            )
        elif self._together is not None:
            how = (
                "tokens that search, or have but a window, together, by kernels; prompts, and "
                f"sequences that attend densely to an index, {how}"
            )
        return f"sequences: {how}" + ("" if explains is None else f"\n{explains.explain()}")

    def report(self) -> LayersReport:
        """Report the memory of all indexes, how much of it they share, and the number of steps.

        Sinks and windows are not included, because sequences do not share them.
        """
        layers = list(self._open.values())  # another thread may open or close sequences meanwhile
        indexes = [layer.index for layer in layers]
        held = vars(Report.of(indexes, sum(map(len, indexes))))
        return LayersReport(**held, together=self._joined, alone=self._alone)

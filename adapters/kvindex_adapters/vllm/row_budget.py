"""With `k="auto"`, one layer's limit of the error of attention, and the rows that it has led to."""

from __future__ import annotations

from torch import Tensor

from kvindex.core.protocol import UNUSED, ErrorLimit, Hits
from kvindex.layer.output_scale import HORIZON, LAST, OutputScale


class RowBudget:
    """The limit of the error of one layer, for all sequences of an engine.

    The limit follows from the mean size of the layer's values and outputs. A sequence whose prompt
    was in the prefix cache has computed no outputs, so the sizes are those of the engine: they are
    measured once, on the first `HORIZON` tokens with full attention, and then stay the same. Only
    tokens in sequences that are long enough to be searched are measured. Until `FEWEST` tokens are
    measured, decode steps use full attention.

    Args:
        error: Allowed error of the layer's output, relative to the size of its outputs.
        dense_below: Sequences with fewer tokens use full attention.
    """

    def __init__(self, error: float, dense_below: int) -> None:
        self._error, self._dense_below = error, dense_below
        self._scale, self._seen, self._found = OutputScale(), 0, 0.0

    @property
    def known(self) -> bool:
        """True if enough tokens have been measured for searches to choose their numbers of rows."""
        return self._scale.known

    def places(self, length: int, count: int) -> range:
        """Return which of the newest `count` tokens of a sequence `measure` expects.

        Args:
            length: Number of tokens of the sequence.
            count: Number of newest tokens, whose outputs were computed with full attention.

        Returns:
            Positions in the sequence, empty if no token shall be measured.
        """
        first = max(length - min(count, LAST), self._dense_below - 1)
        return range(first, length if self._seen < HORIZON else first)

    def measure(self, values: Tensor, outputs: Tensor) -> None:
        """Measure the tokens that `places` has returned.

        Args:
            values: `[1, G, T, Dv]`.
            outputs: `[1, H, T, Dv]`.
        """
        self._scale.measure(values, outputs, None)
        self._seen += values.shape[2]

    def limit(self, lse: Tensor) -> ErrorLimit:
        """Return the limit of a search.

        Args:
            lse: Log-sum-exp of the logits of all tokens that are not searched, `[1, H]`.
        """
        return ErrorLimit(self._scale.variance(self._error), lse)

    def count(self, hits: Hits) -> None:
        """Count the rows that a search has found, as a mean over KV heads."""
        self._found += float((hits.ids != UNUSED).sum(-1).float().mean())

    def take_found(self) -> float:
        """Return the rows that were counted since the last call."""
        found, self._found = self._found, 0.0
        return found

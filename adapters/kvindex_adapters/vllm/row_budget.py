"""With `k="auto"`, one layer's limit of the error of attention, and the rows that it has led to."""

from __future__ import annotations

from torch import Tensor

from kvindex.core.protocol import UNUSED, ErrorLimit, Hits
from kvindex.layer.output_scale import LAST, OutputScale


class RowBudget:
    """The limits of the error of one layer, for all sequences of an engine.

    A limit follows from the mean size of the layer's values and outputs. A sequence whose prompt
    was in the prefix cache has computed no outputs, so the sizes are those of all sequences of the
    engine with a similar length. Outputs of long sequences are smaller, because they are means of
    more values. So lengths are divided into classes by powers of two, and each class has a moving
    average over some 1,000 tokens (`OutputScale`). Only tokens with full attention, or with sparse
    attention of prompts, are measured, in sequences that are long enough to be searched. Until
    `FEWEST` tokens of some class are measured, decode steps use full attention.

    Args:
        error: Allowed error of the layer's output, relative to the size of its outputs.
        dense_below: Sequences with fewer tokens use full attention.
    """

    def __init__(self, error: float, dense_below: int) -> None:
        self._error, self._dense_below = error, dense_below
        self._scales: dict[int, OutputScale] = {}  # bits of the length -> sizes of its class
        self._found = 0.0

    @property
    def known(self) -> bool:
        """True if enough tokens have been measured for searches to choose their numbers of rows."""
        return any(scale.known for scale in self._scales.values())

    def places(self, length: int, count: int) -> range:
        """Return which of the newest `count` tokens of a sequence `measure` expects.

        Args:
            length: Number of tokens of the sequence.
            count: Number of newest tokens, whose outputs were computed without a search.

        Returns:
            Positions in the sequence, empty if no token shall be measured.
        """
        return range(max(length - min(count, LAST), self._dense_below - 1), length)

    def measure(self, values: Tensor, outputs: Tensor, length: int) -> None:
        """Measure the tokens that `places` has returned.

        They are ignored if a value or an output is not finite, which would make all later limits of
        the layer NaN.

        Args:
            values: `[1, G, T, Dv]`.
            outputs: `[1, H, T, Dv]`.
            length: Number of tokens of the sequence.
        """
        if all(bool(part.float().square().sum().isfinite()) for part in (values, outputs)):
            scale = self._scales.setdefault(length.bit_length(), OutputScale())
            scale.measure(values, outputs, None)

    def limit(self, lse: Tensor, length: int) -> ErrorLimit:
        """Return the limit of a search.

        If too few tokens of the sequence's class are measured, the limit is that of the class with
        the most similar length. `known` must be True.

        Args:
            lse: Log-sum-exp of the logits of all tokens that are not searched, `[1, H]`.
            length: Number of tokens of the sequence.
        """
        bits = length.bit_length()
        known = (each for each, scale in self._scales.items() if scale.known)
        nearest = min(known, key=lambda each: (abs(each - bits), -each))
        return ErrorLimit(self._scales[nearest].variance(self._error), lse)

    def count(self, hits: Hits) -> None:
        """Count the rows that a search has found, as a mean over KV heads."""
        self._found += float((hits.ids != UNUSED).sum(-1).float().mean())

    def take_found(self) -> float:
        """Return the rows that were counted since the last call."""
        found, self._found = self._found, 0.0
        return found

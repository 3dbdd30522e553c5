"""`PromptQueries`: a sample of the prompt's queries, which some indexes use to select tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Codes
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, below

CHOICES = ("last", "first", "random", "evenly")


@dataclass(frozen=True)
class PromptQueries:
    """A sample of at most a given number of queries, sorted by position.

    Attributes:
        queries: `[B, H, R, D]`.
        positions: Position of each query's token in the sequence, int64 `[R]`.
        end: Position after the newest query that was received, even if that query is not sampled.
    """

    queries: Tensor
    positions: Tensor
    end: int

    @staticmethod
    def of(
        before: PromptQueries | None,
        queries: Tensor,
        positions: Tensor,
        *,
        most: int,
        choice: str,
        seed: int = 0,
    ) -> PromptQueries:
        """Add new queries to a sample, and reduce the sample to at most `most` queries.

        Old queries at or after the first new position are dropped, because their tokens were
        truncated.

        Args:
            before: The sample so far, or None.
            queries: New queries, `[B, H, T, D]`.
            positions: Positions of the new queries' tokens, int64 `[T]`, ascending.
            most: Largest number of queries in the sample.
            choice: How queries are chosen, one of `CHOICES`.
            seed: Seed for the choice "random".
        """
        end = int(positions[-1]) + 1
        if before is not None:
            valid = before.positions < positions[0]
            queries = torch.cat([before.queries[:, :, valid], queries], dim=2)
            positions = torch.cat([before.positions[valid], positions])
        chosen = priority(positions, choice, seed).argsort()[:most].sort().values
        return PromptQueries(queries[:, :, chosen].clone(), positions[chosen], end)

    def chosen(self, counts: Tensor, usable: Tensor, *, choice: str, seed: int = 0) -> Tensor:
        """Choose up to `counts[b]` usable queries of each sequence `b`.

        Return a mask, bool `[B, R]`.

        Args:
            counts: Largest number of queries to choose, int64 `[B]`.
            usable: True for queries that may be chosen, bool `[B, R]`.
            choice: How queries are chosen, one of `CHOICES`.
            seed: Seed for the choice "random".
        """
        order = priority(self.positions, choice, seed).argsort()
        ranked = usable[:, order]
        chosen = torch.zeros_like(ranked)
        chosen[:, order] = ranked & (ranked.cumsum(1) <= counts[:, None])
        return chosen

    def before(self, length: int) -> PromptQueries | None:
        """Return those of the sampled queries that belong to the first `length` tokens.

        Return None if there are none.
        """
        known = self.positions < length
        if not bool(known.any()):
            return None
        return PromptQueries(
            self.queries[:, :, known], self.positions[known], min(self.end, length)
        )

    def reordered(self, batch_indices: Tensor) -> PromptQueries:
        """Reorder the sampled queries like the sequences of a batch.

        Sequence `b` of the result is sequence `batch_indices[b]` of this object.
        """
        return PromptQueries(self.queries[batch_indices], self.positions, self.end)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of this object. Callers use them to compute the memory in use."""
        return [self.queries, self.positions]


def are_real(queries: Tensor) -> Tensor:
    """Return True for queries of real tokens, bool `[B, R]`. The queries of padded tokens are zero.

    queries: `[B, H, R, D]`.
    """
    return (queries != 0).any(3).any(1)


def layout_of_queries(name: str, sizes: StateSizes, geometry: Geometry) -> Layout:
    """Return the shape and dtype that each tensor of a saved `PromptQueries` must have.

    name: the name under which the `PromptQueries` object was saved.
    """
    if not sizes.has(name):
        return {}
    return {
        f"{name}.queries": TensorSpec("B H R D", geometry.dtype),
        f"{name}.positions": TensorSpec("R", torch.int64, least=0),
        f"{name}.end": TensorSpec(
            "",
            torch.int64,
            least=0,
            allowed="greater than all positions",
            rule=lambda state: below(state[f"{name}.positions"], state[f"{name}.end"]),
        ),
    }


def priority(positions: Tensor, choice: str, seed: int = 0) -> Tensor:
    """Return a number for each position, int64 `[T]`. A sample consists of the lowest numbers.

    For "last", the number is the negative position. For "first", it is the position. For "random",
    it is a 64-bit hash of position and seed. For "evenly", it is the position with its 32 bits in
    reverse order, so that a sample of any size is spread evenly (van der Corput, 1935). Different
    positions below 2^32 have different numbers.
    """
    if choice == "last":
        return -positions
    order = positions
    if choice == "random":
        order = order + (seed << 32)
        for odd in (-7046029254386353131, -4658895280553007687):  # factors of splitmix64
            order = order * odd
            order = order ^ order >> 31
    elif choice == "evenly":
        for shift in (16, 8, 4, 2, 1):
            mask = 0xFFFFFFFF // (2**shift + 1)  # 0x0000FFFF, 0x00FF00FF, …
            order = (order >> shift & mask) | (order & mask) << shift
    return order


class PromptQueriesIndex(BaseIndex):
    """Base of an index that uses a sample of the prompt's queries to select tokens.

    `_observed` is the sample, or None before the first query. `_prompt_ended` is True once the
    prompt is complete.
    """

    statistics: ClassVar[tuple[str, ...]] = ("_observed", "_prompt_ended")

    _observed: PromptQueries | None
    _prompt_ended: bool

    def _checked_queries(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Check observed queries `[B, H, T, D]`, and replace NaN and infinite values by 0.

        Raises:
            ValueError: A shape, dtype or device does not fit.
            TypeError: An argument is not a tensor.
        """
        g, observed = self.geometry, self._observed
        batch = observed.queries.shape[0] if self._batch is None and observed else self._batch
        shape = {"B": batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        check.tensor("positions", positions, {"T": queries.shape[2]}, torch.int64, g.device)
        return queries.detach().nan_to_num(0, 0, 0)

    def _sample_queries(self, queries: Tensor, positions: Tensor, most: int) -> None:
        """Add queries to the sample, which contains the last `most` queries of the prompt."""
        if len(positions):
            self._observed = PromptQueries.of(
                self._observed, queries, positions, most=most, choice="last"
            )

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch, including queries that were observed before the first append."""
        if self._batch is None and self._observed:
            check.rows("batch_indices", batch_indices, self._observed.queries.shape[0])
            self._observed = self._observed.reordered(batch_indices.to(self.geometry.device))
        super().reorder(batch_indices)

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        if self._observed is not None:
            batch = {"B": self._observed.queries.shape[0], "G": None, "N": None, "D": None}
            check.tensor("keys", keys, batch)
        return super()._learn(keys, valid)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> PromptQueries | None:
        return self._observed

    def _with_truncated(self, length: int) -> PromptQueries | None:
        return self._observed

    def _with_reordered(self, batch_indices: Tensor) -> PromptQueries | None:
        return self._observed and self._observed.reordered(batch_indices)

    def _commit(self, statistics: PromptQueries | None) -> None:
        self._observed = statistics

    def _cleared(self) -> None:
        self._observed, self._prompt_ended = None, False

    def _layout(self, sizes: StateSizes) -> Layout:
        return super()._layout(sizes) | layout_of_queries(
            "statistics.observed", sizes, self.geometry
        )

    def _other_tensors(self) -> list[Tensor]:
        observed = self._observed
        return observed.tensors() if observed else []

"""Stages of a step with sign votes: buffers for each stage, and calls of kernels on threads.

The stages are `prepare_query`, `scan`, `find` (select candidates, rerank, select rows) and
`attend`. Intermediate results are stored in buffers that belong to the thread; final results are
new arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.lazy import lazy
from kvindex.core.resident import ResidentRows
from kvindex.cpu import threads
from kvindex.cpu.attend_rows import attending
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.lookup import LARGEST, NIBBLES, SERVED
from kvindex.cpu.kernels.query import GROUP, prepare
from kvindex.cpu.kernels.scan import scan
from kvindex.cpu.kernels.select import SAMPLED
from kvindex.cpu.kernels.step import find_rows
from kvindex.cpu.pariskv.constants import Constants
from kvindex.cpu.state import ResidentState, State
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.config import ParisKVConfig

FEW_KEYS = 2**19
"""Total number of keys, over all groups, up to which one thread is used.

Waking another thread takes about 0.1 ms, and a thread still has the votes that it wrote in its
cache.
"""


@dataclass(frozen=True)
class Prepared:
    """Queries `[B·G, g, D]` in the forms that the stages read.

    Attributes:
        queries: Float32.
        rotated: Rotated queries with their norms, float32.
        units: Inner product that a vote of 1 represents, float64 `[B·G, g]`.
        planes: Bit planes of the rounded queries, or empty if tables are used (`kernels.query`).
        tables: Look-up tables of the rounded queries, or empty if planes are used
            (`kernels.query`).
        totals: Constants to subtract from inner products computed with planes or tables.
        scales: Gains and totals for sampling (`kernels.scan`), or empty without sampling.
        seeds: Seeds of the noise for sampling.
        products: Inner products with centers, float32 `[B·G, S, g]`, which the scan writes.
    """

    queries: np.ndarray
    rotated: np.ndarray
    units: np.ndarray
    planes: np.ndarray
    tables: np.ndarray
    totals: np.ndarray
    scales: np.ndarray
    seeds: np.ndarray
    products: np.ndarray


@dataclass(frozen=True)
class Scanned:
    """Votes int32 `[B·G, N]`, or upper bounds of priorities with sampling."""

    votes: np.ndarray


@dataclass(frozen=True)
class Found:
    """Rows that a search has found.

    Attributes:
        ids: Int64 `[B·G, k]`, best first, padded with -1.
        scores: Float32 `[B·G, k]`.
        found: Number of rows, int32 `[B·G]`.
        log_weight: Log weights of sampled rows, float32 `[B·G, g, k]`, or None.
    """

    ids: np.ndarray
    scores: np.ndarray
    found: np.ndarray
    log_weight: np.ndarray | None = None

    def weights(self, batch: int) -> Tensor | None:
        """Return the log weights in the shape of `Hits.log_weight`."""
        if self.log_weight is None:
            return None
        return torch.from_numpy(self.log_weight).view(batch, -1, self.log_weight.shape[-1])


def room_of_queries(shape: tuple[int, ...], query_max: int) -> tuple[np.ndarray, ...]:
    """Return buffers for the results of the kernel `prepare` for queries of this shape."""
    array, (groups, heads, D) = BUFFERS.array, shape
    digits = 1 if query_max < 2 ** (GROUP - 1) else 2
    words, looked_up = -(-D // 64), SERVED and query_max <= LARGEST
    counts = (0, words) if looked_up else (words, 0)
    return (
        array("rotated", np.float32, groups, heads, D),
        array("units", np.float64, groups, heads),
        array("planes", np.uint64, groups, heads, digits * GROUP, counts[0]),
        array("tables", np.uint8, groups, heads, counts[1], NIBBLES, 16),
        array("totals", np.int32, groups, heads),
    )


def room_of_candidates(
    parts: int, heads: int, most: int, length: int, k: int
) -> tuple[np.ndarray, ...]:
    """Return buffers for `find_rows` with up to `most` candidates per group."""
    array, entries = BUFFERS.array, length + 2 * SAMPLED
    return (
        array("chosen", np.int32, parts, most + 1),
        array("estimates", np.float32, parts, heads, most),
        array("sums", np.float32, parts, most),
        array("agreed", np.float32, parts, most),
        array("listed", np.int32, parts, entries),
        array("numbers", np.int32, parts, entries),
        array("positions", np.int32, parts, k + 1),
        array("entries", np.int64, parts, 2, k),
    )


@dataclass(frozen=True)
class Stages:
    """The stages for the current contents of an index."""

    geometry: Geometry
    config: ParisKVConfig
    constants: Constants
    state: State

    def most_parts(self, groups: int) -> int:
        """Return how many threads are worthwhile for a number of groups."""
        return groups if groups * self.state.length > FEW_KEYS else 1

    def prepare_query(self, queries: np.ndarray) -> Prepared:
        """Rotate and round queries float32 `[B·G, g, D]`."""
        constants = self.constants
        query_max, shape = constants.query_max, queries.shape
        made = BUFFERS.room(("asked", shape, query_max), lambda: room_of_queries(shape, query_max))
        by = constants.rotation, self.state.regression, query_max
        prepare(queries, *by, self.state.scales, constants.level, *made)
        groups, heads, _ = shape
        none = np.empty((groups, 0, 2), np.float32), np.empty(groups, np.uint32)
        products = BUFFERS.array("products", np.float32, groups, self._blocks, heads)
        return Prepared(queries, *(*made, *none, products))

    @lazy
    def _blocks(self) -> int:
        return -(-self.state.length // (self.config.center or BLOCK))

    @lazy
    def _scanned_codes(self) -> tuple[Any, ...]:
        state, block = self.state, self.config.center or BLOCK
        codes = state.signs, state.weights, state.centers, state.valid
        return *codes, state.length, state.full, block, state.factors

    def scan(self, asked: Prepared) -> Scanned:
        """Compute the votes of all keys."""
        groups, codes = len(asked.queries), self._scanned_codes
        votes = BUFFERS.array("votes", np.int32, groups, self.state.length)
        if not self.config.center:
            asked.products.fill(0)

        def part(i: int, parts: int) -> None:
            of = asked.queries, asked.units, asked.planes, asked.tables, asked.totals
            scan(i, parts, *codes, *of, asked.scales, asked.seeds, asked.products, votes)

        threads.run(part, 1 if self.most_parts(groups) == 1 else groups * self._blocks)
        return Scanned(votes)

    @lazy
    def _ranked_codes(self) -> tuple[Any, ...]:
        state, config = self.state, self.config
        sizes = state.length, state.full, config.center or BLOCK
        codes = state.signs, state.magnitudes, state.weights, state.fractions
        return *sizes, *codes, config.magnitude_bits

    @lazy
    def _ranked_by(self) -> tuple[Any, ...]:
        g, constants = self.geometry, self.constants
        by_largest = self.config.group == "max_share"
        return constants.levels, constants.fine, g.scale, g.softcap or 0.0, by_largest

    def find(
        self, asked: Prepared, scanned: Scanned, k: int, limits: np.ndarray
    ) -> tuple[Found, threads.Part]:
        """Return hits, and a function that selects candidates and rows for a part of the groups.

        `limits` is the number of candidates of each group, int64 `[B·G]`.
        """
        (groups, heads, _), codes, by = asked.queries.shape, self._ranked_codes, self._ranked_by
        parts = threads.parts_of(self.most_parts(groups))
        sizes = parts, heads, max(limits.tolist()), self.state.length, k
        room = BUFFERS.room(("found", sizes), lambda: room_of_candidates(*sizes))
        ids, scores = np.empty((groups, k), np.int64), np.empty((groups, k), np.float32)
        hits = Found(ids, scores, np.empty(groups, np.int32))

        def part(i: int, parts: int) -> None:
            votes, of = (scanned.votes, limits), (asked.rotated, asked.products)
            find_rows(i, parts, *votes, *codes, *of, *by, *room, ids, scores, hits.found)

        return hits, part

    def attend(
        self,
        queries: np.ndarray,
        ids: np.ndarray,
        log_weight: Tensor | None,
        resident: ResidentRows,
        resident_state: ResidentState,
    ) -> tuple[np.ndarray, np.ndarray, threads.Part]:
        """Return output float32 `[B·G, g, Dv]`, lse `[B·G, g]`, and a function that writes both."""
        rows = self.state.rows, self.state.row_bytes, self.most_parts(len(queries))
        return attending(self.geometry, *rows, queries, ids, log_weight, resident, resident_state)

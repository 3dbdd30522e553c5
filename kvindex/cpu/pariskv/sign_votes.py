"""The stages of a search with `coarse="sign_votes"`, and of attention to its result.

The stages are `prepare_query`, `scan`, `find` (select candidates, rerank, select rows) and
`attend`. Each stage allocates its buffers and runs a kernel on several threads. Intermediate
results are stored in buffers that later calls on the same thread reuse. Final results are new
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

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
"""Total number of keys of all groups up to which one thread runs all stages.

Waking another thread takes about 0.1 ms. A thread that selects rows also reads votes faster if it
has computed them itself, because they are in its CPU cache.
"""


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A kernel and its arguments."""


@dataclass(frozen=True)
class Prepared:
    """The queries of a search, and tensors computed from the queries for the later stages.

    Coarse scores of keys (votes) are computed with look-up tables if the CPU supports it
    (`kernels.lookup.SERVED`) and `query_max` is at most 31. Otherwise they are computed with bit
    planes.

    Attributes:
        queries: Float32 `[B·G, g, D]`.
        rotated: Rotated queries, not normalized, float32 `[B·G, g, D]`.
        units: Inner product that corresponds to a vote of 1, float64 `[B·G, g]`.
        planes: Bit planes of the rounded queries (`kernels.query`); empty if tables are used.
        tables: Look-up tables of the rounded queries (`kernels.query`); empty if bit planes are
            used.
        totals: Constants to subtract from inner products that were computed with bit planes or
            tables, int32 `[B·G, g]`.
        scales: Gain and total of each query head, two numbers that convert votes to estimated log
            weights of keys (`ops.priority`); empty without sampling.
        seeds: Seed of each group's random numbers, uint32 `[B·G]`; not used without sampling.
        products: Buffer for the queries' inner products with block centers, float32 `[B·G, S, g]`,
            which `scan` fills.
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
    """The coarse score (vote) of every key in an index, int32 `[B·G, N]`.

    If the index samples rows, `votes` contains upper bounds of the keys' priorities instead. The
    priority of a key is its estimated log weight plus random noise.
    """

    votes: np.ndarray


@dataclass(frozen=True)
class Found:
    """Rows that a search has selected.

    Attributes:
        ids: Token ids, best first, padded with -1, int64 `[B·G, k]`.
        scores: Scores of the rows, float32 `[B·G, k]`.
        found: Number of selected rows, int32 `[B·G]`.
        log_weight: Log weights of sampled rows, float32 `[B·G, g, k]`, or None without sampling.
    """

    ids: np.ndarray
    scores: np.ndarray
    found: np.ndarray
    log_weight: np.ndarray | None = None

    def weights(self, batch: int) -> Tensor | None:
        """Return the log weights as a tensor `[B, H, k]`, or None without sampling."""
        if self.log_weight is None:
            return None
        return torch.from_numpy(self.log_weight).view(batch, -1, self.log_weight.shape[-1])


def room_of_queries(shape: tuple[int, ...], query_max: int) -> tuple[np.ndarray, ...]:
    """Allocate the arrays that the kernel `query.prepare` fills, for queries of the given shape."""
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
    """Allocate the buffers of the kernel `step.find_rows`.

    Args:
        parts: Number of threads.
        heads: Number of query heads per KV head.
        most: Largest number of candidates of a group.
        length: Number of keys.
        k: Number of rows to select per group.
    """
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
    """The stages of a search, for the codes and rows whose addresses are in `state`."""

    geometry: Geometry
    config: ParisKVConfig
    constants: Constants
    state: State

    def most_parts(self, groups: int) -> int:
        """Return the largest useful number of threads for a search.

        The result is `groups`, the number of groups of query heads (batch size times KV heads), or
        1 if there are few keys.
        """
        return groups if groups * self.state.length > FEW_KEYS else 1

    def prepare_query(self, queries: np.ndarray) -> Prepared:
        """Rotate `queries`, float32 `[B·G, g, D]`, and round them to integers."""
        asked = self.room_of(queries)
        for kernel, arguments in self.preparing(asked):
            kernel(*arguments)
        return asked

    def room_of(self, queries: np.ndarray) -> Prepared:
        """Return the queries, and empty buffers for everything that is computed from them.

        queries: float32 `[B·G, g, D]`.
        """
        query_max, shape = self.constants.query_max, queries.shape
        made = BUFFERS.room(("asked", shape, query_max), lambda: room_of_queries(shape, query_max))
        groups, heads, _ = shape
        none = np.empty((groups, 0, 2), np.float32), np.empty(groups, np.uint32)
        products = BUFFERS.array("products", np.float32, groups, self._blocks, heads)
        return Prepared(queries, *(*made, *none, products))

    def preparing(self, asked: Prepared) -> list[Call]:
        """Return the kernels that fill the buffers in `asked`, each with its arguments.

        asked: result of `room_of`.
        """
        constants, state = self.constants, self.state
        by = constants.rotation, state.regression, constants.query_max, state.scales
        made = asked.rotated, asked.units, asked.planes, asked.tables, asked.totals
        return [(prepare, (asked.queries, *by, constants.level, *made))]

    @lazy
    def _blocks(self) -> int:
        return -(-self.state.length // (self.config.center or BLOCK))

    @lazy
    def _scanned_codes(self) -> tuple[Any, ...]:
        state, block = self.state, self.config.center or BLOCK
        codes = state.signs, state.weights, state.centers, state.valid
        return *codes, state.length, state.full, block, state.factors

    def scan(self, asked: Prepared) -> Scanned:
        """Compute the coarse scores (votes) of all keys."""
        groups, scanned = len(asked.queries), self.room_of_votes(asked)
        arguments = self.scanning(asked, scanned)
        if not self.config.center:
            asked.products.fill(0)

        def part(i: int, parts: int) -> None:
            scan(i, parts, *arguments)

        threads.run(part, 1 if self.most_parts(groups) == 1 else groups * self._blocks)
        return scanned

    def room_of_votes(self, asked: Prepared) -> Scanned:
        """Return a buffer for the coarse scores (votes) of all keys."""
        shape = len(asked.queries), self.state.length
        return Scanned(BUFFERS.array("votes", np.int32, *shape))

    def scanning(self, asked: Prepared, scanned: Scanned) -> tuple[Any, ...]:
        """Return the arguments of the kernel `scan`.

        The first two arguments of the kernel are not included, because each thread adds them: its
        own number (`part`) and the number of threads (`parts`).
        """
        of = asked.queries, asked.units, asked.planes, asked.tables, asked.totals
        own = asked.scales, asked.seeds, asked.products
        return *self._scanned_codes, *of, *own, scanned.votes

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
        """Allocate the result of a search, and return it with a function that fills it.

        The function selects candidates, reranks them, and selects rows. Each thread calls it for
        some of the groups (`threads.run`). `limits` is the number of candidates of each group,
        int64 `[B·G]`.
        """
        hits = self.room_of_hits(asked, k)
        kernel, arguments = self.finding(asked, scanned, limits, hits)

        def part(i: int, parts: int) -> None:
            kernel(i, parts, *arguments)

        return hits, part

    def room_of_hits(self, asked: Prepared, k: int) -> Found:
        """Return new arrays for `k` selected rows per group."""
        groups = len(asked.queries)
        ids, scores = np.empty((groups, k), np.int64), np.empty((groups, k), np.float32)
        return Found(ids, scores, np.empty(groups, np.int32))

    def finding(self, asked: Prepared, scanned: Scanned, limits: np.ndarray, hits: Found) -> Call:
        """Return the kernel that selects rows, and its arguments.

        The first two arguments of the kernel are not included, because each thread adds them: its
        own number (`part`) and the number of threads (`parts`).
        """
        (groups, heads, _), codes, by = asked.queries.shape, self._ranked_codes, self._ranked_by
        parts, k = threads.parts_of(self.most_parts(groups)), hits.ids.shape[1]
        sizes = parts, heads, max(limits.tolist()), self.state.length, k
        room = BUFFERS.room(("found", sizes), lambda: room_of_candidates(*sizes))
        of = asked.rotated, asked.products
        made = hits.ids, hits.scores, hits.found
        return find_rows, (scanned.votes, limits, *codes, *of, *by, *room, *made)

    def attend(
        self,
        queries: np.ndarray,
        ids: np.ndarray,
        log_weight: Tensor | None,
        resident: ResidentRows,
        resident_state: ResidentState,
    ) -> tuple[np.ndarray, np.ndarray, threads.Part]:
        """Allocate the output of attention, and return a function that computes it.

        Returns:
            Output float32 `[B·G, g, Dv]`, log-sum-exp float32 `[B·G, g]`, and the function that
            fills both.
        """
        rows = self.state.rows, self.state.row_bytes, self.most_parts(len(queries))
        return attending(self.geometry, *rows, queries, ids, log_weight, resident, resident_state)

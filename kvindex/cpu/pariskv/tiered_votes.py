"""Run ParisKV with `coarse="tiered_votes"` on a CPU, with compiled kernels.

Tiered votes are the coarse scores of keys that the ParisKV paper describes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvindex.core.protocol import Contents
from kvindex.cpu import threads
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels import tiered_step, tiered_votes
from kvindex.cpu.pariskv.executor import ParisKVExecutor
from kvindex.cpu.pariskv.sign_votes import Found, Stages
from kvindex.cpu.state import State
from kvindex.pariskv.config import ParisKVConfig
from kvindex.storage.columns import BlockColumns

FEW_KEYS = 2**15
"""Total number of keys of all groups up to which one thread computes the votes.

The number is smaller than in `sign_votes`, because tiered votes take longer: they need a look-up
for each subspace of a key.
"""


@dataclass(frozen=True)
class TieredVotesState(State):
    """Addresses of codes and rows (`State`), and the statistics that tiered votes need.

    A block is one token here, so all blocks are full. In each subspace, the best keys are divided
    into tiers by their centroids, and a key in a better tier gets a higher score.

    Attributes:
        histogram: Number of keys per centroid, int64 `[B·G, M, 256]`.
        bounds: Number of keys at which each tier ends, counted from the best key, int64 `[B·G,
            tiers]`.
    """

    histogram: np.ndarray
    bounds: np.ndarray

    @staticmethod
    def of_contents(
        contents: Contents, codes: BlockColumns, config: ParisKVConfig
    ) -> TieredVotesState:
        """Collect the addresses of an index's codes and rows, and compute where the tiers of
        centroids end."""
        histogram = contents.statistics["histogram"].contiguous()
        batch, heads, *shape = histogram.shape
        bounds = [config.tier_bounds(n) for n in contents.counts.tolist()]
        return TieredVotesState(
            **vars(State.of(contents, codes, heads, None)),
            histogram=histogram.view(batch * heads, *shape).numpy(),
            bounds=np.repeat(np.array(bounds, np.int64), heads, axis=0),
        )


@dataclass(frozen=True)
class Asked:
    """The data that a search computes from its queries, and that its later stages read.

    Attributes:
        rotated: Rotated queries, not normalized, float32 `[B·G, g, D]`.
        tables: Scores of the 256 centroids of each subspace, uint64 `[B·G, words, M, 256]`. A word
            contains the scores for up to eight query heads, one byte each.
    """

    rotated: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class Voted:
    """The coarse scores (votes) of all keys, and a histogram of them.

    Attributes:
        votes: Votes of the keys, uint64 `[B·G, words, N]`. A word contains the votes for up to
            eight query heads, one byte each.
        counts: Number of keys with each vote from 0 to 255, counted separately by each of `parts`
            threads, int64 `[parts, B·G, g, 256]`.
    """

    votes: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class TieredVotesStages(Stages):
    """The stages of a search with tiered votes (the coarse scores of the preset `paper`).

    A search reads the codes (compressed keys) whose addresses are in `state`.
    """

    state: TieredVotesState

    def prepare_query(self, queries: np.ndarray) -> Asked:  # type: ignore[override]
        """Rotate the queries, and compute the score that each centroid gives to its keys.

        queries: float32 `[B·G, g, D]`.
        """
        groups, heads, D = queries.shape
        rotated = BUFFERS.array("rotated", np.float32, groups, heads, D)
        words = -(-heads // tiered_votes.HEADS)
        tables = BUFFERS.array("points", np.uint64, groups, words, D // 8, tiered_votes.CENTROIDS)
        known = self.constants.rotation, self.state.histogram, self.state.bounds
        tiered_votes.prepare(queries, *known, rotated, tables)
        return Asked(rotated, tables)

    def scan(self, asked: Asked) -> Voted:  # type: ignore[override]
        """Compute the coarse scores (votes) of all keys for the queries in `asked`."""
        state, (groups, heads, _) = self.state, asked.rotated.shape
        chunks = groups * -(-state.length // tiered_votes.CHUNK)
        most = chunks if groups * state.length > FEW_KEYS else 1
        words, parts = asked.tables.shape[1], threads.parts_of(most)
        votes = BUFFERS.array("points of keys", np.uint64, groups, words, state.length)
        counts = BUFFERS.array("counts", np.int64, parts, groups, heads, tiered_votes.POINTS)

        def part(i: int, parts: int) -> None:
            codes = state.signs[0], state.valid
            tiered_votes.vote(i, parts, *codes, heads, asked.tables, votes, counts)

        threads.run(part, most)
        return Voted(votes, counts)

    def find(  # type: ignore[override]
        self, asked: Asked, scanned: Voted, k: int, limits: np.ndarray
    ) -> tuple[Found, threads.Part]:
        """Allocate memory for the result of a search, and return it with a function that fills it.

        The function selects candidates, reranks them, and selects rows. `threads.run` calls it in
        each thread, for some of the KV heads. `limits`, int64 `[B·G]`, contains one number per KV
        head: how many candidates each of its query heads may choose.
        """
        state, array, (groups, heads, _) = self.state, BUFFERS.array, asked.rotated.shape
        most = min(int(limits.max()) * heads, state.length)
        parts = threads.parts_of(self.most_parts(groups))
        room = (
            array("chosen", np.int32, parts, state.length + 1),
            array("estimates", np.float32, parts, heads, most),
            array("sums", np.float32, parts, most),
            array("agreed", np.float32, parts, most),
            array("entries", np.int64, parts, most),
        )
        ids, scores = np.empty((groups, k), np.int64), np.empty((groups, k), np.float32)
        hits = Found(ids, scores, np.empty(groups, np.int32))

        def part(i: int, parts: int) -> None:
            g, config = self.geometry, self.config
            codes = state.signs[0], state.magnitudes[0], state.weights[0], state.valid
            of = config.magnitude_bits, asked.rotated, self.constants.levels
            policy = g.scale, g.softcap or 0.0, config.group == "max_share"
            votes = scanned.votes, scanned.counts, limits
            made = *room, ids, scores, hits.found
            tiered_step.find_rows(i, parts, *votes, *codes, *of, *policy, *made)

        return hits, part


class TieredVotesExecutor(ParisKVExecutor):
    """Runs `ParisKV` with tiered votes on a CPU. Keys are encoded in plain torch."""

    encodes = False
    _has_tables = False

    def encoded(self, keys: Tensor, valid: Tensor | None) -> None:
        """Return None: there is no kernel that encodes keys, so the caller encodes them."""

    @property
    def _stages(self) -> Stages:
        """Object that runs the stages of a search on the current codes and rows of the index."""
        if self._ready is None:
            state = TieredVotesState.of_contents(self._contents, self.codes, self._config)
            self._ready = TieredVotesStages(self._geometry, self._config, self._constants, state)
        return self._ready

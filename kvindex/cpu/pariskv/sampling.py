"""Stages of a search that samples candidates and rows, compiled for a CPU.

The module `kvindex.ops.priority` explains how keys are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvindex.core.protocol import Codes, Contents, ErrorLimit
from kvindex.cpu import threads
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.priority import put_scales
from kvindex.cpu.kernels.sampled_rows import sample_rows
from kvindex.cpu.kernels.select import SAMPLED
from kvindex.cpu.pariskv.sign_votes import Call, Found, Prepared, Scanned, Stages
from kvindex.ops import priority
from kvindex.pariskv import row_budget
from kvindex.pariskv.block_layout import BLOCK
from kvindex.storage.columns import BlockColumns


def seeds_of(contents: Contents, codes: BlockColumns, seed: int) -> np.ndarray:
    """Compute one seed for each KV head of each sequence, uint32 `[B·G]`.

    The random number of a key is later computed from the seed `s` of its KV head and its token id:
    it is the hash of `s + SPREAD * id`.

    Args:
        contents: Contents of the index, including the codes of the last, partly filled block.
        codes: Codes of full blocks.
        seed: The option `seed` of the index.
    """
    first = torch.zeros(len(contents.counts), dtype=torch.int64)
    if contents.valid is not None:
        first = contents.valid.int().argmax(-1)
    full: Codes = {name: codes[name] for name in codes} if len(codes) else {}
    own = torch.stack(
        [signs_at(b, at, full, contents.opened) for b, at in enumerate(first.tolist())]
    )
    found = priority.hashed(priority.seeds(own, contents.counts, seed))[..., 0]
    found = (found - first[:, None] * priority.SPREAD) & priority.BITS
    return found.flatten().numpy().astype(np.uint32)


def signs_at(b: int, position: int, full: Codes, opened: Codes) -> Tensor:
    """Return the sign bits of the key at `position` in sequence `b`, uint8 `[G, M]`."""
    stored = full["signs"].shape[2] if full else 0
    return (
        full["signs"][b, :, position]
        if position < stored
        else opened["signs"][b, :, position - stored]
    )


@dataclass(frozen=True)
class ErrorTerms:
    """A limit of the error (`protocol.ErrorLimit`), as arrays with one row per KV head.

    Attributes:
        resident: Log-sum-exp of the logits of tokens outside the index, float32 `[B·G, g]`.
        variances: Largest allowed variance of the attention weights, float32 `[B·G]`.
    """

    resident: np.ndarray
    variances: np.ndarray

    @staticmethod
    def of(limit: ErrorLimit, heads: int) -> ErrorTerms:
        """Convert a limit. `heads` is the number of query heads per KV head."""
        variances = limit.variance.detach().contiguous().flatten().numpy()
        terms = ErrorTerms.of_fixed(len(variances), heads)
        if limit.resident_lse is None:
            return replace(terms, variances=variances)
        resident = limit.resident_lse.detach().contiguous().numpy().reshape(terms.resident.shape)
        return ErrorTerms(resident, variances)

    @staticmethod
    @cache
    def of_fixed(groups: int, heads: int) -> ErrorTerms:
        """Return terms for a search that samples a fixed number of rows, which ignores them."""
        resident = np.full((groups, heads), -np.inf, np.float32)
        return ErrorTerms(resident, np.zeros(groups, np.float32))


@dataclass(frozen=True)
class SampledStages(Stages):
    """The stages of a search that samples candidates and rows.

    Attributes:
        seeds: Seed of each group's random numbers (`seeds_of`).
        limit: The limit of the error from which the number of rows follows, or None for `k` rows.
    """

    seeds: np.ndarray
    limit: ErrorTerms | None = None

    def room_of(self, queries: np.ndarray) -> Prepared:
        """Allocate buffers for the data that the kernels compute from the queries before a search.

        The result contains the queries and the buffers. The buffer `scales` is only needed for
        sampling. It contains two numbers for each query head, which convert the coarse score (vote)
        of a key to the key's estimated log weight.
        """
        scales = BUFFERS.array("scales", np.float32, *queries.shape[:2], 2)
        return replace(super().room_of(queries), scales=scales, seeds=self.seeds)

    def preparing(self, asked: Prepared) -> list[Call]:
        """Return the kernels that fill the buffers in `asked`, each with its arguments."""
        state = self.state
        codes = state.centers, state.length, state.full, self.config.center or BLOCK
        made = self.geometry.scale, asked.products, asked.scales
        return [
            *super().preparing(asked),
            (put_scales, (asked.queries, asked.units, *codes, *made)),
        ]

    def room_of_hits(self, asked: Prepared, k: int) -> Found:
        """Return new arrays for `k` selected rows per group, and for their log weights."""
        groups, heads, _ = asked.queries.shape
        weights = np.empty((groups, heads, k), np.float32)
        return replace(super().room_of_hits(asked, k), log_weight=weights)

    def finding(self, asked: Prepared, scanned: Scanned, limits: np.ndarray, hits: Found) -> Call:
        """Return the kernel that samples rows, and its arguments.

        The first two arguments of the kernel are not included, because each thread adds them: its
        own number (`part`) and the number of threads (`parts`).
        """
        groups, k = hits.ids.shape
        sizes = threads.parts_of(self.most_parts(groups)), self.state.length + 2 * SAMPLED
        room = [BUFFERS.array(name, np.int32, *sizes) for name in ("listed", "numbers")]
        limit = self.limit or ErrorTerms.of_fixed(groups, asked.queries.shape[1])
        counts = row_budget.counts_of(k) if self.limit else [k]
        bounds, of = (scanned.votes, limits, self.seeds), (asked.rotated, asked.products)
        by = *self._ranked_by[:-1], self.config.sampling == "tempered"
        rows = np.array(counts), limit.resident, limit.variances
        made = hits.ids, hits.scores, hits.found, hits.log_weight
        return sample_rows, (*bounds, *self._ranked_codes, *of, *by, *rows, *room, *made)

"""Stages of a decode step that samples candidates and rows (`ops.priority`), and their seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvindex.core.protocol import Codes, Contents
from kvindex.cpu import threads
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.priority import put_scales
from kvindex.cpu.kernels.sampled_rows import sample_rows
from kvindex.cpu.kernels.select import SAMPLED
from kvindex.cpu.pariskv.sign_votes import Found, Prepared, Scanned, Stages
from kvindex.ops import priority
from kvindex.pariskv.block_layout import BLOCK
from kvindex.storage.columns import BlockColumns


def seeds_of(contents: Contents, codes: BlockColumns, seed: int) -> np.ndarray:
    """Return the seed of each group's noise, uint32 `[B·G]`.

    A key's noise is the hash of the seed plus `SPREAD` times its id.

    Args:
        contents: Contents of the index, with the open block's codes.
        codes: Codes of full blocks.
        seed: Seed of the configuration.
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
    """Return the signs of one key, uint8 `[G, M]`, from full blocks or the open block."""
    stored = full["signs"].shape[2] if full else 0
    return (
        full["signs"][b, :, position]
        if position < stored
        else opened["signs"][b, :, position - stored]
    )


@dataclass(frozen=True)
class SampledStages(Stages):
    """Stages of an index that samples candidates and rows.

    Attributes:
        seeds: Seeds of the noise (`seeds_of`).
    """

    seeds: np.ndarray

    def prepare_query(self, queries: np.ndarray) -> Prepared:
        """Prepare queries, and compute their gains, totals and inner products with centers."""
        asked, state = super().prepare_query(queries), self.state
        scales = BUFFERS.array("scales", np.float32, *queries.shape[:2], 2)
        sizes = state.length, state.full, self.config.center or BLOCK
        codes, scale = (state.centers, *sizes), self.geometry.scale
        put_scales(queries, asked.units, *codes, scale, asked.products, scales)
        return replace(asked, scales=scales, seeds=self.seeds)

    def find(
        self, asked: Prepared, scanned: Scanned, k: int, limits: np.ndarray
    ) -> tuple[Found, threads.Part]:
        """Return hits with log weights, and a function that samples them for part of the groups."""
        (groups, heads, _), codes = asked.queries.shape, self._ranked_codes
        sizes = threads.parts_of(self.most_parts(groups)), self.state.length + 2 * SAMPLED
        room = [BUFFERS.array(name, np.int32, *sizes) for name in ("listed", "numbers")]
        ids, scores = np.empty((groups, k), np.int64), np.empty((groups, k), np.float32)
        weights = np.empty((groups, heads, k), np.float32)
        hits = Found(ids, scores, np.empty(groups, np.int32), weights)
        by = (
            *self._ranked_by[:-1],
            priority.temper(k) if self.config.sampling == "tempered" else 1.0,
        )

        def part(i: int, parts: int) -> None:
            bounds, of = (scanned.votes, limits, self.seeds), (asked.rotated, asked.products)
            made = ids, scores, hits.found, weights
            sample_rows(i, parts, *bounds, *codes, *of, *by, *room, *made)

        return hits, part

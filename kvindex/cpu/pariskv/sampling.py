"""Stages of a search that samples candidates and rows (`ops.priority`)."""

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
    """Compute the seed of each group's random numbers, uint32 `[B·G]`.

    The random number of a key is the hash of `seed + SPREAD * id`.

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
    """Return the signs of the key at `position` of sequence `b`, uint8 `[G, M]`."""
    stored = full["signs"].shape[2] if full else 0
    return (
        full["signs"][b, :, position]
        if position < stored
        else opened["signs"][b, :, position - stored]
    )


@dataclass(frozen=True)
class SampledStages(Stages):
    """The stages of a search that samples candidates and rows.

    Attributes:
        seeds: Seed of each group's random numbers (`seeds_of`).
    """

    seeds: np.ndarray

    def prepare_query(self, queries: np.ndarray) -> Prepared:
        """Rotate and round the queries, and compute the terms that convert votes to sizes.

        A size is an estimate of the logarithm of a key's attention weight.
        """
        asked, state = super().prepare_query(queries), self.state
        scales = BUFFERS.array("scales", np.float32, *queries.shape[:2], 2)
        sizes = state.length, state.full, self.config.center or BLOCK
        codes, scale = (state.centers, *sizes), self.geometry.scale
        put_scales(queries, asked.units, *codes, scale, asked.products, scales)
        return replace(asked, scales=scales, seeds=self.seeds)

    def find(
        self, asked: Prepared, scanned: Scanned, k: int, limits: np.ndarray
    ) -> tuple[Found, threads.Part]:
        """Allocate the result of a search, and return a function that samples the rows into it.

        Each thread calls the returned function for some of the groups (`threads.run`).
        """
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

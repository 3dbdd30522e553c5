"""What a search reads: the tokens' codes and what follows from them, and the queries, rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.pariskv import sign_regression
from kvindex.pariskv.config import ParisKVConfig
from kvindex.pariskv.encoding import Encoding


@dataclass(frozen=True)
class Tokens:
    """What an index holds, as it is when a search begins.

    parts: codes of the full blocks and of the open one, `[B, G, n, ...]`, where there are; counts:
    valid tokens of each row of the batch, int64 `[B]` on the CPU; valid: which are, bool `[B, N]`,
    or None where all are; length: `N`; weight_scale: of all keys' log weights, float32 `[B, G]`,
    for votes that read them; histogram: keys per centroid, int64 `[B, G, M, 256]`, for tiers;
    regression: of `pariskv.sign_regression.fit`, or None where signs stand alone.
    """

    geometry: Geometry
    config: ParisKVConfig
    encoding: Encoding
    parts: list[Codes]
    counts: Tensor
    valid: Tensor | None
    length: int
    weight_scale: Tensor | None
    histogram: Tensor
    regression: Tensor | None

    @staticmethod
    def of_blocks(codes: Codes, encoding: Encoding, geometry: Geometry, valid: Tensor) -> Tokens:
        """Of full blocks whose codes, `[B, G, N, ...]`, somebody else keeps: nothing is known yet.

        valid: bool `[B, N]`; those that are not count in nothing that their codes do not tell.
        """
        config, ops, tokens = encoding.config, encoding.ops, codes["signs"].shape[2]
        scale, histogram, matrix = None, torch.empty(0), None
        if config.weighs_votes:
            scale = ops.codes.weight_scale(codes["weights"].flatten(2).amax(2))
        if config.coarse == "tiered_votes":
            histogram = ops.coarse.histogram(codes["signs"], valid)
        if config.sign_decoder == "regression":
            blocks = tokens // encoding.block_tokens
            matrix = encoding.fit(lambda name, end, every: codes[name][:, :, :end:every], blocks)
        counts = valid.sum(1).cpu()
        parts = [codes]
        return Tokens(
            geometry, config, encoding, parts, counts, valid, tokens, scale, histogram, matrix
        )

    @property
    def ops(self) -> Any:
        """Of the backend."""
        return self.encoding.ops

    @property
    def query_max(self) -> int:
        """Largest coordinate of a rounded query."""
        return min(self.config.query_max, 2**15 // self.geometry.head_dim)

    def column(self, name: str, ids: Tensor) -> Tensor:
        """Entries of codes, `[B, G, C, ...]`, for rows int64 `[B, G, C]`; zeros for an id of -1."""
        gather = self.ops.fetch.gather_rows
        first, *rest = (part[name] for part in self.parts)
        if not rest:
            entries: Tensor = gather(first, ids)
            return entries
        (opened,), full = rest, first.shape[2]
        known: Tensor = gather(first, ids.masked_fill(ids >= full, UNUSED))
        later: Tensor = gather(opened, (ids - full).clamp_min(UNUSED))
        return known + later  # of one of them zeros


@dataclass(frozen=True)
class Queries:
    """Queries of a search, each `[B, G, g, D]` but the offsets.

    voting_directions, voting: those that vote, which signs may have told (`sign_regression`), as
    directions and whole; rotated: whole; offsets: inner products with the centers,
    `[B, G, g, S]`, or None.
    """

    voting_directions: Tensor
    voting: Tensor
    rotated: Tensor
    offsets: Tensor | None

    @staticmethod
    def of(queries: Tensor, tokens: Tokens) -> Queries:
        """Of queries `[B, H, D]`."""
        folded = group.fold(queries, tokens.geometry.kv_heads, tokens.config.group)
        directions, norms = tokens.ops.transform.normalize(folded)
        rotated = tokens.ops.transform.rotate(directions, tokens.encoding.rotation)
        offsets, norms, matrix = _offsets(folded, tokens), norms[..., None], tokens.regression
        voting = rotated if matrix is None else sign_regression.voting(rotated, matrix)
        return Queries(voting, voting * norms, rotated * norms, offsets)


def _offsets(folded: Tensor, tokens: Tokens) -> Tensor | None:
    if not tokens.config.center:
        return None
    centers = torch.cat([part["centers"] for part in tokens.parts], dim=2)
    return folded @ centers.float().mT

"""Inputs of one search: the codes of all tokens with statistics, and the rotated queries."""

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
    """Contents of an index at the start of a search.

    Attributes:
        geometry: Sizes of heads and vectors.
        config: Options of the index.
        encoding: Constants of the encoding.
        parts: Codes of the full blocks and of the open block, `[B, G, n, ...]`; empty parts are
            left out.
        counts: Valid tokens of each sequence, int64 `[B]`, on the CPU.
        valid: Bool `[B, N]`, False for padding, or None where no token is padded.
        length: Number of tokens `N`.
        weight_scale: Unit of votes, float32 `[B, G]`, or None where votes ignore weights.
        histogram: Keys per centroid, int64 `[B, G, M, 256]`, for tiered votes.
        regression: Matrix of `sign_regression.fit`, float16 `[B, G, D, D]`, or None for
            sign_decoder="mean".
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
        """Build the inputs from full blocks that another system stores, such as vLLM's pages.

        Args:
            codes: Codes of the tokens, `[B, G, N, ...]`.
            encoding: Constants of the encoding.
            geometry: Sizes of heads and vectors.
            valid: Bool `[B, N]`, False for tokens that a search must not return. The weight scale
                and the sign regression include every token whose code has a weight.
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
        """Operations of the backend."""
        return self.encoding.ops

    @property
    def query_max(self) -> int:
        """Largest coordinate of a rounded query."""
        return min(self.config.query_max, 2**15 // self.geometry.head_dim)

    def column(self, name: str, ids: Tensor) -> Tensor:
        """Return one kind of codes, `[B, G, C, ...]`, for given ids.

        Args:
            name: Name of the codes, such as "signs".
            ids: Int64 `[B, G, C]`; an id of -1 gives zeros.
        """
        gather = self.ops.fetch.gather_rows
        first, *rest = (part[name] for part in self.parts)
        if not rest:
            entries: Tensor = gather(first, ids)
            return entries
        (opened,), full = rest, first.shape[2]
        known: Tensor = gather(first, ids.masked_fill(ids >= full, UNUSED))
        later: Tensor = gather(opened, (ids - full).clamp_min(UNUSED))
        return known + later  # for each id, one of the two is zero


@dataclass(frozen=True)
class Queries:
    """Queries of one search, `[B, G, g, D]` each.

    Attributes:
        voting_directions: Normalized queries that the votes use, after the sign regression.
        voting: `voting_directions` times the norms of the queries.
        rotated: Rotated queries with their norms, which the rerank uses.
        offsets: Inner products with the blocks' centers, float32 `[B, G, g, S]`, or None.
    """

    voting_directions: Tensor
    voting: Tensor
    rotated: Tensor
    offsets: Tensor | None

    @staticmethod
    def of(queries: Tensor, tokens: Tokens) -> Queries:
        """Rotate queries `[B, H, D]`, and compute what else a search derives from them."""
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

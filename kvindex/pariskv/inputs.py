"""Inputs of a search: the codes and statistics of all tokens, and the rotated queries."""

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
    """Codes and statistics of an index, from which one search computes its result.

    Attributes:
        geometry: Sizes of heads and vectors.
        config: Options of the index.
        encoding: Constants of the encoding.
        parts: Codes `[B, G, n, ...]` of the full blocks, then of the last block if it is not full.
            Either is left out if it contains no tokens.
        counts: Number of valid tokens of each sequence, int64 `[B]`, on the CPU.
        valid: Bool `[B, N]`, False for padding, or None if no token is padding.
        length: Number of tokens `N`.
        weight_scale: Power of two above all weights of a KV head, float32 `[B, G]`, or None if
            coarse scores (votes) ignore weights.
        histogram: Number of keys per centroid, int64 `[B, G, M, 256]`; empty unless the option
            `coarse` is "tiered_votes".
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
        """Build the inputs from the codes of full blocks that are stored outside of an index.

        vLLM's pages are an example of such storage.

        Args:
            codes: Codes of the tokens, `[B, G, N, ...]`.
            encoding: Constants of the encoding.
            geometry: Sizes of heads and vectors.
            valid: Bool `[B, N]`, False for tokens that a search must not return. Two statistics
                still include these tokens. The weight scale is a power of two above the weights
                of all tokens. The regression of keys on their sign bits is fitted to all keys
                except those with the weight 0.
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
        """The module of tensor operations: `kvindex.ops` or a compiled version."""
        return self.encoding.ops

    @property
    def query_max(self) -> int:
        """Largest absolute value of a coordinate of the rounded query."""
        return min(self.config.query_max, 2**15 // self.geometry.head_dim)

    def column(self, name: str, ids: Tensor) -> Tensor:
        """Gather one tensor of codes at the tokens `ids`.

        Args:
            name: Name of the codes, such as "signs".
            ids: Token ids, int64 `[B, G, C]`. An id of -1 gives zeros.

        Returns:
            Codes of these tokens, `[B, G, C, ...]`.
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
    """Rotated queries of one search, in the forms that its stages read.

    The coarse stage computes approximate scores (votes) of all keys, and the rerank estimates the
    inner products of the best keys.

    Attributes:
        voting_directions: Normalized queries for the coarse stage, float32 `[B, G, g, D]`. If keys
            are predicted from their sign bits by a linear regression, the queries are multiplied by
            its matrix (`sign_regression`).
        voting: `voting_directions` times the norms of the queries, float32 `[B, G, g, D]`.
        rotated: Rotated queries for the rerank, not normalized, float32 `[B, G, g, D]`.
        offsets: Inner products of the queries and the blocks' centers, float32 `[B, G, g, S]`, or
            None if blocks have no centers.
    """

    voting_directions: Tensor
    voting: Tensor
    rotated: Tensor
    offsets: Tensor | None

    @staticmethod
    def of(queries: Tensor, tokens: Tokens) -> Queries:
        """Normalize and rotate queries `[B, H, D]`, and compute all attributes of this class."""
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

"""Rerank: estimate the queries' inner products with the candidates from all bits of their codes.

Source: ParisKV, section B.2.2, equation (10).
"""

from __future__ import annotations

from torch import Tensor

from kvindex.pariskv.inputs import Queries, Tokens


def estimates(tokens: Tokens, queries: Queries, ids: Tensor) -> Tensor:
    """Estimate the inner products `q·k` of the query heads and the keys `ids`.

    Args:
        tokens: Codes of all tokens.
        queries: Rotated queries.
        ids: Token ids, int64 `[B, G, C]`.

    Returns:
        Float32 `[B, G, g, C]`; `-inf` for an id of -1.
    """
    codes, levels = _codes(tokens, ids), tokens.encoding.levels
    found: Tensor = tokens.ops.rerank.estimate(queries.rotated, *codes, levels)
    if queries.offsets is not None:
        blocks = (ids.clamp_min(0) // tokens.config.center)[:, :, None]
        found = found + queries.offsets.gather(-1, blocks.expand_as(found))
    return found.masked_fill((ids < 0)[:, :, None], float("-inf"))


def errors(tokens: Tokens, queries: Queries, ids: Tensor) -> Tensor:
    """Return the standard deviation of the error of each estimate that `estimates` returns.

    Args:
        tokens: Codes of all tokens.
        queries: Rotated queries.
        ids: Token ids, int64 `[B, G, C]`.

    Returns:
        Float32 `[B, G, g, C]`.
    """
    ops, encoding = tokens.ops, tokens.encoding
    tangent = ops.codes.tangent(encoding.block, tokens.config.magnitude_bits)
    codes = _codes(tokens, ids)
    found: Tensor = ops.rerank.errors(queries.rotated, *codes, encoding.levels, tangent)
    return found


def _codes(tokens: Tokens, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the signs, magnitudes and decoded weights of the tokens `ids`, int64 `[B, G, C]`."""
    names = [name for name in tokens.parts[0] if name != "centers"]
    codes = {name: tokens.column(name, ids) for name in names}
    weights = codes["weights"]
    if tokens.config.weights == "log":
        weights = weights.int()
        if "fractions" in codes:
            weights = weights << 8 | codes["fractions"].int()
        weights = tokens.ops.codes.log_weights(weights, tokens.config.weight_bits)
    return codes["signs"], codes["magnitudes"], weights

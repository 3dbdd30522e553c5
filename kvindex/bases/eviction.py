"""`EvictionIndex`: base of policies that evict tokens from the KV cache before the query is known.

A policy chooses the tokens that it retains. A search computes `q·k` for the retained tokens only.
If `k` is at least the number of retained tokens, the search returns all of them, because the
published policies attend to all retained tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.bases.prompt_queries import PromptQueriesIndex, are_real
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.ops.attention import cap

LOGITS = 2**24
"""Number of logits in memory at a time while attention weights are added up (64 MiB)."""

NEVER = float("-inf")

HIDDEN = torch.finfo(torch.float32).min
"""A logit for tokens that a query does not see. Unlike -inf, it gives numbers also in a row without
visible tokens."""


class EvictionIndex(BaseIndex):
    """Base of policies that evict tokens. Their `Config` has the fields `budget` and `group`.

    Scores are exact: `q·k` of each query head, combined over the query heads of a KV head by
    `group.agree`.
    The store keeps the rows of evicted tokens, so `fetch` works for any id, and tokens can be
    selected again after `truncate`.
    """

    @abstractmethod
    def _retained(self) -> Tensor:
        """Return the ids of the retained tokens, int64 `[B, G, C]`, ascending, -1 for padding."""

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        return self._learned

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    def _scanned(self) -> list[Tensor]:
        return [self._store.gather(self._retained()).keys]

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        ids = self._retained()
        products = group.fold(queries, g.kv_heads, policy) @ self._store.gather(ids).keys.float().mT
        products = products.masked_fill((ids < 0)[:, :, None], NEVER)
        agreed = self.ops.group.agree(products, policy, scale=g.scale, softcap=g.softcap)
        best, slots = self.ops.select.top_k(agreed, k)  # at equal scores, the lower id is first
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), best)

    def _ids_from(self, first: int) -> Tensor:
        """Return the ids `first`, `first + 1`, … of the tokens, int64 `[B, G, n]`, -1 for padded
        tokens.
        """
        ids = torch.arange(first, max(first, len(self)), device=self.geometry.device)
        ids = ids.expand(self._batch or 1, self.geometry.kv_heads, -1)
        return ids if self.valid is None else ids.masked_fill(~self.valid[:, None, first:], UNUSED)


class ObservingEvictionIndex(PromptQueriesIndex, EvictionIndex):
    """Base of eviction policies that choose tokens by the attention of the prompt's queries."""


def joined_flags(
    before: Tensor | None, length: int, keys: Tensor, valid: Tensor | None
) -> Tensor | None:
    """Return which tokens are valid (not padded) after an append, bool `[B, length + T]`.

    The result is None if all tokens are valid.

    Args:
        before: Which tokens were valid before the append, bool `[B, length]`; None if all were.
        length: Number of tokens before the append.
        keys: New keys, `[B, G, T, D]`.
        valid: Which new tokens are valid, bool `[B, T]`; None if all are.
    """
    if before is None and valid is None:
        return None
    device, B = keys.device, len(keys)
    if before is None:
        before = torch.ones((B, length), dtype=torch.bool, device=device)
    if valid is None:
        valid = torch.ones((B, keys.shape[2]), dtype=torch.bool, device=device)
    return torch.cat([before, valid], dim=1)


def are_valid(queries: Tensor, positions: Tensor, valid: Tensor | None) -> Tensor:
    """Return which queries belong to valid (not padded) tokens, bool `[B, R]`.

    Args:
        queries: `[B, H, R, D]`; the query of a padded token is zero.
        positions: Position of each query's token, int64 `[R]`.
        valid: Which tokens are valid, bool `[B, N]`; None if all are. For a position of `N` or
            more, a query that is not zero counts as valid.
    """
    real = are_real(queries)
    if valid is None or not valid.shape[1]:
        return real
    last = valid.shape[1] - 1
    return real & (valid[:, positions.clamp_max(last)] | (positions > last))


def attention_received(
    geometry: Geometry, queries: Tensor, positions: Tensor, known: Tensor, keys: Tensor, ids: Tensor
) -> Tensor:
    """Return the sum of the attention weights that each token gets from all queries and heads.

    The attention is causal: the softmax of a query covers the given tokens up to its position.

    Args:
        geometry: Sizes of heads and vectors.
        queries: `[B, H, R, D]`.
        positions: Position of each query's token, int64 `[R]`.
        known: Which queries to include in the sum, bool `[B, R]`.
        keys: Keys of the tokens, `[B, G, C, D]`.
        ids: Ids of the tokens, int64 `[B, G, C]`, -1 for padding.

    Returns:
        Float32 `[B, G, C]`.
    """
    B, H, R, D = queries.shape
    heads = queries.reshape(B, geometry.kv_heads, -1, R, D)
    rows, present = keys.float().mT[:, :, None], (ids >= 0)[:, :, None, None]
    total = torch.zeros(ids.shape, device=ids.device)
    size = max(LOGITS // max(B * H * ids.shape[2], 1), 1)
    for start in range(0, R, size):
        block = slice(start, start + size)
        visible = present & (ids[:, :, None, None] <= positions[block, None])  # [B, G, 1, r, C]
        logits = cap(heads[..., block, :].float() @ rows, geometry.scale, geometry.softcap)
        weights = logits.masked_fill_(~visible, HIDDEN).softmax(-1)
        counted = (visible.any(-1) & known[:, None, None, block]).float()  # [B, G, 1, r]
        total += (counted[..., None, :] @ weights)[..., 0, :].sum(2)
    return total

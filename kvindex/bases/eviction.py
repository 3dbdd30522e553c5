"""`EvictionIndex`: base of policies that evict rows before the query is known.

A policy selects the rows that it retains. A search ranks the retained rows exactly and ignores all
others. If `k` is at least the number of retained rows, a search returns all of them, as the
published policies attend to all of them.
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


class EvictionIndex(BaseIndex):
    """Base of eviction policies; `Config` has the fields `budget` and `group`.

    The scores of hits are computed from the true `q·k` of the query heads, which `group.agree`
    combines. Evicted rows stay in the store, so `fetch` works for any id, and `truncate` does not
    need to select rows again.
    """

    @abstractmethod
    def _retained(self) -> Tensor:
        """Return the ids of the retained rows, int64 `[B, G, C]`, ascending; -1 is no row."""

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
        best, slots = self.ops.select.top_k(agreed, k)  # ids ascend, so ties go to the lower id
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), best)

    def _ids_from(self, first: int) -> Tensor:
        """Return the ids of the tokens from `first` on, int64 `[B, G, n]`, -1 for padding."""
        ids = torch.arange(first, max(first, len(self)), device=self.geometry.device)
        ids = ids.expand(self._batch or 1, self.geometry.kv_heads, -1)
        return ids if self.valid is None else ids.masked_fill(~self.valid[:, None, first:], UNUSED)


class ObservingEvictionIndex(PromptQueriesIndex, EvictionIndex):
    """Base of the policies that select rows by the queries of the prompt."""


def joined_flags(
    before: Tensor | None, length: int, keys: Tensor, valid: Tensor | None
) -> Tensor | None:
    """Return the flags of valid tokens after an append, bool `[B, length + T]`, or None.

    Args:
        before: Flags of the tokens before, bool `[B, length]`; None where all are valid.
        length: Number of tokens before.
        keys: New keys, `[B, G, T, D]`.
        valid: Flags of the new tokens, bool `[B, T]`; None where all are valid.
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
    """Find the queries of valid tokens.

    Args:
        queries: `[B, H, R, D]`; queries of padded tokens are zero.
        positions: Int64 `[R]`, the positions of the queries.
        valid: Bool `[B, N]`, or None if all tokens are valid. A position of at least `N` counts as
            valid unless its query is zero.

    Returns:
        Bool `[B, R]`.
    """
    real = are_real(queries)
    if valid is None or not valid.shape[1]:
        return real
    last = valid.shape[1] - 1
    return real & (valid[:, positions.clamp_max(last)] | (positions > last))


def attention_received(
    geometry: Geometry, queries: Tensor, positions: Tensor, known: Tensor, keys: Tensor, ids: Tensor
) -> Tensor:
    """Sum the attention weight that each row receives over queries and heads.

    Each query's softmax is over the rows whose ids are not greater than its position.

    Args:
        geometry: Sizes of heads and vectors.
        queries: `[B, H, R, D]`.
        positions: Int64 `[R]`, the positions of the queries.
        known: Bool `[B, R]`, False for a query that is left out of the sum.
        keys: `[B, G, C, D]`.
        ids: Int64 `[B, G, C]`, -1 for none.

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
        visible = visible & known[:, None, None, block, None]
        logits = cap(heads[..., block, :].float() @ rows, geometry.scale, geometry.softcap)
        weights = logits.masked_fill(~visible, NEVER).softmax(-1)
        total += weights.masked_fill(~visible, 0).sum((2, 3))
    return total

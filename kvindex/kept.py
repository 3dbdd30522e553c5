"""What policies share: indexes that keep some rows, chosen before the query is known.

A policy says which rows it keeps; a search ranks those exactly and looks at no other. With `k` of
at least as many rows it returns all that are kept, which is what the published policies attend to.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvindex import group
from kvindex.base import BaseIndex
from kvindex.protocol import UNUSED, Codes, Hits

NEVER = float("-inf")


class KeptIndex(BaseIndex):
    """Base of the policies; `Config` has the fields `budget` and `group`.

    Hits' scores: what `group.agree` returns for the true `q·k` of the rows that are kept. All
    rows stay in the store, so that `fetch` serves them and `truncate` needs no second look.
    """

    @abstractmethod
    def _kept(self) -> Tensor:
        """Ids of the rows that are kept, int64 `[B, G, C]`, ascending, `-1` anywhere for none."""

    def _encode(self, keys: Tensor, learnt: Codes) -> Codes:
        return {}

    def _scanned(self) -> list[Tensor]:
        return [self._store.gather(self._kept()).keys]

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy = self.geometry, self.config.group
        ids = self._kept()
        products = group.fold(queries, g.kv_heads, policy) @ self._store.gather(ids).keys.float().mT
        products = products.masked_fill((ids < 0)[:, :, None], NEVER)
        agreed = group.agree(products, policy, scale=g.scale, softcap=g.softcap)
        best, slots = self.ops.select.top_k(agreed, k)  # ids ascend: ties stay in order
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), best)

    def _from(self, first: int) -> Tensor:
        """Ids of the tokens from `first` on, int64 `[B, G, n]`, `-1` where one is invalid."""
        ids = torch.arange(first, max(first, len(self)), device=self.geometry.device)
        ids = ids.expand(self._batch or 1, self.geometry.kv_heads, -1)
        return ids if self.valid is None else ids.masked_fill(~self.valid[:, None, first:], UNUSED)

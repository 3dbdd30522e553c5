"""`QueryLists`: stores earlier queries, and for each of them a list of the keys with the best
scores.

The stored queries serve as centroids: a search looks up the lists of the centroids that are nearest
to the new query. Let `C` be the number of centroids, `L` the number of keys in a list, and `g` the
number of query heads per KV head. The tensors are:

- `centroids`, `[B, G, g, C, D]`: the queries.
- `normalisers`, float32 `[B, G, g, C]`: for each query head, the log-sum-exp of the logits when the
  list was built. It does not change later, so that scores of later keys can be compared with scores
  of earlier keys.
- `lists`, int32 `[B, G, C, L]`: token ids, best first, -1 for an unused entry.
- `list_scores`, float32 `[B, G, C, L]`: scores of these tokens.
- `known`, bool `[B, C]`: False for a centroid that the sequence does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops.attention import cap

AXES = {"centroids": 3, "normalisers": 3, "lists": 2, "list_scores": 2, "known": 1}
"""Name of a tensor -> its axis of centroids."""

SCORES = 2**22
"""Number of scores computed at a time while keys are inserted on a CPU (16 MiB)."""

DEVICE_SCORES = 2**26
"""Number of scores computed at a time on other devices: 256 MiB, enough to occupy a GPU."""

NEVER = float("-inf")

Blocks: TypeAlias = Callable[[], Iterable[tuple[int, Tensor, Tensor | None]]]
"""A function that yields blocks of tokens in order: the first token's id, keys `[B, G, n, D]`, and
flags of valid tokens, bool `[B, n]` or None."""


@dataclass(frozen=True)
class QueryLists:
    """Builds inverted lists: for each of a set of queries, the ids of the tokens with the best
    scores.

    The score of a key is its largest attention weight for any query head.

    Attributes:
        geometry: Sizes of heads and vectors.
        ops: Operations of the backend.
        rows: Number of token ids in a list.
    """

    geometry: Geometry
    ops: Any
    rows: int

    def build(self, queries: Tensor, blocks: Blocks) -> Codes:
        """For each of the queries `[B, H, C, D]`, build a list of the keys with the best scores.

        blocks: a function that yields all keys in blocks.
        """
        g, (B, _, C, _), device = self.geometry, queries.shape, queries.device
        centroids = by_group(queries, g.kv_heads)
        totals = torch.full(centroids.shape[:-1], NEVER, device=device)
        for _, keys, valid in blocks() if g.group_size > 1 else ():
            for block in self._chunks(totals, keys):
                logits = self._logits(centroids[..., block, :], keys)
                if valid is not None:
                    logits = logits.masked_fill(~valid[:, None, None, None], NEVER)
                totals[..., block] = torch.logaddexp(totals[..., block], logits.logsumexp(-1))
        shape = (B, g.kv_heads, C, self.rows)
        empty = {
            "centroids": centroids,
            "normalisers": totals.masked_fill(totals == NEVER, 0),
            "lists": torch.full(shape, UNUSED, dtype=torch.int32, device=device),
            "list_scores": torch.full(shape, NEVER, device=device),
            "known": torch.ones((B, C), dtype=torch.bool, device=device),
        }
        return self.insert(empty, blocks)

    def from_search(self, queries: Tensor, ids: Tensor, products: Tensor) -> Codes:
        """Build the list of best keys for one new centroid, from keys that a search has scored.

        Args:
            queries: The new centroid, `[B, H, D]`.
            ids: Ids of the scored keys, int64 `[B, G, n]`, ascending, -1 for padding.
            products: `q·k` of these keys, `[B, G, g, n]`, for `g` query heads per KV head.
        """
        g = self.geometry
        logits = products if g.group_size == 1 else cap(products, g.scale, g.softcap)
        logits = logits.masked_fill((ids < 0)[:, :, None], NEVER)[:, :, :, None]  # C = 1
        totals = logits.logsumexp(-1)
        totals = totals.masked_fill(totals == NEVER, 0)
        scores, slots = self.ops.select.top_k(self._list_scores(logits, totals), self.rows)
        lists = ids[:, :, None].gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED)
        return {
            "centroids": by_group(queries[:, :, None], g.kv_heads),
            "normalisers": totals,
            "lists": lists.int(),
            "list_scores": scores,
            "known": torch.ones((len(queries), 1), dtype=torch.bool, device=queries.device),
        }

    def insert(self, learned: Codes, blocks: Blocks) -> Codes:
        """Return a copy of the lists with further keys inserted.

        The ids of the new keys must be larger than all ids in the lists. Then, of two keys with
        equal scores, the key with the lower id comes first.
        """
        lists, scores = learned["lists"].clone(), learned["list_scores"].clone()
        for start, keys, valid in blocks():
            ids = torch.arange(start, start + keys.shape[2], device=keys.device, dtype=torch.int32)
            for block in self._chunks(learned["normalisers"], keys):
                new = self._logits(learned["centroids"][..., block, :], keys)
                new = self._list_scores(new, learned["normalisers"][..., block])
                if valid is not None:
                    new = new.masked_fill(~valid[:, None, None], NEVER)
                both = torch.cat([scores[:, :, block], new], dim=-1)
                scores[:, :, block], slots = self.ops.select.top_k(both, self.rows)
                ids_both = torch.cat([lists[:, :, block], ids.expand(new.shape)], dim=-1)
                ids_both = ids_both.gather(-1, slots.clamp_min(0))
                lists[:, :, block] = ids_both.masked_fill(slots < 0, UNUSED)
        return {**learned, "lists": lists, "list_scores": scores}

    def _logits(self, centroids: Tensor, keys: Tensor) -> Tensor:
        """Return the attention logits of `T` keys for `c` centroids, float32 `[B, G, g, c, T]`.

        With a single query head per KV head (g = 1), return `q·k` without scale and softcap.
        """
        products = centroids.float() @ keys.float().mT[:, :, None]
        g = self.geometry
        return products if g.group_size == 1 else cap(products, g.scale, g.softcap)

    def _list_scores(self, logits: Tensor, totals: Tensor) -> Tensor:
        """Return the scores by which the keys in a centroid's list are sorted.

        The scores of `T` keys for `c` centroids are `[B, G, c, T]`. A score is the logarithm of the
        largest attention weight that any query head gives to the key. With a single query head per
        KV head, it is `q·k`, which gives the same order.
        """
        if logits.shape[2] == 1:
            return logits[:, :, 0]
        return (logits - totals[..., None]).amax(2)

    def _chunks(self, totals: Tensor, keys: Tensor) -> Iterator[slice]:
        """Divide the centroids into slices, so that the scores of all keys for the centroids of one
        slice fit into memory."""
        scores_per = totals[..., 0].numel() * (keys.shape[2] + self.rows)
        size = SCORES if totals.device.type == "cpu" else DEVICE_SCORES
        step = max(size // max(scores_per, 1), 1)
        return (slice(start, start + step) for start in range(0, totals.shape[-1], step))


def by_group(queries: Tensor, kv_heads: int) -> Tensor:
    """Group queries `[B, H, C, D]` by KV head, and return a copy, `[B, G, H / G, C, D]`.

    This is the shape in which centroids are stored.
    """
    B, H, C, D = queries.shape
    return queries.reshape(B, kv_heads, H // kv_heads, C, D).clone()


def replace_oldest(learned: Codes, new: Codes, oldest: int) -> Codes:
    """Replace the oldest centroids by the centroids of `new`.

    The centroids form a ring buffer, and `oldest` is the slot of the oldest centroid.
    """
    slots = torch.arange(new["known"].shape[1], device=new["known"].device)
    slots = (slots + oldest) % learned["known"].shape[1]
    return {name: learned[name].index_copy(axis, slots, new[name]) for name, axis in AXES.items()}


def recall(learned: Codes, queries: Tensor, tokens: int, probes: int, ops: Any) -> Tensor:
    """Return the token ids in the lists of the `probes` centroids that are nearest to the queries.

    How near a centroid is to the queries is measured by its largest cosine with the query of any
    query head of the KV head.

    Args:
        learned: Tensors of the lists.
        queries: Float32 `[B, G, g, D]`, for `g` query heads per KV head.
        tokens: A number greater than all ids.
        probes: Number of centroids whose lists are read.
        ops: Operations of the backend.

    Returns:
        Int64 `[B, G, probes · L]` for lists of length `L`, ascending, without duplicates, padded
        with -1.
    """
    lists = learned["lists"]
    centroids = normalize(learned["centroids"].float(), dim=-1)
    cosines = (centroids @ normalize(queries, dim=-1)[..., None])[..., 0].amax(2)  # [B, G, C]
    cosines = cosines.masked_fill(~learned["known"][:, None], NEVER)
    slots = ops.select.top_k(cosines, min(probes, cosines.shape[-1]))[1]
    rows = slots.clamp_min(0)[..., None].expand(-1, -1, -1, lists.shape[-1])
    ids = lists.gather(2, rows).masked_fill((slots < 0)[..., None], UNUSED).flatten(2).long()
    ids = ids.masked_fill(ids < 0, tokens).sort(dim=-1).values
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[..., 1:] = ids[..., 1:] == ids[..., :-1]
    ids = ids.masked_fill(again, tokens).sort(dim=-1).values
    return ids.masked_fill(ids == tokens, UNUSED)

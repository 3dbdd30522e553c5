"""`ClusteredIndex`: base of indexes that group keys into clusters and select whole clusters.

The tokens of a sequence's first append are its prompt. The prompt is split into segments, and the
keys of each segment are clustered with k-means. Tokens after the prompt are collected in blocks,
and a block is clustered when it is full. Until then a search ranks each token of the block
separately, so it finds every token right after the append.

Padding does not change clusters, because only valid tokens are counted. Clusters depend on the
tokens and on the length of the first append, but not on how later tokens are distributed over
appends. If `truncate` removes the end of a segment of the prompt, the remaining tokens of the
segment are clustered again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvindex.bases.index import FIRST_APPEND, BaseIndex
from kvindex.core.protocol import UNUSED, Codes, Rows
from kvindex.ops import group, kmeans
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, distinct
from kvindex.storage.state import below

PER_CLUSTER = {"members", "sizes", "centroids", "means"}
"""Names of learned tensors whose third axis counts clusters or clustered tokens."""

Read: TypeAlias = Callable[[Tensor], Rows]
"""A function that reads rows by their ids int64 `[B, G, n]`, where -1 stands for no row."""


class Cut(NamedTuple):
    """A range of tokens that are clustered together, and the number of clusters of this range.

    Tokens are counted within a sequence, without padding.

    Attributes:
        start: Number of the first token of the range.
        stop: Number after the last token of the range.
        clusters: Number of clusters into which the tokens are grouped.
    """

    start: int
    stop: int
    clusters: int


@dataclass(frozen=True)
class Plan:
    """How many tokens are clustered together, and into how many clusters.

    The prompt is clustered in segments, and the tokens after the prompt are clustered in blocks. If
    the prompt has fewer than `block` tokens, it is not clustered separately: its tokens belong to
    the first block, which is clustered when it is full.

    Attributes:
        segment: Number of tokens in a segment of the prompt; None for the whole prompt.
        per_cluster: Mean number of tokens in a cluster of the prompt.
        block: Number of tokens in a block.
        per_block: Number of clusters in a block; 0 if tokens after the prompt are never clustered.
    """

    segment: int | None
    per_cluster: int
    block: int
    per_block: int

    def cuts(self, prompt: int, count: int) -> list[Cut]:
        """Divide the tokens of a sequence into ranges, each of which is clustered separately.

        The sequence has `count` valid tokens, of which the first `prompt` tokens are the prompt.
        """
        segment, cuts = self.segment or max(prompt, 1), []
        for start in range(0, prompt, segment):
            stop = min(start + segment, prompt)
            cuts.append(Cut(start, stop, max(round((stop - start) / self.per_cluster), 1)))
        last = count - self.block if self.per_block else prompt - 1
        for start in range(prompt, last + 1, self.block):
            cuts.append(Cut(start, start + self.block, self.per_block))
        return cuts


class _Row(NamedTuple):
    """The tokens of one sequence, while an append or a truncation updates its clusters.

    Attributes:
        prompt: Number of tokens in the prompt.
        unchanged: Ranges of tokens at the beginning of the sequence. The update does not change the
            clusters of these tokens.
        tail: Ids of all later tokens, int64 `[n]`.
    """

    prompt: int
    unchanged: list[Cut]
    tail: Tensor

    @property
    def clustered(self) -> int:
        """Number of tokens whose clusters do not change in the current append or truncation."""
        return self.unchanged[-1].stop if self.unchanged else 0

    @property
    def clusters(self) -> int:
        """Number of clusters that do not change in the current append or truncation."""
        return sum(cut.clusters for cut in self.unchanged)

    def todo(self, plan: Plan) -> list[Cut]:
        """Return the ranges of tokens that must be clustered now. Positions are those in `tail`."""
        first = self.clustered
        cuts = plan.cuts(self.prompt, first + len(self.tail))[len(self.unchanged) :]
        return [Cut(start - first, stop - first, clusters) for start, stop, clusters in cuts]


@dataclass(frozen=True)
class Units:
    """What a search ranks: `S` clusters, followed by `R` tokens that are not clustered yet.

    Each cluster and each of these tokens is a unit, so there are `U = S + R` units.

    Attributes:
        keys: Centroids of the clusters and keys of the other tokens, float32 `[B, G, U, D]`.
        sizes: Number of tokens in each unit, int32 `[B, G, U]`, 0 for an unused entry.
        starts: Position in `members` of the first token of each cluster, int64 `[B, G, S]`.
        members: Ids of the clustered tokens, sorted by cluster, int32 `[B, G, P]`.
        singles: Ids of the tokens that are not clustered, int64 `[B, R]`, -1 for padding.
    """

    keys: Tensor
    sizes: Tensor
    starts: Tensor
    members: Tensor
    singles: Tensor


class ClusteredIndex(BaseIndex):
    """Base of indexes that select clusters of tokens.

    A subclass overrides `_plan`, `_labels` and `_search`.

    The dict `_learned` contains these tensors, where `S` is the number of clusters:

    - `prompt`, int64 `[B]`: number of valid tokens of the prompt
    - `seen`, int64 `[B]`: number of tokens processed so far, padding included
    - `waiting`, int64 `[B, R]`: ids of tokens that are not clustered yet
    - `members`, int32 `[B, G, P]`: ids of clustered tokens, sorted by cluster
    - `sizes`, int32 `[B, G, S]`: number of tokens in each cluster
    - `centroids`, `[B, G, S, D]` in the layer's dtype: mean key of each cluster
    - `means`, `[B, G, S, Dv]` in the layer's dtype: mean value of each cluster, only if
      `means_of_values` is True
    """

    means_of_values = False
    learns_from = FIRST_APPEND
    _arriving: Tensor | None = None  # values of the current append, if means_of_values is True

    @abstractmethod
    def _plan(self) -> Plan:
        """Return the sizes of the token ranges that are clustered together."""

    def _labels(self, keys: Tensor, clusters: int) -> Tensor:
        """Assign each of the keys, float32 `[R, n, D]`, to a cluster.

        The default is spherical k-means, which compares keys by their cosines.

        Returns:
            The number of each key's cluster, int64 `[R, n]`.
        """
        directions = kmeans.directions(keys)
        options = dict(iterations=self.config.iterations, seed=self.config.seed)
        centroids = kmeans.kmeans(directions, clusters, spherical=True, **options)
        return kmeans.assign(directions, centroids)[0]

    # Search

    def _units(self) -> Units:
        learned = self._learned
        singles, sizes = learned["waiting"], learned["sizes"]
        ones = (singles >= 0).int()[:, None].expand(-1, sizes.shape[1], -1)
        keys = torch.cat([learned["centroids"], self._waiting_keys()], dim=2).float()
        starts = sizes.long().cumsum(-1) - sizes
        return Units(keys, torch.cat([sizes, ones], -1), starts, learned["members"], singles)

    def _estimates(self, queries: Tensor, units: Units) -> Tensor:
        """Return the inner products of the queries with the units, float32 `[B, G, g, U]`.

        A unit is a cluster, represented by its centroid, or a single key that is not in a cluster
        yet. Unused entries of `units` get `-inf`. `g` is the number of query heads per KV head.
        """
        folded = group.fold(queries, self.geometry.kv_heads, self.config.group)
        empty = (units.sizes == 0)[:, :, None]
        return (folded @ units.keys.mT).masked_fill(empty, float("-inf"))

    def _scores(self, estimates: Tensor, units: Units) -> Tensor:
        """Combine the scores of the query heads that share a KV head.

        Return one score for each KV head and each unit (a cluster, or a key that is not in a
        cluster yet), `[B, G, U]`. Unused entries get `-inf`.
        """
        g, policy = self.geometry, self.config.group
        scores: Tensor = self.ops.group.agree(
            estimates, policy, scale=g.scale, softcap=g.softcap, sizes=units.sizes
        )
        return scores

    def _waiting_keys(self) -> Tensor:
        """Return the keys of the tokens that are not clustered yet, `[B, G, R, D]`, zero for
        padding.
        """
        ids = self._learned["waiting"][:, None].expand(-1, self.geometry.kv_heads, -1)
        return self._store.gather(ids).keys

    def _scanned(self) -> list[Tensor]:
        return [self._learned["centroids"], self._learned["sizes"], self._waiting_keys()]

    # Learning

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    def start_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """Start an append (see `BaseIndex.start_append`).

        If `means_of_values` is True, building clusters also needs the values, which are in the
        attribute `_arriving` during the call.
        """
        self._arriving = values if self.means_of_values else None
        try:
            return super().start_append(keys, values, valid=valid)
        finally:
            self._arriving = None

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned, first = self._learned or self._empty(keys), len(self)
        fixed = zip(*(learned[name].tolist() for name in ("prompt", "seen")), strict=True)
        rows, stop = [], first + keys.shape[2]
        for b, (prompt, seen) in enumerate(fixed):
            waiting = learned["waiting"][b]
            waiting = waiting[waiting >= 0]
            tail = torch.arange(max(seen, first), stop, device=keys.device)
            if valid is not None:
                tail = tail[valid[b, tail - first]]
            count = int(learned["sizes"][b, 0].sum())
            if not count and not len(waiting) and len(tail) >= self._plan().block:
                prompt = len(tail)
            unchanged = self._plan().cuts(prompt, count) if count else []
            rows.append(_Row(prompt, unchanged, torch.cat([waiting, tail])))
        return self._extended(learned, rows, stop, self._reader(keys, first))

    def _learned_before(self, length: int) -> Codes:
        if not self._learned:
            return self._learned
        rows, plan, device = [], self._plan(), self.geometry.device
        for b, prompt in enumerate(self._learned["prompt"].tolist()):
            ids = torch.arange(length, device=device)
            if self.valid is not None:
                ids = ids[self.valid[b, :length]]
            old = plan.cuts(prompt, int(self._learned["sizes"][b, 0].sum()))
            if len(ids) < prompt:
                prompt = len(ids) if len(ids) >= plan.block else 0
            unchanged = []
            for before, after in zip(old, plan.cuts(prompt, len(ids)), strict=False):
                if before != after:
                    break
                unchanged.append(before)
            rows.append(_Row(prompt, unchanged, ids[unchanged[-1].stop if unchanged else 0 :]))
        return self._extended(self._learned, rows, length, self._store.gather)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout, n = super()._layout(sizes), sizes.length
        if not n and not sizes.has("learned"):
            return layout
        g, ids = self.geometry, dict[str, Any](least=UNUSED, most=n - 1)
        learned = {
            "prompt": TensorSpec(
                "B",
                torch.int64,
                least=0,
                most=n,
                allowed="a length of the first append that gives this number of clusters",
                rule=lambda state: self._follows(below("learned", state)),
            ),
            "seen": TensorSpec("B", torch.int64, least=0, most=n),
            "waiting": TensorSpec(f"B W<={n}", torch.int64, **ids),
            "members": TensorSpec(f"B G P<={n}", torch.int32, **ids),
            "sizes": TensorSpec(
                f"B G S<={n}",
                torch.int32,
                least=0,
                most=n,
                allowed="sizes for which learned.members and learned.waiting contain each valid "
                "token once",
                rule=lambda state: _once_each(below("learned", state), sizes.counts),
            ),
            "centroids": TensorSpec("B G S D", g.dtype),
        }
        if self.means_of_values:
            learned["means"] = TensorSpec("B G S Dv", g.dtype)
        return layout | {f"learned.{name}": spec for name, spec in learned.items()}

    def _follows(self, learned: Codes) -> bool:
        """Return True if a loaded state has as many clusters as `_plan` requires for it."""
        clusters, counts = learned["sizes"].shape[2], learned["sizes"].sum(-1)[:, 0].tolist()
        for prompt, count in zip(learned["prompt"].tolist(), counts, strict=True):
            cuts = self._plan().cuts(prompt, count) if count else []
            if sum(cut.clusters for cut in cuts) > clusters or (cuts and cuts[-1].stop != count):
                return False
        return True

    def _empty(self, keys: Tensor) -> dict[str, Tensor]:
        """Return the learned tensors (`_learned`) of an index without tokens."""
        B, G, _, D = keys.shape
        none = {
            "prompt": keys.new_empty((B,), dtype=torch.int64).zero_(),
            "seen": keys.new_empty((B,), dtype=torch.int64).zero_(),
            "waiting": keys.new_empty((B, 0), dtype=torch.int64),
            "members": keys.new_empty((B, G, 0), dtype=torch.int32),
            "sizes": keys.new_empty((B, G, 0), dtype=torch.int32),
            "centroids": keys.new_empty((B, G, 0, D)),
        }
        if self.means_of_values:
            none["means"] = keys.new_empty((B, G, 0, self.geometry.value_dim))
        return none

    def _reader(self, keys: Tensor, first: int) -> Read:
        """Return a function that reads rows (keys and values) by token id.

        The function reads rows in the store and also the rows of the current append, whose tokens
        have the ids `first`, `first + 1`, ….
        """
        values, gather = self._arriving, self.ops.fetch.gather_rows
        if values is None:  # mean values are not needed, or `encode` was called without values
            width = self.geometry.value_dim if self.means_of_values else 0
            values = keys.new_empty((*keys.shape[:3], width)).zero_()
        values = values.detach()

        def read(ids: Tensor) -> Rows:
            new = torch.where(ids >= first, ids - first, UNUSED)
            rows = Rows(gather(keys, new), gather(values, new))
            if not first:
                return rows
            stored = self._store.gather(torch.where(ids < first, ids, UNUSED))
            is_new = (new >= 0)[..., None]
            return Rows(
                torch.where(is_new, rows.keys, stored.keys),
                torch.where(is_new, rows.values, stored.values[..., : values.shape[-1]]),
            )

        return read

    def _extended(self, learned: Codes, rows: list[_Row], seen: int, read: Read) -> Codes:
        """Cluster the tokens of each sequence that have no clusters yet.

        If the same ranges of tokens must be clustered in several sequences, these sequences are
        clustered in one batch. Return the new value of `_learned`.
        """
        added: list[list[Codes]] = [[] for _ in rows]
        alike = defaultdict(list)  # ranges to cluster -> sequences that have these ranges
        for b, row in enumerate(rows):
            alike[tuple(row.todo(self._plan()))].append(b)
        for todo, batch in alike.items():
            for start, stop, clusters in todo:
                ids = torch.stack([rows[b].tail[start:stop] for b in batch])
                part = self._clustered(ids, batch, len(rows), clusters, read)
                for place, b in enumerate(batch):
                    added[b].append({name: tensor[place] for name, tensor in part.items()})
        new = dict(learned)
        for name in PER_CLUSTER & learned.keys():
            unchanged = [row.clustered if name == "members" else row.clusters for row in rows]
            if any(added) or learned[name].shape[2] != max(unchanged):
                new[name] = _joined(learned[name], unchanged, [[x[name] for x in f] for f in added])
        taken = [sum(part["members"].shape[1] for part in parts) for parts in added]
        waits = [row.tail[count:] for row, count in zip(rows, taken, strict=True)]
        new["waiting"] = pad_sequence(waits, batch_first=True, padding_value=UNUSED)
        new["prompt"] = learned["prompt"].new_tensor([row.prompt for row in rows])
        new["seen"] = torch.full_like(learned["seen"], seen)
        return new

    def _clustered(
        self, ids: Tensor, batch: list[int], rows: int, clusters: int, read: Read
    ) -> Codes:
        """Cluster the tokens `ids`, int64 `[b, n]`, of the sequences `batch`.

        Return the learned tensors of the new clusters, `[b, G, ...]`.
        """
        g, (count, n) = self.geometry, ids.shape
        all_ids = torch.full((rows, g.kv_heads, n), UNUSED, device=ids.device)
        all_ids[batch] = ids[:, None]
        rows_read = read(all_ids)
        keys = rows_read.keys[batch].float().flatten(0, 1)  # [b G, n, D]
        labels = self._labels(keys, clusters)
        centroids, sizes = kmeans.means(keys, labels, clusters)
        order = labels.sort(dim=1, stable=True).indices  # ids ascend within a cluster
        members = ids.repeat_interleave(g.kv_heads, dim=0).gather(1, order)
        units = {"members": members.int(), "sizes": sizes.int(), "centroids": centroids.to(g.dtype)}
        if self.means_of_values:
            values = rows_read.values[batch].float().flatten(0, 1)
            units["means"] = kmeans.means(values, labels, clusters)[0].to(g.dtype)
        shape = (count, g.kv_heads)
        return {name: tensor.view(*shape, *tensor.shape[1:]) for name, tensor in units.items()}


def _once_each(learned: Codes, counts: Tensor | None) -> Tensor | bool:
    """Return True if clusters and unclustered tokens together contain each valid token exactly
    once.

    counts: number of valid tokens of each sequence, int64 `[B]`.
    """
    sizes, members, waiting = learned["sizes"].sum(-1), learned["members"], learned["waiting"]
    width = members.shape[2]
    used = torch.arange(width, device=members.device) < sizes[..., None]
    ids = torch.where(used, members.long(), UNUSED)
    ids = torch.cat([ids, waiting[:, None].expand(-1, ids.shape[1], -1)], dim=2)
    found = (ids >= 0).sum(-1).cpu()
    if counts is None:
        counts = torch.zeros(len(ids), dtype=torch.int64)
    return bool(distinct(ids)) and bool((found == counts[:, None]).all())


def _joined(old: Tensor, unchanged: list[int], parts: list[list[Tensor]]) -> Tensor:
    """Append new tensors to the first `unchanged[b]` entries of `old[b]`, for each sequence `b`.

    `old` has the shape `[B, G, X, ...]`, and each new tensor `[G, x, ...]`. The result is padded
    with zeros to the longest sequence.
    """
    rows = [
        torch.cat([row[:, :count], *new], dim=1).transpose(0, 1)
        for row, count, new in zip(old, unchanged, parts, strict=True)
    ]
    return pad_sequence(rows, batch_first=True).transpose(1, 2).contiguous()

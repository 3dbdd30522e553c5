"""LouisKV: selects whole clusters of the prompt's tokens, and whole segments of generated tokens.

A segment is a run of consecutive tokens. The wrapper `kvindex.wrappers.Reuse` decides when to
search, and marks where segments end.

LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences (ICLR 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group, kmeans
from kvindex.ops.select import compact
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, distinct
from kvindex.storage.state import below

BLOCK = 16_384
"""Tokens scored at a time before `end_prompt`; bounds what is copied at once from the host."""


@dataclass(frozen=True)
class LouisKVConfig:
    """Options of LouisKV.

    Args:
        per_cluster: Average number of keys in a cluster of the prompt.
        iterations: Number of k-means iterations.
        longest: Maximum number of tokens per segment. Longer segments are divided.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the starting points of k-means.
    """

    per_cluster: int = 16
    iterations: int = 10
    longest: int = 32
    group: str = "mean_share"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("per_cluster", "longest"):
            check.at_least(name, getattr(self, name), 1)
        for name in ("iterations", "seed"):
            check.at_least(name, getattr(self, name), 0)
        check.one_of("group", self.group, group.POLICIES)


@dataclass(frozen=True)
class _Sequence:
    """Stores where the prompt ends and where the caller has marked the start of a segment.

    The positions come from the calls `end_prompt` and `mark_boundary`.

    Args:
        prompt: Number of tokens of the prompt, None before `end_prompt`.
        cuts: Positions at which a segment begins, as marked by the caller, ascending.
        newest: Position of the newest query, int64 `[1]`, or None before the first query.
    """

    prompt: int | None = None
    cuts: tuple[int, ...] = ()
    newest: Tensor | None = None

    def starts(self, stop: int, longest: int) -> list[int]:
        """Return the position of the first token of each segment, for the tokens before `stop`.

        A larger `stop` adds segments or extends the last one.
        """
        prompt = self.prompt or 0
        if stop <= prompt:
            return []
        edges = [prompt, *(cut for cut in self.cuts if prompt < cut < stop), stop]
        return [start for edge in pairwise(edges) for start in range(*edge, longest)]


class LouisKV(BaseIndex):
    """Selects whole clusters of the prompt's tokens, and whole segments of later tokens.

    The score of a cluster or segment is the inner product of the query and the mean of its keys.
    All query heads that share a KV head use the same ranking. Before `end_prompt`, all keys are
    ranked one by one. In `Hits.scores`, each row has the score of its cluster or segment.

    Source: LouisKV (ICLR 2026).
    """

    Config = LouisKVConfig
    presets: ClassVar = {}

    statistics = ("_sequence",)

    _sequence: _Sequence

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    # Signals

    def end_prompt(self) -> None:
        """End the prompt and cluster its keys. Further calls have no effect until `reset`."""
        if self._sequence.prompt is None:
            if len(self):
                self._learned = self._clustered(len(self))
            self._sequence = replace(self._sequence, prompt=len(self))

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store the position of the newest query.

        `mark_boundary` ends a segment at this position.
        """
        check.tensor("positions", positions, {"T": None}, torch.int64)
        if len(positions):
            self._sequence = replace(self._sequence, newest=positions[-1:])

    def mark_boundary(self) -> None:
        """End a segment at the newest token whose query or key the index has received."""
        sequence = self._sequence
        if sequence.prompt is None:
            return
        newest = -1 if sequence.newest is None else int(sequence.newest)
        cut = max(newest + 1, len(self))
        earlier = tuple(other for other in sequence.cuts if other < cut)
        self._sequence = replace(sequence, cuts=(*earlier, cut))

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy, learned = self.geometry, self.config.group, self._learned
        folded = group.fold(queries, g.kv_heads, policy)
        if self._sequence.prompt is None:
            blocks = [folded @ rows.keys.float().mT for _, rows in self._store.blocks(BLOCK)]
            estimates = torch.cat(blocks, dim=-1)
            if self.valid is not None:
                estimates = estimates.masked_fill(~self.valid[:, None, None], float("-inf"))
            agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
            best, ids = self.ops.select.top_k(agreed, k)
            return Hits(ids, best)
        sizes, counts = learned["sizes"].long(), learned["counts"].long()
        parts = [folded @ learned[name].float().mT for name in ("centroids", "means")]
        starts = [sizes.cumsum(-1) - sizes]
        starts.append(
            (self._sequence.prompt + counts.cumsum(-1) - counts)[:, None].expand(-1, g.kv_heads, -1)
        )
        sizes = torch.cat([sizes, counts[:, None].expand(-1, g.kv_heads, -1)], dim=-1)
        estimates = torch.cat(parts, dim=-1).masked_fill((sizes == 0)[:, :, None], float("-inf"))
        agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        hits: Hits = self.ops.units.best_rows(
            agreed, torch.cat(starts, dim=-1), sizes, learned["members"], k
        )
        return hits

    def _scanned(self) -> list[Tensor]:
        if self._sequence.prompt is None:
            return [rows.keys for _, rows in self._store.blocks(BLOCK)]
        return [self._learned[name] for name in ("centroids", "sizes", "means", "counts")]

    def _layout(self, sizes: StateSizes) -> Layout:
        n, g, layout = sizes.length, self.geometry, super()._layout(sizes)
        if sizes.has("statistics.sequence.prompt"):
            layout["statistics.sequence.prompt"] = TensorSpec("", torch.int64, least=0, most=n)
        if sizes.has("statistics.sequence.newest"):
            layout["statistics.sequence.newest"] = TensorSpec("1", torch.int64)
        if not sizes.has("learned") and not (n and sizes.has("statistics.sequence.prompt")):
            return layout
        learned = {
            "members": TensorSpec(
                "B G N",
                torch.int32,
                least=UNUSED,
                most=n - 1,
                allowed="each token once, as many as learned.sizes and learned.counts sum to",
                rule=lambda state: _once_each(below("learned", state), sizes.counts),
            ),
            "sizes": TensorSpec(f"B G C<={n}", torch.int32, least=0, most=n),
            "centroids": TensorSpec("B G C D", g.dtype),
            "means": TensorSpec(f"B G S<={n} D", g.dtype),
            "counts": TensorSpec(
                "B S",
                torch.int32,
                least=0,
                most=self.config.longest,
                allowed="one for each segment of statistics.sequence",
                rule=lambda state: self._in_segments(state, n),
            ),
        }
        return layout | {f"learned.{name}": spec for name, spec in learned.items()}

    def _in_segments(self, state: Mapping[str, Tensor], length: int) -> bool:
        """Return True if a loaded state has the correct number of segments.

        The number follows from the length of the prompt and the marked segment boundaries (`cuts`).
        """
        prompt = state.get("statistics.sequence.prompt")
        if prompt is None:
            return False
        cuts = tuple(state["statistics.sequence.cuts"].tolist())
        starts = _Sequence(int(prompt), cuts).starts(length, self.config.longest)
        sizes = state["learned.sizes"].sum(-1)
        return len(starts) == state["learned.counts"].shape[1] and bool((sizes <= prompt).all())

    # Units

    def _clustered(self, length: int) -> Codes:
        """Cluster the first `length` tokens.

        Returns:
            `members`: Token ids, sorted by cluster and padded with -1, int32 `[B, G, N]`.
            `sizes`: Number of valid tokens in each cluster, int32 `[B, G, C]`.
            `centroids`: Mean key of each cluster, `[B, G, C, D]`, in the layer's dtype.
            `means`: Mean keys of later segments, `[B, G, 0, D]`. There are no segments yet.
            `counts`: Numbers of tokens in later segments, int32 `[B, 0]`.
        """
        g, B, device = self.geometry, len(self.counts), self.geometry.device
        counts, per = [length] * B, self.config.per_cluster
        if self.valid is not None:
            counts = self.valid[:, :length].sum(1).tolist()
        most = -(-max(counts) // per)
        members = torch.full((B, g.kv_heads, length), UNUSED, dtype=torch.int32, device=device)
        sizes = torch.zeros((B, g.kv_heads, most), dtype=torch.int32, device=device)
        centroids = torch.zeros((B, g.kv_heads, most, g.head_dim), dtype=g.dtype, device=device)
        for count in sorted(set(counts) - {0}):
            rows = torch.tensor([b for b in range(B) if counts[b] == count], device=device)
            ids = torch.arange(length, device=device).expand(B, -1)
            if self.valid is not None:
                ids = compact(self.valid[:, :length])[:, :count]
            keys = self._store.gather(ids[:, None].expand(-1, g.kv_heads, -1)).keys[rows]
            points, clusters = keys.float().flatten(0, 1), -(-count // per)
            options = dict(iterations=self.config.iterations, seed=self.config.seed)
            labels = kmeans.assign(points, kmeans.kmeans(points, clusters, **options))[0]
            labels = _renumbered(labels, clusters)
            means, counts_per_cluster = kmeans.means(points, labels, clusters)
            order = labels.sort(dim=1, stable=True).indices  # ids ascend within a cluster
            token_ids = ids[rows].repeat_interleave(g.kv_heads, dim=0).gather(1, order)
            shape = (len(rows), g.kv_heads)
            members[rows, :, :count] = token_ids.view(*shape, -1).int()
            sizes[rows, :, :clusters] = counts_per_cluster.view(*shape, -1).int()
            centroids[rows, :, :clusters] = means.view(*shape, clusters, -1).to(g.dtype)
        return {
            "members": members,
            "sizes": sizes,
            "centroids": centroids,
            "means": centroids[:, :, :0],
            "counts": sizes[:, 0, :0],
        }

    def _segmented(self, learned: Codes, stop: int, keys: Tensor, valid: Tensor | None) -> Codes:
        """Divide the tokens after the prompt into segments, and add these to the learned tensors.

        Segments that end before the first token of `keys` do not change.

        Args:
            learned: Learned tensors before the append.
            stop: Number of tokens after the append.
            keys: Keys of the last tokens before `stop`, `[B, G, n, D]`.
            valid: Mask of valid tokens, bool `[B, stop]`, or None if all are valid.
        """
        prompt, first, device = self._sequence.prompt or 0, stop - keys.shape[2], keys.device
        starts = self._sequence.starts(stop, self.config.longest)
        kept = sum(start < first for start in starts)
        edges = torch.tensor([*starts[kept:], stop], device=device)
        ids = edges[:-1, None] + torch.arange(self.config.longest, device=device)  # [S, longest]
        inside = (ids < edges[1:, None]).expand(len(keys), -1, -1)
        ids = ids.clamp_max(stop - 1)
        tail = torch.arange(prompt, stop, device=device).expand(len(keys), -1)
        if valid is not None:
            inside = inside & valid[:, ids]
            later = compact(valid[:, prompt:])
            later = torch.where(later < 0, UNUSED, later + prompt)
            tail = torch.nn.functional.pad(later, (0, stop - prompt - later.shape[1]), value=UNUSED)
        segment_keys = keys[:, :, ids - first].float().masked_fill(~inside[:, None, ..., None], 0)
        counts = inside.sum(-1)
        means = segment_keys.sum(3) / counts.clamp_min(1)[:, None, :, None]
        tail_ids = tail[:, None].expand(-1, keys.shape[1], -1).int()
        return {
            **learned,
            "members": torch.cat([learned["members"][:, :, :prompt], tail_ids], dim=2),
            "means": torch.cat([learned["means"][:, :, :kept], means.to(keys.dtype)], dim=2),
            "counts": torch.cat([learned["counts"][:, :kept], counts.int()], dim=1),
        }

    def _open_segment(self, length: int) -> Tensor:
        """Return the keys of the last segment that begins before `length`, `[B, G, n, D]`."""
        g, starts = self.geometry, self._sequence.starts(length, self.config.longest)
        ids = torch.arange(starts[-1] if starts else length, length, device=g.device)
        return self._store.gather(ids.expand(len(self.counts), g.kv_heads, -1)).keys

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        if self._sequence.prompt is None or not keys.shape[2]:
            return self._learned
        learned, flags, stop = self._learned, self.valid, len(self) + keys.shape[2]
        if not learned:
            return self._segmented(_empty(keys), stop, keys, valid)
        if flags is not None or valid is not None:
            real = keys.new_ones((len(keys), stop), dtype=torch.bool)
            real[:, : len(self)] = True if flags is None else flags
            real[:, len(self) :] = True if valid is None else valid
            flags = real
        return self._segmented(
            learned, stop, torch.cat([self._open_segment(len(self)), keys], 2), flags
        )

    def _learned_before(self, length: int) -> Codes:
        prompt = self._sequence.prompt
        if prompt is None:
            return self._learned
        if length < prompt:
            return self._clustered(length)
        flags = None if self.valid is None else self.valid[:, :length]
        return self._segmented(self._learned, length, self._open_segment(length), flags)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> _Sequence:
        return self._sequence

    def _with_truncated(self, length: int) -> _Sequence:
        sequence = self._sequence
        prompt = None if sequence.prompt is None else min(sequence.prompt, length)
        cuts = tuple(cut for cut in sequence.cuts if cut <= length)
        return _Sequence(prompt, cuts)

    def _with_reordered(self, batch_indices: Tensor) -> _Sequence:
        return self._sequence

    def _commit(self, statistics: _Sequence) -> None:
        self._sequence = statistics

    def _cleared(self) -> None:
        self._sequence = _Sequence()


def _once_each(learned: Codes, counts: Tensor | None) -> bool:
    """Return True if each valid token is in exactly one cluster or segment.

    `counts` is the number of valid tokens of each sequence, int64 `[B]`, or None if unknown.
    """
    members = learned["members"]
    found = (members >= 0).sum(-1)
    units = learned["sizes"].sum(-1) + learned["counts"].sum(-1)[:, None]
    alike = counts is None or bool((found.cpu() == counts[:, None]).all())
    return alike and bool((found == units).all()) and bool(distinct(members))


def _renumbered(labels: Tensor, clusters: int) -> Tensor:
    """Renumber clusters in the order of their first tokens.

    If scores are equal, a search then prefers the cluster that begins first.

    Args:
        labels: Cluster of each token, int64 `[R, n]`.
        clusters: Number of clusters.

    Returns:
        New cluster of each token, int64 `[R, n]`.
    """
    R, n = labels.shape
    first = torch.full((R, clusters), n, device=labels.device)
    order = torch.arange(n, device=labels.device).expand(R, -1)
    first = first.scatter_reduce(1, labels, order, "amin")
    rank = first.argsort(dim=1, stable=True).argsort(dim=1)
    return rank.gather(1, labels)


def _empty(keys: Tensor) -> dict[str, Tensor]:
    """Return the learned tensors of an index without tokens.

    Batch size, number of heads and dtype are those of `keys`, `[B, G, n, D]`.
    """
    B, G, _, D = keys.shape
    return {
        "members": keys.new_empty((B, G, 0), dtype=torch.int32),
        "sizes": keys.new_empty((B, G, 0), dtype=torch.int32),
        "centroids": keys.new_empty((B, G, 0, D)),
        "means": keys.new_empty((B, G, 0, D)),
        "counts": keys.new_empty((B, 0), dtype=torch.int32),
    }

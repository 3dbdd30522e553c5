"""IceCache: selects pages of similar keys. A search finds the pages with the help of anchor keys.

The anchors are a random sample of the keys. Each token belongs to the nearest anchor, and the
tokens of an anchor are divided into pages. Appended tokens are added to the existing anchors and
pages.

Mao et al., IceCache: Memory-Efficient KV-cache Management for Long-Sequence LLMs (ICLR 2026, arXiv
2604.10539), with multi-level dynamic continuous indexing (M-DCI), on which it is based.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.eviction import joined_flags
from kvindex.bases.index import FIRST_APPEND, BaseIndex
from kvindex.bases.prompt_queries import priority
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.ops.select import compact
from kvindex.ops.units import at
from kvindex.storage.layout import Layout, StateSizes, TensorSpec
from kvindex.storage.state import below

LIKENESSES = 2**24
"""Likenesses computed at a time while keys are assigned to anchors (64 MiB)."""

ROWS = 16_384
"""Tokens read from the store at a time."""

NEVER = float("-inf")


@dataclass(frozen=True)
class IceCacheConfig:
    """Options of IceCache. The defaults are those of the authors' code.

    Args:
        page: Maximum number of tokens per page.
        ratio: Probability that a token becomes an anchor.
        view: Minimum number of anchors whose tokens a search reads for each query head.
        view_share: Minimum number of these anchors, as a fraction of the number of tokens. The
            larger of the two minima applies.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        seed: Seed for the choice of anchors, and for the direction along which an anchor's tokens
            are sorted before they are divided into pages.
    """

    page: int = 16
    ratio: float = 0.03
    view: int = 30
    view_share: float = 0.0015
    group: str = "union"
    seed: int = 0

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.within("ratio", self.ratio, 0, 1)
        check.at_least("view", self.view, 1)
        check.within("view_share", self.view_share, 0, 1)
        check.one_of("group", self.group, group.POLICIES)
        check.seed(self.seed, bits=31)


class IceCache(BaseIndex):
    """Selects whole pages by the largest inner product `q·k` of the query and a key of the page.

    A random sample of the keys are anchors, and each token belongs to the nearest anchor. A search
    first chooses the best anchors, and then scores only the pages of their tokens. In
    `Hits.scores`, each row has the score of its page.

    The learned tensors, for `A` anchors and `N` tokens, are:

    - `first` int64 `[B]`: length of the sequence after the first append with a valid token.
    - `radius` float32 `[B, G]`: the largest `‖k‖²` of the keys of that append.
    - `anchor_ids` int64 `[B, A]`: ids of the anchors, ascending, padded with -1.
    - `anchors` `[B, G, A, D]`: keys of the anchors.
    - `parents` int32 `[B, G, N]`: the anchor of each token, -1 if the token is invalid.
    - `likeness` float32 `[B, G, N]`: similarity of each token to its anchor.
    - `places` float32 `[B, G, N]`: projections of the keys onto a random direction. Pages contain
      tokens with adjacent projections.
    - `members` int32 `[B, G, n]`: token ids in the order of pages.
    - `sizes` int32 `[B, G, A]`: number of tokens of each anchor.

    Source: Mao et al., IceCache (ICLR 2026).
    """

    Config = IceCacheConfig
    learns_from = FIRST_APPEND
    scattered = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(self.config.seed)
        line = torch.randn(self.geometry.head_dim + 1, generator=generator)
        self._line = (line / line.norm()).to(self.geometry.device)

    @property
    def unit(self) -> int:
        """Maximum number of tokens per page."""
        return int(self.config.page)

    # The tree

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned = self._learned or _empty(keys)
        flags = joined_flags(self.valid, len(self), keys, valid)
        known = max(
            learned["parents"].shape[2] - len(self), 0
        )  # how many of these keys already have an anchor and a page
        return self._grown(learned, keys[:, :, known:], flags) if known < keys.shape[2] else learned

    def _learned_before(self, length: int) -> Codes:
        learned = self._learned
        if not learned:
            return learned
        if bool((learned["first"] <= length).all() & (learned["anchor_ids"] < length).all()):
            cut = {name: learned[name][..., :length] for name in ("parents", "likeness", "places")}
            return _paged({**learned, **cut})
        keys = torch.cat([rows.keys for _, rows in self._store.blocks(ROWS)], 2)[:, :, :length]
        remaining, flags = _empty(keys), None if self.valid is None else self.valid[:, :length]
        first = learned["first"].clamp_max(length)
        if flags is not None:
            keys = keys.masked_fill(~flags[:, None, :, None], 0)
            first = first.masked_fill(~flags.any(1), 0)
        settled = torch.arange(length, device=keys.device) < first[:, None]
        if length:
            remaining["radius"] = _squares(keys).masked_fill(~settled[:, None], 0).amax(-1)
        return self._grown({**remaining, "first": first}, keys, flags)

    def _grown(self, learned: Codes, keys: Tensor, flags: Tensor | None) -> Codes:
        """Add keys to the anchors and pages, and return the new learned tensors.

        Args:
            learned: Learned tensors for the `N` earlier tokens.
            keys: New keys, `[B, G, T, D]`; invalid keys must be zero.
            flags: Mask of the valid earlier and new tokens, bool `[B, N + T]`, or None if all are
                valid.
        """
        (B, _, T, _), past = keys.shape, learned["parents"].shape[2]
        if flags is None:
            flags = torch.ones((B, past + T), dtype=torch.bool, device=keys.device)
        valid, rank = flags[:, past:], flags.cumsum(1)[:, past:] - 1
        settles = (learned["first"] == 0) & valid.any(1)
        radius = learned["radius"]
        if bool(settles.any()):
            radius = torch.where(settles[:, None], _squares(keys).amax(-1), radius)
        grown, new = self._with_anchors(learned, keys, valid & self._promoted(rank))
        grown |= {"radius": radius, "first": torch.where(settles, past + T, learned["first"])}
        parents, likeness = _nearest(keys, grown["anchors"], radius, grown["anchor_ids"] >= 0)
        parents = parents.masked_fill(~valid[:, None], UNUSED)
        grown["places"] = torch.cat([learned["places"], self._places(keys, radius)], 2)
        grown["parents"] = torch.cat([learned["parents"], parents.int()], 2)
        grown["likeness"] = torch.cat([learned["likeness"], likeness], 2)
        if past and bool(new.any()):
            for start, rows in self._store.blocks(ROWS):
                block = slice(start, start + rows.keys.shape[2])
                parents, likeness = _nearest(rows.keys, grown["anchors"], radius, new)
                moves = (likeness > grown["likeness"][..., block]) & flags[:, None, block]
                grown["parents"][..., block][moves] = parents[moves].int()
                grown["likeness"][..., block][moves] = likeness[moves]
        return _paged(grown)

    def _with_anchors(
        self, learned: Codes, keys: Tensor, chosen: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Add the keys where `chosen`, bool `[B, T]`, is True to the anchors.

        Returns:
            The new learned tensors, and a mask of the anchors that are new, bool `[B, A]`.
        """
        past, heads = learned["parents"].shape[2], (-1, keys.shape[1], -1)
        positions = _compact(chosen)
        gather = self.ops.fetch.gather_rows
        anchors = torch.cat([learned["anchors"], gather(keys, positions[:, None].expand(heads))], 2)
        ids = torch.cat(
            [learned["anchor_ids"], torch.where(positions < 0, positions, positions + past)], 1
        )
        slots = _compact(ids >= 0)  # sequences with different padding leave gaps
        anchors = gather(anchors, slots[:, None].expand(heads))
        anchored = {**learned, "anchor_ids": at(ids, slots, UNUSED), "anchors": anchors}
        return anchored, slots >= learned["anchor_ids"].shape[1]

    def _promoted(self, rank: Tensor) -> Tensor:
        """Choose the tokens that become anchors: the first token, and a random sample of the rest.

        Args:
            rank: Position of each token among the valid tokens of its sequence, int64 `[B, T]`.

        Returns:
            True for tokens that become anchors, bool `[B, T]`.
        """
        drawn = priority(rank.clamp_min(0), "random", self.config.seed)  # 0 to 2^63 - 1
        promoted: Tensor = (rank == 0) | (drawn <= min(int(self.config.ratio * 2**63), 2**63 - 1))
        return promoted

    def _places(self, keys: Tensor, radius: Tensor) -> Tensor:
        """Project keys `[B, G, T, D]` onto a random direction. Tokens are sorted by the result to
        divide them into pages."""
        projections: Tensor = keys.float() @ self._line[:-1] + _lift(keys, radius) * self._line[-1]
        return projections

    def _layout(self, sizes: StateSizes) -> Layout:
        n, dtype = sizes.length, self.geometry.dtype
        if not n and not sizes.has("learned"):
            return {}
        learned = {
            "first": TensorSpec("B", torch.int64, least=0),
            "radius": TensorSpec("B G", torch.float32, least=0),
            "anchor_ids": TensorSpec(f"B A<={n}", torch.int64, least=UNUSED, most=n - 1),
            "anchors": TensorSpec("B G A D", dtype),
            "parents": TensorSpec(
                "B G N",
                torch.int32,
                least=UNUSED,
                allowed="an anchor for each valid token, with their pages in members and sizes",
                rule=lambda state: _is_paged(below("learned", state), sizes.counts),
            ),
            "likeness": TensorSpec("B G N", torch.float32, infinite=True),
            "places": TensorSpec("B G N", torch.float32),
            "members": TensorSpec(f"B G n<={n}", torch.int32, least=UNUSED, most=n - 1),
            "sizes": TensorSpec("B G A", torch.int32, least=0, most=n),
        }
        return {f"learned.{name}": spec for name, spec in learned.items()}

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy, learned = self.geometry, self.config.group, self._learned
        heads = group.fold(queries, g.kv_heads, policy)  # [B, G, g, D]
        sizes, members = learned["sizes"].long(), learned["members"]
        anchor, starts, page_sizes = self._pages(sizes)
        viewed = self._viewed(heads @ learned["anchors"].float().mT, sizes, k)
        order = self.ops.select.compact(viewed)  # anchors that any head views, [B, G, a]
        slot, offset = self.ops.units.walk(at(sizes, order, 0), int((sizes * viewed).sum(-1).max()))
        first = at(sizes.cumsum(-1) - sizes, at(order, slot, UNUSED), 0)
        place = (first + offset).masked_fill(slot < 0, UNUSED)  # in members, [B, G, W]
        keys = self._store.gather(at(members, place, UNUSED).long()).keys
        products = (heads @ keys.float().mT).masked_fill((place < 0)[:, :, None], NEVER)
        ends = (starts + page_sizes).masked_fill(anchor < 0, members.shape[-1])
        page = torch.searchsorted(ends, place.clamp_min(0), right=True)
        page = page.clamp_max(ends.shape[-1] - 1)[:, :, None].expand_as(products)
        best = products.new_full((*products.shape[:3], ends.shape[-1]), NEVER)
        best.scatter_reduce_(-1, page, products, "amax")
        agreed = self.ops.group.agree(
            best, policy, scale=g.scale, softcap=g.softcap, sizes=page_sizes
        )
        hits: Hits = self.ops.units.best_rows(agreed, starts, page_sizes, members, k)
        return hits

    def _viewed(self, products: Tensor, sizes: Tensor, k: int) -> Tensor:
        """Choose the anchors whose tokens a search reads.

        Each query head chooses its best anchors: at least as many as the options `view` and
        `view_share` require, and more if the chosen anchors have fewer than `k` tokens.

        Args:
            products: Inner products `q·k` of the queries and the anchors, float32 `[B, G, g, A]`.
            sizes: Number of tokens of each anchor, int64 `[B, G, A]`.
            k: Number of requested rows.

        Returns:
            True for anchors that any query head chooses, bool `[B, G, A]`.
        """
        products = products.masked_fill((sizes == 0)[:, :, None], NEVER)
        order = self.ops.select.top_k(products, sizes.shape[-1])[1]  # -1 for none
        tiled = sizes[:, :, None].expand(products.shape)
        before = at(tiled, order, 0).cumsum(-1) - at(tiled, order, 0)  # tokens of better anchors
        counts = self.counts.to(sizes.device)[:, None, None, None]
        most = (counts * self.config.view_share).long().clamp_min(self.config.view)
        rank = torch.arange(order.shape[-1], device=order.device)
        taken = (order >= 0) & ((rank < most) | (before < k))
        last = order.shape[-1]  # a slot that is dropped
        viewed = torch.zeros((*order.shape[:-1], last + 1), dtype=torch.bool, device=order.device)
        return viewed.scatter_(-1, torch.where(taken, order, last), True)[..., :last].any(2)

    def _pages(self, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the tokens of each anchor, as ordered in `members`, into pages of similar size.

        Args:
            sizes: Number of tokens of each anchor, int64 `[B, G, A]`.

        Returns:
            Three tensors int64 `[B, G, P]`: the anchor of each page, or -1 in an unused place; the
            position of the page's first token in `members`; and the number of tokens in the page.
        """
        pages = -(-sizes // self.config.page)
        anchor, number = self.ops.units.walk(pages, int(pages.sum(-1).max()))
        size, pages_per = at(sizes, anchor, 0), at(pages, anchor, 1)
        start, stop = (-(-(n * size) // pages_per) for n in (number, number + 1))
        return anchor, at(sizes.cumsum(-1) - sizes, anchor, 0) + start, stop - start

    def _scanned(self) -> list[Tensor]:
        """Return tensors whose total size is the number of bytes that a search reads per query
        head.

        This size is an estimate: it assumes that all anchors have equally many tokens.
        """
        learned = self._learned
        view = max(self.config.view, int(self.config.view_share * len(self)))
        fraction = min(view / max(learned["sizes"].shape[2], 1), 1)
        viewed = slice(0, round(fraction * len(self)))
        keys = torch.cat([rows.keys for _, rows in self._store.blocks(ROWS)], 2)
        scanned = [learned["anchors"], learned["sizes"]]
        return [*scanned, learned["members"][:, :, viewed], keys[:, :, viewed]]


def _empty(keys: Tensor) -> dict[str, Tensor]:
    """Return the learned tensors of an index without tokens."""
    B, G, _, D = keys.shape
    per_head = keys.new_zeros((B, G, 0), dtype=torch.float32)
    return {
        "first": keys.new_zeros(B, dtype=torch.int64),
        "radius": keys.new_zeros((B, G), dtype=torch.float32),
        "anchor_ids": keys.new_zeros((B, 0), dtype=torch.int64),
        "anchors": keys.new_zeros((B, G, 0, D)),
        **dict.fromkeys(("parents", "members", "sizes"), per_head.int()),
        **dict.fromkeys(("likeness", "places"), per_head),
    }


def _compact(chosen: Tensor) -> Tensor:
    """Return the positions of True elements like `compact`, but also for a mask with no columns."""
    return compact(chosen) if chosen.shape[1] else chosen.long()


def _squares(keys: Tensor) -> Tensor:
    return keys.float().square().sum(-1)


def _lift(keys: Tensor, radius: Tensor) -> Tensor:
    """Return an additional coordinate for each of the keys `[B, G, n, D]`.

    The coordinate, `[B, G, n]`, gives all keys the same norm `√radius`. The query's additional
    coordinate is 0. If keys have equal norms, the key with the largest inner product with a query
    is also the nearest key. For a key that already has a larger norm, the coordinate is 0.
    """
    return (radius[..., None] - _squares(keys)).clamp_min(0).sqrt()


def _nearest(
    keys: Tensor, anchors: Tensor, radius: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the nearest anchor of each key.

    Distances are computed between vectors that `_lift` has extended by one coordinate, so that
    nearly all of them have the same norm. If several anchors are equally near, the first one is
    chosen.

    Args:
        keys: `[B, G, n, D]`.
        anchors: `[B, G, A, D]`.
        radius: Square of the norm that `_lift` gives to the keys, float32 `[B, G]`.
        allowed: True for anchors that may be chosen, bool `[B, A]`.

    Returns:
        The anchor of each key, int64 `[B, G, n]`, and the key's similarity to this anchor, float32
        `[B, G, n]`. A smaller distance gives a larger similarity.
    """
    B, G, n, _ = keys.shape
    if not anchors.shape[2]:
        none = torch.full((B, G, n), NEVER, device=keys.device)
        return torch.full((B, G, n), UNUSED, device=keys.device), none
    lifted, half = _lift(anchors, radius), torch.maximum(radius[..., None], _squares(anchors)) / 2
    half = half.masked_fill(~allowed[:, None], float("inf"))
    nearest = []
    for block in torch.split(keys, max(LIKENESSES // half.numel(), 1), dim=2):
        likeness = block.float() @ anchors.float().mT - half[:, :, None]
        likeness += _lift(block, radius)[..., None] * lifted[:, :, None]
        slot = likeness.argmax(-1)
        nearest.append((slot, likeness.gather(-1, slot[..., None])[..., 0]))
    slots, best = zip(*nearest, strict=True)
    return torch.cat(slots, 2), torch.cat(best, 2)


def _paged(learned: Codes) -> dict[str, Tensor]:
    """Compute `members` and `sizes` from the anchor of each token (`parents`).

    `members` is sorted by the anchor, then by the projection (`places`), then by the token id.
    """
    parents, anchors = learned["parents"].long(), learned["anchor_ids"].shape[1]
    order = learned["places"].argsort(dim=-1, stable=True)
    last = parents.masked_fill(parents < 0, anchors)
    order = order.gather(-1, last.gather(-1, order).argsort(dim=-1, stable=True))
    sizes = torch.zeros((*parents.shape[:2], anchors + 1), dtype=torch.int64, device=parents.device)
    sizes = sizes.scatter_add_(-1, last, torch.ones_like(last))[..., :-1]
    counts = sizes.sum(-1, keepdim=True)
    width = int(counts.max()) if counts.numel() else 0
    present = torch.arange(width, device=parents.device) < counts
    members = order[..., :width].masked_fill(~present, UNUSED)
    return {**learned, "members": members.int(), "sizes": sizes.int()}


def _is_paged(learned: Codes, counts: Tensor | None) -> bool:
    """Return True if each valid token has an anchor, and `members` and `sizes` fit the anchors.

    `counts` is the number of valid tokens of each sequence, int64 `[B]`, or None for no tokens.
    """
    parents, anchors = learned["parents"], (learned["anchor_ids"] >= 0).sum(1)  # -1 comes last
    known = 0 if counts is None else counts[:, None]
    alike = (parents < anchors[:, None, None]).all() & ((parents >= 0).sum(-1).cpu() == known).all()
    if not bool(alike):
        return False
    paged = _paged(learned)
    return all(torch.equal(learned[name], paged[name]) for name in ("members", "sizes"))

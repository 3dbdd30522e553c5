"""MagicPIG: samples keys by locality-sensitive hashing (LSH).

To correct for the sampling, attention divides the term of each key in the softmax by the
probability with which the key was sampled.

Chen et al., MagicPIG: LSH Sampling for Efficient LLM Generation (ICLR 2025).
docs/indexes/magicpig.md lists the differences from the authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.bases.index import FIRST_APPEND, BaseIndex
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

LONGEST = 15
"""Maximum bits of a hash, which is stored as int16."""

MOST_TABLES = 2**15 - 1
"""Maximum number of hash tables: collisions are counted in int16."""

LEAST = 2
"""Number of tables in which a key must collide with the query (published)."""

BLOCK = 2**24
"""Bits hashed, or hashes compared, at a time; bounds memory, not the result."""

RARE = 1e-4
"""Below this expected number of collisions, the probability is computed by a series.

The relative error of the series is the square of this number. The closed form would have a relative
error of `2^-53 / RARE` by cancellation.
"""


@dataclass(frozen=True)
class MagicPIGConfig:
    """Options of MagicPIG.

    Args:
        bits: Bits per hash (the paper's K), 1 to 15. Each bit is the sign of an inner product with
            a random direction.
        tables: Number of hashes per key (the paper's L), at least 2.
        sure: Number of tokens at the beginning of the sequence that every search returns, at most
            half of the `k` requested rows.
        seed: Seed for the random directions, and for the random choice among the candidates if
            there are more than `k`.
        stale: If True, tokens that are appended after `end_prompt` are never returned (as in the
            authors' code, which does not hash them).
    """

    bits: int = 10
    tables: int = 150
    sure: int = 4
    seed: int = 0
    stale: bool = False

    def __post_init__(self) -> None:
        if check.at_least("bits", self.bits, 1) > LONGEST:
            raise ValueError(f"bits: got {self.bits}, allowed is 1 to {LONGEST}")
        if check.at_least("tables", self.tables, LEAST) > MOST_TABLES:
            raise ValueError(f"tables: got {self.tables}, allowed is {LEAST} to {MOST_TABLES}")
        check.at_least("sure", self.sure, 0)
        check.seed(self.seed)
        check.flag("stale", self.stale)


class MagicPIG(BaseIndex):
    """Samples the keys whose hashes (SimHash) equal the query's in at least two hash tables.

    These keys are the candidates of a query head. The head attends to its candidates and to the
    first `sure` tokens. The log weight of a candidate is `-log w`, where `w` is the probability
    that the key is a candidate. With these weights, numerator and denominator of the softmax are
    unbiased estimates of the numerator and denominator in full attention. `Hits.scores` contains
    the attention weights in a softmax over the returned rows, averaged over the heads. These scores
    only determine the order of the rows.

    Source: Chen et al., MagicPIG (ICLR 2025).
    """

    Config = MagicPIGConfig
    learns_from = FIRST_APPEND
    weighted = True
    statistics = ("_prompt_ended",)

    _prompt_ended: int | None = None  # prompt length, set at `end_prompt` if stale

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, config = self.geometry, self.config
        generator = torch.Generator().manual_seed(config.seed)
        shape = (g.head_dim, config.tables * config.bits)
        self._directions = torch.randn(shape, generator=generator).to(g.device)

    # Encoding

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Compute the mean key of each sequence, which is subtracted from keys before hashing.

        The mean is over the keys of the first append that contains a valid token of the sequence.
        Subtracting the mean changes all logits of a query by the same number, so the softmax does
        not change.

        Returns:
            `center`: Mean key, float32 `[B, G, D]`.
            `known`: True for sequences whose mean key is known, bool `[B]`.
        """
        all_valid = keys.new_ones(keys.shape[:1] + keys.shape[2:3], dtype=torch.bool)
        counts = (all_valid if valid is None else valid).sum(1)
        center = (keys.double().sum(2) / counts.clamp_min(1)[:, None, None]).float()
        if not self._learned:
            return {"center": center, "known": counts > 0}
        known = self._learned["known"]
        kept = torch.where(known[:, None, None], self._learned["center"], center)
        return {"center": kept, "known": known | (counts > 0)}

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {"hashes": self._hashes(keys.float() - learned["center"][:, :, None])}

    def _hashes(self, vectors: Tensor) -> Tensor:
        """Compute one hash for each vector and hash table.

        Each bit of each table has a direction `[D]`. The bit is 1 if the inner product of the
        vector and this direction is at least 0.

        Args:
            vectors: Float32 `[..., N, D]`.

        Returns:
            Hashes int16 `[..., N, tables]`.
        """
        bits, tables = self.config.bits, self.config.tables
        powers = 2 ** torch.arange(bits, device=vectors.device, dtype=torch.float32)
        step = max(BLOCK // (self._directions.shape[1] * math.prod(vectors.shape[:-2])), 1)
        parts = []
        for block in torch.split(vectors, step, dim=-2):
            positive = (block @ self._directions >= 0).float()
            parts.append((positive.reshape(*block.shape[:-1], tables, bits) @ powers).short())
        return torch.cat(parts, dim=-2)

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g = self.geometry
        folded = group.fold(queries, g.kv_heads, "union")  # [B, G, g, D]
        hashes = self._hashes(folded)
        drawn, sure = self._drawn(hashes), self._sure(k)
        drawn_by_any = drawn.any(2) & ~sure[:, None]
        room = k - sure.sum(-1).clamp_max(k)[:, None]  # [B, 1]
        kept = self._thinned(drawn_by_any, room, hashes)
        times = drawn_by_any.sum(-1).clamp_min(1) / kept.sum(-1).clamp_min(1)  # [B, G]

        ids = self.ops.select.compact(kept | sure[:, None])
        keys, unused = self._store.gather(ids).keys, (ids < 0)[:, :, None]
        at = ids.clamp_min(0)
        is_sure = sure[:, None].expand(-1, g.kv_heads, -1).gather(-1, at)[:, :, None]
        visible = drawn.gather(-1, at[:, :, None].expand(*folded.shape[:3], -1))
        weights = times.double().log()[..., None, None] - self._log_chances(folded, keys)
        weights = weights.masked_fill(~visible, float("-inf")).masked_fill(is_sure, 0)
        weights = weights.masked_fill(unused, float("-inf")).float()

        logits = (folded @ keys.float().mT).masked_fill(unused, float("-inf"))
        agreed = self.ops.group.agree(logits, "mean_share", scale=g.scale, softcap=g.softcap)
        scores, slots = self.ops.select.top_k(agreed, k)
        place = slots.clamp_min(0)
        if not ids.shape[-1]:  # there is no candidate
            return Hits(slots, scores)
        best_ids = ids.gather(-1, place).masked_fill(slots < 0, UNUSED)
        weights = weights.gather(-1, place[:, :, None].expand(*folded.shape[:3], -1))
        weights = weights.masked_fill((slots < 0)[:, :, None], float("-inf"))
        return Hits(best_ids, scores, weights.flatten(1, 2))

    def _drawn(self, hashes: Tensor) -> Tensor:
        """Find the candidates: keys whose hashes equal the query's in at least two tables.

        Args:
            hashes: Hashes of the queries, int16 `[B, G, g, tables]`.

        Returns:
            True for the candidates of each query head, bool `[B, G, g, N]`.
        """
        codes, parts = self._codes["hashes"], []
        step = max(BLOCK // hashes.numel(), 1)
        for block in torch.split(codes, step, dim=2):
            collides = block[:, :, None] == hashes[:, :, :, None]
            parts.append(collides.sum(-1, dtype=torch.int16) >= LEAST)
        return torch.cat(parts, dim=-1) & self._known()[:, None, None]

    def _known(self) -> Tensor:
        """Return a mask of the tokens that a search may return, bool `[B, N]`."""
        ids = torch.arange(len(self), device=self.geometry.device).expand(len(self.counts), -1)
        known: Tensor = ids < (len(self) if self._prompt_ended is None else self._prompt_ended)
        return known if self.valid is None else known.logical_and(self.valid)

    def _sure(self, k: int) -> Tensor:
        """Return a mask `[B, N]`: True for the first tokens, which a search for `k` rows always
        returns."""
        known = self._known()
        return known.logical_and(known.cumsum(-1) <= min(self.config.sure, max(k // 2, 1)))

    def _thinned(self, drawn_by_any: Tensor, room: Tensor, hashes: Tensor) -> Tensor:
        """Choose at most `room` candidates at random, all with the same probability.

        The random number of a token is a hash of two things: the position of the token among the
        valid tokens, and the hashes of the queries. So different queries get different samples, the
        result is the same in every run, and padding does not change it.

        Args:
            drawn_by_any: True for the candidates of any query head, bool `[B, G, N]`.
            room: Maximum number of candidates to choose, int64 `[B, 1]`.
            hashes: Hashes of the queries, int16 `[B, G, g, tables]`.

        Returns:
            True for the chosen candidates, bool `[B, G, N]`.
        """
        valid = self._known()
        rank = valid.cumsum(-1)[:, None]  # [B, 1, N]
        flat = hashes.flatten(2).long() + 1
        odd = _mixed(torch.arange(flat.shape[-1], device=flat.device) + self.config.seed) | 1
        sign = _mixed((flat * odd).sum(-1, keepdim=True))  # [B, G, 1]
        chance = (_mixed(rank + sign) & 2**62 - 1).masked_fill(~drawn_by_any, -1)
        most = min(int(room.max()), len(self))
        order = chance.topk(most, dim=-1).indices
        taken = (torch.arange(most, device=order.device) < room[..., None]).expand(order.shape)
        drawn = torch.zeros_like(drawn_by_any).scatter_(-1, order, taken)
        return drawn & drawn_by_any

    def _log_chances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the log probability that a key is a candidate, float64 `[B, G, g, C]`.

        Queries are `[B, G, g, D]`, and keys are `[B, G, C, D]`.
        """
        centered = keys.float() - self._learned["center"][:, :, None]
        normalize = self.ops.transform.normalize
        heads, rows = (normalize(x)[0].double() for x in (queries, centered))
        return log_chance(heads @ rows.mT, self.config.bits, self.config.tables)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout = super()._layout(sizes)
        if sizes.length:
            tables, most = self.config.tables, 2**self.config.bits - 1
            hashes = TensorSpec(f"B G N {tables}", torch.int16, least=0, most=most)
            layout["codes.hashes"] = hashes
        if sizes.length or sizes.has("learned"):
            layout["learned.center"] = TensorSpec("B G D", torch.float32)
            layout["learned.known"] = TensorSpec("B", torch.bool)
        if sizes.has("statistics.prompt_ended"):
            prompt_ended = TensorSpec("", torch.int64, least=0, most=sizes.length)
            layout["statistics.prompt_ended"] = prompt_ended
        return layout

    # End of the prompt, if the index is stale

    def end_prompt(self) -> None:
        """End the prompt. With the option `stale`, tokens appended later are never returned."""
        if self.config.stale and self._prompt_ended is None:
            self._prompt_ended = len(self)

    def _cleared(self) -> None:
        self._prompt_ended = None

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> int | None:
        return self._prompt_ended

    def _with_truncated(self, length: int) -> int | None:
        return None if self._prompt_ended is None else min(self._prompt_ended, length)

    def _with_reordered(self, batch_indices: Tensor) -> int | None:
        return self._prompt_ended

    def _commit(self, statistics: int | None) -> None:
        self._prompt_ended = statistics

    def _other_tensors(self) -> list[Tensor]:
        return [self._directions]


def log_chance(cosines: Tensor, bits: int, tables: int) -> Tensor:
    """Return `log w`, where `w` is the probability that the hashes of query and key are equal in at
    least two tables.

    For `K` bits, `L` tables and the angle `θ` between query and key, it is
    `w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)` with `p = 1 - θ/π`.

    Args:
        cosines: Cosine of the angle `θ` between query and key.
        bits: Bits per hash, the paper's K.
        tables: Number of hash tables, the paper's L.

    Returns:
        Float64, of the shape of `cosines`.

    Source: Chen et al., MagicPIG (ICLR 2025), section 4.2.
    """
    p = 1 - cosines.double().clamp(-1, 1).acos() / math.pi
    meet = p.clamp_min(1e-8) ** bits  # angles near π are accurate to 1e-8
    missed = torch.log1p(-meet)
    closed = -torch.expm1(tables * missed) - tables * meet * ((tables - 1) * missed).exp()
    # If the probability `w` is small, its exact formula (`closed`) suffers from rounding. In this
    # case, use the logarithm of the first two terms of the power series of `w` in `p^K`.
    pairs = math.log(tables * (tables - 1) / 2)
    series = pairs + 2 * meet.log() + torch.log1p(-2 * (tables - 2) / 3 * meet.clamp_max(RARE))
    return torch.where(tables * meet < RARE, series, closed.log())


def _mixed(numbers: Tensor) -> Tensor:
    """Hash int64 numbers to pseudorandom int64 numbers, by xor-shifts and multiplications."""
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        numbers = (numbers ^ (numbers >> 29 & 2**35 - 1)) * factor
    return numbers ^ (numbers >> 32 & 2**32 - 1)

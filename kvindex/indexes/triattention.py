"""TriAttention: retains the rows that future queries are expected to attend to.

Before the rotary embedding, the queries of a head are close to their mean, which is called the
center. The center, rotated to future positions, predicts which rows future queries attend to.

Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (2026, arXiv
2604.04921).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.bases.eviction import NEVER, ObservingEvictionIndex, are_valid, joined_flags
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes
from kvindex.ops import group
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, distinct

BLOCK = 16_384
"""Keys scored at a time; bounds the memory for float32 copies, not the result."""

LEAST = 1e-6
"""Minimum standard deviation of a head's scores (published); limits their amplification."""


@dataclass(frozen=True, eq=False)
class Centers:
    """Mean queries of a layer before the rotary embedding, as complex numbers.

    A complex number represents a pair of coordinates that the rotary embedding rotates together.
    Pairs of coordinates that are not rotated come last.

    Args:
        mean: Mean of the queries, complex64 `[H, D / 2]`.
        size: Mean of the absolute values of these complex numbers, float32 `[H, D / 2]`. It is at
            least `|mean|`.
    """

    mean: Tensor
    size: Tensor

    @staticmethod
    def of(queries: Tensor, positions: Tensor, counted: Tensor, rope: Tensor) -> Centers:
        """Compute the centers of each sequence. The results have an additional first axis `B`.

        Args:
            queries: Queries with the rotary embedding, `[B, H, R, D]`.
            positions: Positions of the queries, int64 `[R]`.
            counted: True for queries to include, bool `[B, R]`. The centers of a sequence without
                such queries are zero.
            rope: Inverse frequencies of the rotary embedding (`kvindex.core.rope`).
        """
        pairs = paired(queries.float(), rope)
        angles = positions[:, None].double() * frequencies(pairs.shape[-1], rope)
        unrotated = pairs * torch.polar(torch.ones_like(angles), -angles).to(pairs.dtype)
        weights = counted[:, None, :, None] / counted.sum(1).clamp_min(1)[:, None, None, None]
        return Centers((unrotated * weights).sum(2), (pairs.abs() * weights).sum(2))


@dataclass(frozen=True)
class TriAttentionConfig:
    """Options of TriAttention.

    Args:
        budget: Number of rows to retain (published: 2048).
        horizon: Centers are rotated to the positions that are 1, 2, 4, … tokens ahead, up to
            `horizon` (published: 65536).
        centers: Centers of the layer that were computed from another text, as in the published
            method. With None, centers are computed from the prompt.
        most: Number of last queries of the prompt from which centers are computed, if `centers` is
            None.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    budget: int = 2048
    horizon: int = 65536
    centers: Centers | None = None
    most: int = 2048
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("budget", self.budget, 1)
        check.at_least("horizon", self.horizon, 1)
        check.at_least("most", self.most, 1)
        if self.centers is not None and not isinstance(self.centers, Centers):
            raise ValueError(f"centers: got {self.centers!r}, allowed is None or a Centers object")
        check.one_of("group", self.group, group.POLICIES)


class TriAttention(ObservingEvictionIndex):
    """Permanently evicts the rows with the lowest scores, once there are more than `budget` rows.

    Each query head has a center, which is the mean of its queries before the rotary embedding. The
    score of a row for a query head estimates the inner product of its key and future queries. It is
    the sum of two terms:

    - The inner product of the key and the center, where the center is rotated to several future
      positions, and the mean over these positions is taken.
    - A term for the spread of queries around the center: `Σ_f (E|q_f| - |E q_f|) |k_f|`, where `f`
      are the pairs of coordinates that the rotary embedding rotates together.

    Rows are evicted at `end_prompt` and at each later append. If there are no centers, no row is
    evicted.

    The learned tensors are:

    - `mean` and `size`: attributes of `Centers`, with an additional first axis `B`.
    - `shift` int64 `[B]`: difference between the id of a token and its position in the sequence.
    - `ids` int64 `[B, G, C]`: token ids of the retained rows, with -1 in unused places.

    Source: Mao et al., TriAttention (arXiv 2604.04921).
    """

    Config = TriAttentionConfig
    needs_rope = True

    statistics = ("_next",)

    _next: Tensor | None  # the position after the newest query, int64 []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, centers = self.geometry, self.config.centers
        if centers is not None:
            shape: dict[str, int | None] = {"H": g.q_heads, "D/2": g.head_dim // 2}
            check.tensor("centers.mean", centers.mean, shape, torch.complex64)
            check.tensor("centers.size", centers.size, shape, torch.float32)

    # Signals

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries `[B, H, T, D]` of the tokens `positions`.

        Queries of the prompt are stored to compute the centers, unless the option `centers` is set.
        After `end_prompt`, only the positions are used. NaN and infinite coordinates count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if len(positions):
            self._next = positions[-1] + 1
        if not self._prompt_ended and self.config.centers is None:
            self._sample_queries(queries, positions, self.config.most)

    def end_prompt(self) -> None:
        """End the prompt: compute the centers, and evict rows.

        If the index is empty, the next append does this.
        """
        self._prompt_ended = True
        if len(self):
            ids = self._retained()
            keys = self._store.gather(ids).keys
            self._learned = self._evict(ids, keys, self.valid, len(self))
            self._observed = None

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on. Rows that were evicted stay evicted."""
        super().truncate(length)
        self._next = None

    # Eviction

    def _retained(self) -> Tensor:
        return self._learned["ids"] if "ids" in self._learned else self._ids_from(0)

    def _evict(self, ids: Tensor, keys: Tensor, flags: Tensor | None, length: int) -> Codes:
        """Choose which rows to retain, and return the learned tensors.

        The learned tensor `ids` contains the token ids of the retained rows.

        Args:
            ids: Token ids of the rows, int64 `[B, G, C]`.
            keys: Keys of the rows, `[B, G, C, D]`.
            flags: Mask of valid tokens, bool `[B, length]`, or None if all are valid.
            length: Number of tokens in the index.
        """
        learned = self._with_centers(len(keys), flags)
        if "mean" not in learned or ids.shape[-1] <= self.config.budget:
            return {**learned, "ids": ids} if "mean" in learned else learned
        scores = self._scores(learned, keys, length)
        present = (ids >= 0)[:, :, None]
        count = present.sum(-1, keepdim=True).clamp_min(1)
        mean = scores.masked_fill(~present, 0).sum(-1, keepdim=True) / count
        deviations = (scores - mean).masked_fill(~present, 0)
        spread = (deviations.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(LEAST)
        order = (deviations / spread).amax(2).masked_fill(ids < 0, NEVER)  # largest over heads
        slots = self.ops.select.top_k(order, self.config.budget)[1].sort(-1).values
        remaining = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED)
        return {**learned, "ids": remaining}

    def _with_centers(self, batch: int, flags: Tensor | None) -> Codes:
        """Add the centers (mean queries) to the learned tensors, if they are known.

        The centers are given by the option `centers`, or are computed from the observed queries.
        """
        g, calibrated, observed, learned = (
            self.geometry,
            self.config.centers,
            self._observed,
            self._learned,
        )
        if "mean" in learned or not self._prompt_ended or (calibrated is None and observed is None):
            return learned
        shift = torch.zeros(batch, dtype=torch.int64, device=g.device)
        if calibrated is not None:
            if flags is not None:  # assumes that the longest sequence has no padding
                first = flags.int().argmax(1)
                shift = first - first.min()
            parts = {"mean": calibrated.mean, "size": calibrated.size}
            own = {name: part.to(g.device).expand(batch, -1, -1) for name, part in parts.items()}
            return {**learned, **own, "shift": shift}
        assert observed is not None
        assert g.rope is not None
        counted = are_valid(observed.queries, observed.positions, flags)
        centers = Centers.of(observed.queries, observed.positions, counted, g.rope)
        return {**learned, "mean": centers.mean, "size": centers.size, "shift": shift}

    def _scores(self, learned: Codes, keys: Tensor, least: int) -> Tensor:
        """Score keys for queries at future positions.

        The score is averaged over the positions `t + δ` for `δ` = 1, 2, 4, … up to `horizon`, where
        `t` is the position of the next token.

        Args:
            learned: Learned tensors with the centers.
            keys: Keys with the rotary embedding, `[B, G, C, D]`.
            least: Lower bound of `t`.

        Returns:
            Float32 `[B, G, g, C]`.
        """
        g = self.geometry
        assert g.rope is not None
        positions = -learned["shift"] + least
        if self._next is not None:
            positions = torch.maximum(positions, self._next - learned["shift"])
        omega = frequencies(g.head_dim // 2, g.rope)
        ahead = 2.0 ** torch.arange(self.config.horizon.bit_length(), device=g.device)
        angles = (positions[:, None] + ahead.double())[..., None] * omega  # [B, δ, D/2]
        rotations = torch.polar(torch.ones_like(angles), angles).mean(1).to(torch.complex64)
        future = unpaired(learned["mean"] * rotations[:, None], g.rope)  # [B, H, D]
        spread = (learned["size"] - learned["mean"].abs()).clamp_min(0)
        shape = (len(keys), g.kv_heads, g.group_size, -1)
        future, spread = future.reshape(shape), spread.reshape(shape)
        scores = []
        for block in map(Tensor.float, torch.split(keys, BLOCK, dim=2)):
            scores.append(future @ block.mT + spread @ paired(block, g.rope).abs().mT)
        return torch.cat(scores, dim=-1)

    def _layout(self, sizes: StateSizes) -> Layout:
        layout, pairs = super()._layout(sizes), f"B H {self.geometry.head_dim // 2}"
        if sizes.has("statistics.next"):
            layout["statistics.next"] = TensorSpec("", torch.int64, least=0)
        if sizes.has("learned"):
            layout["learned.mean"] = TensorSpec(pairs, torch.complex64)
            layout["learned.size"] = TensorSpec(pairs, torch.float32, least=0)
            layout["learned.shift"] = TensorSpec("B", torch.int64, least=0)
            layout["learned.ids"] = TensorSpec(
                f"B G C<={self.config.budget}",
                torch.int64,
                least=UNUSED,
                most=sizes.length - 1,
                allowed="distinct, and every valid token where the budget has room",
                rule=lambda state: self._retains(state["learned.ids"], sizes.counts),
            )
        return layout

    def _retains(self, ids: Tensor, counts: Tensor | None) -> bool:
        """Return True if the ids are distinct, and are the ids of `budget` rows or of all valid
        tokens.
        """
        known = 0 if counts is None else counts[:, None]
        evicted = ids.shape[-1] == self.config.budget
        complete = evicted or bool(((ids >= 0).sum(-1).cpu() == known).all())
        return complete and bool(distinct(ids))

    # Methods that the base class calls

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned, first, stop = super()._learn(keys, valid), len(self), len(self) + keys.shape[2]
        if not self._prompt_ended:
            return learned
        flags = joined_flags(self.valid, first, keys, valid)
        new = torch.arange(first, stop, device=keys.device)
        new = new.expand(len(keys), keys.shape[1], -1)
        if valid is not None:
            new = new.masked_fill(~valid[:, None], UNUSED)
        if not first:
            return self._evict(new, keys, flags, stop)
        ids = self._retained()
        both = torch.cat([self._store.gather(ids).keys, keys], dim=2)
        return self._evict(torch.cat([ids, new], dim=-1), both, flags, stop)

    def _learned_before(self, length: int) -> Codes:
        if "ids" not in self._learned:
            return self._learned
        ids = self._learned["ids"]
        return {**self._learned, "ids": ids.masked_fill(ids >= length, UNUSED)}

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Any:
        return None if self._prompt_ended else self._observed

    def _scanned(self) -> list[Tensor]:
        kept = [self._learned["ids"]] if "ids" in self._learned else []
        return [*super()._scanned(), *kept]

    def _cleared(self) -> None:
        super()._cleared()
        self._next = None


def paired(vectors: Tensor, rope: Tensor) -> Tensor:
    """Combine the coordinates that are rotated together into complex numbers.

    Coordinates that are not rotated also become complex numbers: the last ones of the result.

    Args:
        vectors: Float32 `[…, D]`.
        rope: Inverse frequencies of the rotary embedding.

    Returns:
        Complex64 `[…, D / 2]`.
    """
    F = len(rope)
    a, b, rest = vectors[..., :F], vectors[..., F : 2 * F], vectors[..., 2 * F :]
    first, second = rest.chunk(2, dim=-1) if rest.shape[-1] else (rest, rest)
    return torch.complex(torch.cat([a, first], -1), torch.cat([b, second], -1))


def unpaired(pairs: Tensor, rope: Tensor) -> Tensor:
    """Convert complex pairs `[…, D / 2]` back to real vectors `[…, D]`: the inverse of `paired`."""
    F, (a, b) = len(rope), (pairs.real, pairs.imag)
    return torch.cat([a[..., :F], b[..., :F], a[..., F:], b[..., F:]], dim=-1)


def frequencies(pairs: int, rope: Tensor) -> Tensor:
    """Return the rotary frequency of each pair of coordinates, float64 `[pairs]`.

    It is 0 for pairs that are not rotated.
    """
    return pad(rope.double(), (0, pairs - len(rope)))

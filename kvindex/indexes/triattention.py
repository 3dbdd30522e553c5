"""TriAttention: keeps the rows that future queries are expected to attend to.

Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (2026, arXiv
2604.04921). Before the rotary embedding, the queries of a head are close to one center. The center,
rotated to the positions ahead, predicts what they will attend to.
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
from kvindex.storage.layout import Held, Layout, TensorSpec, distinct

BLOCK = 16_384
"""Keys scored at a time; bounds the memory for float32 copies, not the result."""

LEAST = 1e-6
"""Minimum standard deviation of a head's scores (published); limits their amplification."""


@dataclass(frozen=True, eq=False)
class Centers:
    """Mean queries of a layer, for each head and pair of coordinates that rotate together.

    Pairs that do not rotate come last.

    Args:
        mean: Mean of the queries before the rotary embedding, complex64 `[H, D / 2]`.
        size: Mean of the queries' absolute values, float32 `[H, D / 2]`, at least `|mean|`.
    """

    mean: Tensor
    size: Tensor

    @staticmethod
    def of(queries: Tensor, positions: Tensor, counted: Tensor, rope: Tensor) -> Centers:
        """Compute the centers of some queries, with a leading axis `B`.

        Args:
            queries: `[B, H, R, D]`.
            positions: Int64 `[R]`.
            counted: Bool `[B, R]`, True for queries to include. Without any, the centers are zero.
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
        budget: Rows to retain (published: 2048).
        horizon: Largest distance of future queries, which are 1, 2, 4, … positions ahead
            (published: 65536).
        centers: Centers of the layer, calibrated on a text beforehand (published), or None for
            those of the prompt.
        most: How many of the prompt's last queries make up the centers, if none are given.
        group: How the query heads of a group rank the retained rows (`kvindex.ops.group`).
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
            raise ValueError(f"centers: got {self.centers!r}, allowed is None or a Centers")
        check.one_of("group", self.group, group.POLICIES)


class TriAttention(ObservingEvictionIndex):
    """Evicts, for good, the rows with the lowest scores once there are more than `budget`.

    A head scores a row by its mean inner product with the head's center, rotated to the positions
    ahead, plus `Σ (E|q_f| - |E q_f|) |k_f|` for the spread of queries around the center. Rows are
    evicted at `end_prompt` and at each later append; without centers, never.

    The learned tensors are:

    - `mean` and `size`: as in `Centers`, with a leading axis `B`.
    - `shift` int64 `[B]`: difference between a token's id and its position for the centers.
    - `ids` int64 `[B, G, C]`: the retained rows, -1 where a place is unused.

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

        If no centers are given, queries of the prompt make up the centers. After `end_prompt`, only
        the positions are used. Numbers that are not finite count as 0.
        """
        queries = self._checked_queries(queries, positions)
        if len(positions):
            self._next = positions[-1] + 1
        if not self._prompt_ended and self.config.centers is None:
            self._sample_queries(queries, positions, self.config.most)

    def end_prompt(self) -> None:
        """End the prompt: fix the centers and evict rows (at the next append if there are none)."""
        self._prompt_ended = True
        if len(self):
            ids = self._retained()
            keys = self._store.gather(ids).keys
            self._learned = self._evict(ids, keys, self.valid, len(self))
            self._observed = None

    def truncate(self, length: int) -> None:
        """Truncate the index; evicted rows stay evicted."""
        super().truncate(length)
        self._next = None

    # Eviction

    def _retained(self) -> Tensor:
        return self._learned["ids"] if "ids" in self._learned else self._ids_from(0)

    def _evict(self, ids: Tensor, keys: Tensor, flags: Tensor | None, length: int) -> Codes:
        """Evict rows of `ids` `[B, G, C]`, keys `[B, G, C, D]`, and return the learned tensors.

        `flags`, bool `[B, length]` or None, is True for valid tokens.
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
        """Return the learned tensors with centers: given ones, those of the prompt, or none."""
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
        """Score keys `[B, G, C, D]` for positions of at least `least`, float32 `[B, G, g, C]`.

        The keys contain the rotary embedding already. The center is rotated to the future position
        `t + δ`, and the result is averaged over `δ`.
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

    def _layout(self, held: Held) -> Layout:
        layout, pairs = super()._layout(held), f"B H {self.geometry.head_dim // 2}"
        if held.has("statistics.next"):
            layout["statistics.next"] = TensorSpec("", torch.int64, least=0)
        if held.has("learned"):
            layout["learned.mean"] = TensorSpec(pairs, torch.complex64)
            layout["learned.size"] = TensorSpec(pairs, torch.float32, least=0)
            layout["learned.shift"] = TensorSpec("B", torch.int64, least=0)
            layout["learned.ids"] = TensorSpec(
                f"B G C<={self.config.budget}",
                torch.int64,
                least=UNUSED,
                most=held.length - 1,
                allowed="distinct, and every valid token where the budget has room",
                rule=lambda state: self._retains(state["learned.ids"], held.counts),
            )
        return layout

    def _retains(self, ids: Tensor, counts: Tensor | None) -> bool:
        """Return True if `ids` are distinct, and are all valid tokens or as many as the budget."""
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
    """Pair coordinates of float32 `[…, D]` that rotate together, as complex64 `[…, D / 2]`.

    Coordinates that do not rotate are paired, too, and come last.
    """
    F = len(rope)
    a, b, rest = vectors[..., :F], vectors[..., F : 2 * F], vectors[..., 2 * F :]
    first, second = rest.chunk(2, dim=-1) if rest.shape[-1] else (rest, rest)
    return torch.complex(torch.cat([a, first], -1), torch.cat([b, second], -1))


def unpaired(pairs: Tensor, rope: Tensor) -> Tensor:
    """Undo `paired`: return real vectors `[…, D]` from complex pairs `[…, D / 2]`."""
    F, (a, b) = len(rope), (pairs.real, pairs.imag)
    return torch.cat([a[..., :F], b[..., :F], a[..., F:], b[..., F:]], dim=-1)


def frequencies(pairs: int, rope: Tensor) -> Tensor:
    """Return the rotary frequencies of all pairs, float64 `[D / 2]`, 0 if not rotated."""
    return pad(rope.double(), (0, pairs - len(rope)))

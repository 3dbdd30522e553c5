"""TriAttention: eviction by the attention expected from future queries, from mean queries.

Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (2026, arXiv
2604.04921). Before the rotary embedding the queries of a head lie near one center; rotated to the
positions ahead, it predicts to what they will attend.
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
"""Keys scored at a time: bounds their float32 copies, not the result."""

LEAST = 1e-6
"""Least spread of a head's scores (published): below it they are not amplified."""


@dataclass(frozen=True, eq=False)
class Centers:
    """Mean queries of a layer, by head and pair of coordinates that rotate together.

    mean: complex64 `[H, D / 2]`, of the queries before the rotary embedding; size: float32, of
    their absolute values, at least that of the mean. Pairs that do not rotate come last.
    """

    mean: Tensor
    size: Tensor

    @staticmethod
    def of(queries: Tensor, positions: Tensor, counted: Tensor, rope: Tensor) -> Centers:
        """Centers of queries `[B, H, R, D]` at positions int64 `[R]` where counted, bool `[B, R]`.

        The fields have a leading axis `B`; zeros where none counts. rope: `kvindex.core.rope`.
        """
        pairs = paired(queries.float(), rope)
        angles = positions[:, None].double() * frequencies(pairs.shape[-1], rope)
        unrotated = pairs * torch.polar(torch.ones_like(angles), -angles).to(pairs.dtype)
        weights = counted[:, None, :, None] / counted.sum(1).clamp_min(1)[:, None, None, None]
        return Centers((unrotated * weights).sum(2), (pairs.abs() * weights).sum(2))


@dataclass(frozen=True)
class TriAttentionConfig:
    """Configuration of TriAttention.

    budget: retained rows (published: 2048); horizon: largest distance of future queries, which are
    1, 2, 4, … positions ahead (published: 65536); centers: of the layer, calibrated on a text
    beforehand (published), or None for those of the prompt's last `most` queries; group: how query
    heads agree on the order of retained rows.
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
    """Evicts, for good, the rows of the least scores once there are more than `budget`.

    A head scores a row by the mean product with its center rotated to the positions ahead, and by
    `Σ (E|q_f| - |E q_f|) |k_f|` for the spread of queries around the center. Rows are evicted at
    `end_prompt`, then at every append; without centers, never. Learned: `mean`, `size` as in
    `Centers` with a leading axis `B`; `shift` int64 `[B]`, positions that ids are ahead of those of
    the centers; `ids` int64 `[B, G, C]`, retained, -1 for none.
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
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`: the prompt's may become centers.

        After `end_prompt` only their positions count. What is not finite in a query counts as 0.
        Raises ValueError or TypeError for a wrong tensor.
        """
        queries = self._checked_queries(queries, positions)
        if len(positions):
            self._next = positions[-1] + 1
        if not self._sealed and self.config.centers is None:
            self._sample_queries(queries, positions, self.config.most)

    def end_prompt(self) -> None:
        """End the prompt: fix the centers (at the first append, if it is empty), and evict rows."""
        self._sealed = True
        if len(self):
            ids = self._retained()
            keys = self._store.gather(ids).keys
            self._learned = self._evict(ids, keys, self.valid, len(self))
            self._observed = None

    def truncate(self, length: int) -> None:
        """As `BaseIndex.truncate`; evicted rows stay evicted."""
        super().truncate(length)
        self._next = None

    # Eviction

    def _retained(self) -> Tensor:
        return self._learned["ids"] if "ids" in self._learned else self._ids_from(0)

    def _evict(self, ids: Tensor, keys: Tensor, flags: Tensor | None, length: int) -> Codes:
        """The learned state once rows `ids` int64 `[B, G, C]` with keys `[B, G, C, D]` compete.

        flags: which of the first `length` tokens are valid, bool `[B, length]`, or None.
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
        order = (deviations / spread).amax(2).masked_fill(ids < 0, NEVER)  # the heads' largest
        slots = self.ops.select.top_k(order, self.config.budget)[1].sort(-1).values
        remaining = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED)
        return {**learned, "ids": remaining}

    def _with_centers(self, batch: int, flags: Tensor | None) -> Codes:
        """The learned state with centers, if any: calibrated, or of the prompt's queries."""
        g, calibrated, observed, learned = (
            self.geometry,
            self.config.centers,
            self._observed,
            self._learned,
        )
        if "mean" in learned or not self._sealed or (calibrated is None and observed is None):
            return learned
        shift = torch.zeros(batch, dtype=torch.int64, device=g.device)
        if calibrated is not None:
            if flags is not None:  # the longest row has no padding
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
        """Scores float32 `[B, G, g, C]` of keys `[B, G, C, D]` for the positions from `least` on.

        As keys are rotated already, only the center is: to `t + δ`, mean over `δ`.
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
        """Return True if ids int64 `[B, G, C]` can be those retained of `[B]` valid tokens."""
        known = 0 if counts is None else counts[:, None]
        evicted = ids.shape[-1] == self.config.budget
        complete = evicted or bool(((ids >= 0).sum(-1).cpu() == known).all())
        return complete and bool(distinct(ids))

    # Hooks of the base

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        learned, first, stop = super()._learn(keys, valid), len(self), len(self) + keys.shape[2]
        if not self._sealed:
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
        return None if self._sealed else self._observed

    def _scanned(self) -> list[Tensor]:
        kept = [self._learned["ids"]] if "ids" in self._learned else []
        return [*super()._scanned(), *kept]

    def _cleared(self) -> None:
        super()._cleared()
        self._next = None


def paired(vectors: Tensor, rope: Tensor) -> Tensor:
    """Coordinates of vectors float32 `[…, D]` that rotate together, complex64 `[…, D / 2]`.

    Those that do not rotate are paired, too, and come last.
    """
    F = len(rope)
    a, b, rest = vectors[..., :F], vectors[..., F : 2 * F], vectors[..., 2 * F :]
    first, second = rest.chunk(2, dim=-1) if rest.shape[-1] else (rest, rest)
    return torch.complex(torch.cat([a, first], -1), torch.cat([b, second], -1))


def unpaired(pairs: Tensor, rope: Tensor) -> Tensor:
    """The inverse of `paired`."""
    F, (a, b) = len(rope), (pairs.real, pairs.imag)
    return torch.cat([a[..., :F], b[..., :F], a[..., F:], b[..., F:]], dim=-1)


def frequencies(pairs: int, rope: Tensor) -> Tensor:
    """Rotary frequencies of all pairs, float64 `[D / 2]`; 0 for those that do not rotate."""
    return pad(rope.double(), (0, pairs - len(rope)))

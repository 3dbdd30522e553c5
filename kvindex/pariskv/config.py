"""What ParisKV can be told: options, presets, and how many keys pass each stage.

Of the index itself: `kvindex.pariskv.index`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.ops import group
from kvindex.ops.coarse import TIERS, ceil_share

SCHEDULE = ((5_000, 0.50, 0.50), (10_000, 0.25, 0.30), (30_000, 0.20, 0.25))
"""`(below n tokens, β, ρ)`, as published; the paper says only that the schedule adapts to n."""

LONGEST = (0.10, 0.20)
"""`(β, ρ)` for all longer lengths, as published."""

COARSE = ("tiers", "dots", "none")

BLOCKS = ("subspace", "key")

WEIGHTS = ("bfloat16", "log")

MOST_TOKENS = 2**16
"""Of a block."""

CANDIDATES_PER = ("head", "group")

DRAW = ("none", "priority", "tempered")

SIGNS = ("alone", "together")

FAST = dict(beta=0.02, refine_factor=4, least_candidates=1, signs="alone", draw="none")
"""The best rows by their estimates: nothing is drawn (docs/decisions/0027-rows-are-drawn.md)."""

PAPER = FAST | dict(
    coarse="tiers",
    beta=None,
    refine_factor=1,
    query_max=127,
    block="subspace",
    weights="bfloat16",
    center=0,
    candidates_per="head",
)
"""Where the paper differs from the defaults (docs/decisions/0011, 0012, 0013, 0015)."""

PRESETS: dict[str, dict[str, object]] = {
    "drawn": {},
    "fast": FAST,
    "precise": FAST | {"magnitude_bits": 5},
    "accurate": FAST | {"block": "subspace", "weight_bits": 8},
    "scan": FAST | {"coarse": "none"},
    "paper": PAPER,
}
"""Preset -> where it differs from the defaults."""


@dataclass(frozen=True)
class ParisKVConfig:
    """What ParisKV can be told; the defaults are the preset "drawn".

    coarse: how keys become candidates: "tiers" (the paper's votes), "dots" (quantized inner
      products with the sign patterns, times the keys' weights) or "none" (all are reranked).
    beta: share of the keys that become candidates, in (0, 1]; None follows the schedule.
    refine_factor: candidates are at least `refine_factor · k`.
    least_candidates: and at least so many, however few the rows.
    single_stage_below: up to so many keys all are candidates: nothing is coarse.
    rho: tiers only: share of the keys that earn points in a subspace, in (0, 1]; None follows the
      schedule.
    query_max: dots only: largest coordinate of a rounded query, 1 to 127 (`ops.coarse.rounded`), at
      most 2^15 over the head dimension, for votes to fit 32 bits.
    signs: dots only: what votes make of a sign: "alone": the mean size of its coordinate;
      "together": signs tell of all coordinates, by a regression on the keys (`ops.regression`).
    magnitude_bits: per coordinate beside the sign, 0 to 7 (paper: 3).
    block: what shares a weight: a "subspace" (paper) or the whole "key".
    weights: how a weight is stored: "bfloat16" (paper), or "log": on a scale of equal ratios, so
      that dots can use it (of 16 bits the upper byte) in the coarse stage.
    weight_bits: of a log weight: 8 or 16.
    center: tokens of a block, which share a center, taken off their keys; 0 for none. What it adds
      to a query's scores is known.
    candidates_per: whose candidates are reranked: "head": each query head takes `C` keys by its own
      votes, and all heads of the group rerank the union; "group": the group takes `C` keys by the
      largest vote of its heads (each head's votes on its own scale).
    group: how query heads agree on the estimates (`kvindex.ops.group`).
    draw: "none": the best rows; "priority": candidates and rows are drawn in proportion to what
      votes and estimates make of their shares, and weighted by `1 / π` (`kvindex.ops.priority`);
      "tempered": by a lower power of it, `1 - 1 / √k`, which is biased and errs less
      (`ops.priority.temper`).
    seed: of the rotation's signs, and of what is drawn.
    """

    coarse: str = "dots"
    beta: float | None = 0.005
    refine_factor: int = 16
    least_candidates: int = 1024
    single_stage_below: int = 0
    rho: float | None = None
    query_max: int = 21
    signs: str = "together"
    magnitude_bits: int = 3
    block: str = "key"
    weights: str = "log"
    weight_bits: int = 16
    center: int = 256
    candidates_per: str = "group"
    group: str = "mean_share"
    draw: str = "tempered"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("beta", "rho"):
            if getattr(self, name) is not None:
                check.within(name, getattr(self, name), 0, 1)
        check.one_of("coarse", self.coarse, COARSE)
        check.one_of("block", self.block, BLOCKS)
        check.one_of("weights", self.weights, WEIGHTS)
        check.one_of("candidates_per", self.candidates_per, CANDIDATES_PER)
        check.one_of("group", self.group, group.POLICIES)
        self._check_draw()
        self._check_signs()
        for name in ("refine_factor", "least_candidates"):
            check.at_least(name, getattr(self, name), 1)
        check.at_least("single_stage_below", self.single_stage_below, 0)
        for name, low, high in (("query_max", 1, 127), ("magnitude_bits", 0, 7)):
            if check.at_least(name, getattr(self, name), low) > high:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed is {low} to {high}")
        if self.weight_bits not in (8, 16):
            raise ValueError(f"weight_bits: got {self.weight_bits!r}, allowed is 8 or 16")
        if check.at_least("center", self.center, 0) > MOST_TOKENS:
            raise ValueError(f"center: got {self.center}, allowed is 0 to {MOST_TOKENS}")
        if self.center and self.coarse != "none" and not self.weighs_votes:
            raise ValueError(
                f"center: got {self.center} with coarse={self.coarse!r}, weights={self.weights!r}, "
                "allowed is 0, or coarse='dots' with weights='log', or coarse='none'"
            )
        check.seed(self.seed)

    def _check_draw(self) -> None:
        if check.one_of("draw", self.draw, DRAW) == "none":
            return
        votes = dict(coarse="dots", weights="log", candidates_per="group")
        allowed: dict[str, tuple[str, ...]] = {name: (value,) for name, value in votes.items()}
        allowed["group"] = "mean_share", "max_share"
        for name, values in allowed.items():
            got = getattr(self, name)
            if got not in values:
                of = " or ".join(map(repr, values))
                raise ValueError(
                    f"{name}: got {got!r} with draw={self.draw!r}, allowed is {of}, or any with "
                    "preset='fast', which draws nothing"
                )

    def _check_signs(self) -> None:
        needs = dict(coarse="dots", block="key", weights="log")
        if check.one_of("signs", self.signs, SIGNS) == "alone":
            return
        for name, value in needs.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(
                    f"{name}: got {got!r} with signs={self.signs!r}, allowed is {value!r}, or any "
                    "with preset='fast', whose signs vote alone"
                )

    @property
    def weighs_votes(self) -> bool:
        """Whether votes are times the keys' weights."""
        return self.coarse == "dots" and self.weights == "log"

    def shares(self, n: int) -> tuple[float, float]:
        """`(β, ρ)` for `n` keys."""
        beta, rho = next(((b, r) for below, b, r in SCHEDULE if n < below), LONGEST)
        return beta if self.beta is None else self.beta, rho if self.rho is None else self.rho

    def candidates(self, n: int, k: int) -> int:
        """Candidates `C` of `n` keys for `k` rows."""
        if n <= self.single_stage_below:
            return n
        share, least = ceil_share(n, self.shares(n)[0]), int(self.refine_factor) * k
        return min(max(share, least, int(self.least_candidates)), n)

    def most_candidates(self, tokens: int, k: int) -> int:
        """The most candidates for `k` rows of up to so many keys."""
        falls = [below - 1 for below, _, _ in SCHEDULE if below <= tokens]
        return max(self.candidates(n, k) for n in (tokens, *falls))

    def tier_bounds(self, n: int) -> list[int]:
        """Keys that bound each tier of `n`."""
        return [ceil_share(n, self.shares(n)[1], tier) for tier in TIERS]

    def limits(self, counts: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Keys that bound each tier, int64 `[B, tiers]`, and candidates `C`, int64 `[B]`.

        Of rows of a batch with so many valid keys, int64 `[B]` on the CPU, as they are.
        """
        sizes: list[int] = counts.tolist()
        tiers = torch.tensor([self.tier_bounds(n) for n in sizes])
        return tiers, torch.tensor([self.candidates(n, k) for n in sizes])

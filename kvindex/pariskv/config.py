"""Options and presets of ParisKV, and the number of candidates that follows from the options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.ops import group
from kvindex.ops.coarse import TIERS, ceil_fraction

SCHEDULE = ((5_000, 0.50, 0.50), (10_000, 0.25, 0.30), (30_000, 0.20, 0.25))
"""Entries `(n, β, ρ)` for fewer than `n` tokens. A fraction `β` of the keys become candidates, and
a fraction `ρ` get a score above 0 in a subspace.

The numbers are those of the authors' code. The paper says only that the fractions adapt to the
number of tokens.
"""

LONGEST = (0.10, 0.20)
"""`(β, ρ)` for contexts longer than those in `SCHEDULE`, from the authors' code."""

NOMINAL = 128
"""If rows are sampled, a search takes half as many candidates for each row beyond this number."""

COARSE = ("tiered_votes", "sign_votes", "none")

BLOCKS = ("subspace", "key")

WEIGHTS = ("bfloat16", "log")

MOST_TOKENS = 2**16
"""Largest number of tokens in a block."""

CANDIDATES_PER = ("head", "group")

SAMPLING = ("none", "priority", "tempered")

SIGN_DECODERS = ("mean", "regression")

FAST = dict(beta=0.02, refine_factor=4, least_candidates=1, sign_decoder="mean", sampling="none")
"""Options of the preset "fast", which does not sample rows (docs/decisions/0027)."""

PAPER = FAST | dict(
    coarse="tiered_votes",
    beta=None,
    refine_factor=1,
    query_max=127,
    block="subspace",
    weights="bfloat16",
    center=0,
    candidates_per="head",
)
"""Options in which the paper differs from the defaults (docs/decisions/0011, 0012, 0013, 0015)."""

PRESETS: dict[str, dict[str, object]] = {
    "sampled": {},
    "fast": FAST,
    "precise": FAST | {"magnitude_bits": 5},
    "accurate": FAST | {"block": "subspace", "weight_bits": 8},
    "scan": FAST | {"coarse": "none"},
    "paper": PAPER,
}
"""Name of a preset -> options in which it differs from the defaults."""


@dataclass(frozen=True)
class ParisKVConfig:
    """Options of `ParisKV`. The defaults are the options of the preset "sampled".

    Args:
        coarse: How the coarse score (votes) of a key is computed. The keys with the highest coarse
            scores become candidates. "sign_votes": from the inner products of the query with sign
            patterns, times the weights of the keys. "tiered_votes": as in the ParisKV paper.
            "none": there is no coarse score, and all keys are candidates.
        beta: Fraction of the keys that become candidates, in (0, 1]. None: a fraction that depends
            on the number of tokens (`SCHEDULE`).
        refine_factor: Lower bound of the number of candidates, as a multiple of `k`. If rows are
            sampled, each row beyond the first 128 (`NOMINAL`) adds half of this multiple.
        least_candidates: Lower bound of the number of candidates.
        single_stage_below: All keys are candidates if the index has at most this many keys.
        rho: Fraction of the keys that get a score above 0 in a subspace, in (0, 1]. None: a
            fraction that depends on the number of tokens (`SCHEDULE`). Only for
            coarse="tiered_votes".
        query_max: Largest coordinate of a query after rounding to integers, 1 to 127
            (`kvindex.ops.coarse.rounded`). It must be at most 2^15 divided by the head dimension,
            so that votes fit in 32 bits. Only for coarse="sign_votes".
        sign_decoder: How votes estimate coordinates from signs. "mean": each sign represents the
            mean size of its coordinate. "regression": a linear regression that is fitted to the
            keys (`kvindex.pariskv.sign_regression`). Only for coarse="sign_votes".
        magnitude_bits: Bits per coordinate in addition to the sign, 0 to 7. The paper has 3.
        block: Which coordinates share one weight: those of a "subspace" (paper), or those of the
            whole "key".
        weights: How a weight is stored: "bfloat16" (paper), or "log" for an integer logarithm,
            which the coarse stage can use.
        weight_bits: Bits of a logarithmic weight, 8 or 16. Votes use the upper 8.
        center: Tokens of a block whose mean key is subtracted from its keys before they are
            encoded; 0 for none.
        candidates_per: "head": each query head chooses candidates by its own votes, and the rerank
            gets the candidates of all query heads that share a KV head. "group": the query heads
            that share a KV head choose candidates together, by the largest of their votes.
        group: How the estimates of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
        sampling: "none": the rows with the best estimates are returned. "priority": candidates and
            rows are sampled in proportion to their estimated attention weights. A row that is
            sampled with probability `π` gets the weight `1 / π` (`kvindex.ops.priority`).
            "tempered": rows are sampled in the same way, but get the weight
            `(1 / π)^(1 - 1 / sqrt(k))`, which has a bias and a smaller error.
        seed: Seed of the rotation's signs and of the samples.
    """

    coarse: str = "sign_votes"
    beta: float | None = 0.005
    refine_factor: int = 16
    least_candidates: int = 1024
    single_stage_below: int = 0
    rho: float | None = None
    query_max: int = 21
    sign_decoder: str = "regression"
    magnitude_bits: int = 3
    block: str = "key"
    weights: str = "log"
    weight_bits: int = 16
    center: int = 256
    candidates_per: str = "group"
    group: str = "mean_share"
    sampling: str = "tempered"
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
        self._check_sampling()
        self._check_sign_decoder()
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
                "allowed is center=0, or coarse='none', or coarse='sign_votes' with weights='log'"
            )
        check.seed(self.seed)

    def _check_sampling(self) -> None:
        if check.one_of("sampling", self.sampling, SAMPLING) == "none":
            return
        votes = dict(coarse="sign_votes", weights="log", candidates_per="group")
        allowed: dict[str, tuple[str, ...]] = {name: (value,) for name, value in votes.items()}
        allowed["group"] = "mean_share", "max_share"
        for name, values in allowed.items():
            got = getattr(self, name)
            if got not in values:
                allowed_values = " or ".join(map(repr, values))
                raise ValueError(
                    f"{name}: got {got!r} with sampling={self.sampling!r}, allowed is "
                    f"{allowed_values}; for other values pass preset='fast', which does not sample"
                )

    def _check_sign_decoder(self) -> None:
        needs = dict(coarse="sign_votes", block="key", weights="log")
        if check.one_of("sign_decoder", self.sign_decoder, SIGN_DECODERS) == "mean":
            return
        for name, value in needs.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(
                    f"{name}: got {got!r} with sign_decoder={self.sign_decoder!r}, allowed is "
                    f"{value!r}; for other values pass sign_decoder='mean' or preset='fast'"
                )

    @property
    def weighs_votes(self) -> bool:
        """True if a key's vote (coarse score) is multiplied by the weight stored with its codes."""
        return self.coarse == "sign_votes" and self.weights == "log"

    def fractions(self, n: int) -> tuple[float, float]:
        """Return `(β, ρ)` for an index of `n` keys.

        `β` is the fraction of the keys that become candidates, and `ρ` is the fraction that get a
        score above 0 in a subspace.
        """
        beta, rho = next(((b, r) for below, b, r in SCHEDULE if n < below), LONGEST)
        return beta if self.beta is None else self.beta, rho if self.rho is None else self.rho

    def candidates(self, n: int, k: int) -> int:
        """Return the number of candidates in an index of `n` keys if a search selects `k` rows."""
        if n <= self.single_stage_below:
            return n
        fraction, least = ceil_fraction(n, self.fractions(n)[0]), int(self.refine_factor) * k
        if self.sampling != "none":
            least = max(k, (least + int(self.refine_factor) * min(k, NOMINAL)) // 2)
        return min(max(fraction, least, int(self.least_candidates)), n)

    def most_candidates(self, tokens: int, k: int) -> int:
        """Return the largest number of candidates that any index of up to `tokens` keys has."""
        falls = [below - 1 for below, _, _ in SCHEDULE if below <= tokens]
        return max(self.candidates(n, k) for n in (tokens, *falls))

    def tier_bounds(self, n: int) -> list[int]:
        """Return the numbers of keys that separate the tiers of `coarse="tiered_votes"`.

        In each subspace, a search ranks the keys by the inner product of their centroid and the
        query, and divides them into tiers by their rank. Keys in better tiers get higher scores.

        Args:
            n: Number of keys in the index.

        Returns:
            Number of keys in the best tier, in the best two tiers, in the best three, and so on.
        """
        return [ceil_fraction(n, self.fractions(n)[1], tier) for tier in TIERS]

    def limits(self, counts: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compute the bounds of the tiers (`tier_bounds`) and the number of candidates.

        Sequences of a batch may have different numbers of valid keys, so the results contain one
        entry for each sequence.

        Args:
            counts: Valid keys of each sequence, int64 `[B]`, on the CPU.
            k: Rows that the search selects.

        Returns:
            Bounds of the tiers, int64 `[B, tiers]`, and numbers of candidates, int64 `[B]`, both on
            the CPU.
        """
        sizes: list[int] = counts.tolist()
        bounds = torch.tensor([self.tier_bounds(n) for n in sizes])
        return bounds, torch.tensor([self.candidates(n, k) for n in sizes])

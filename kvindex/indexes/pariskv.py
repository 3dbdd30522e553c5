"""ParisKV: a coarse stage on analytic centroids, then reranking with codes of a few bits.

Qi et al., ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (ICML 2026).
`preset="paper"` is the paper's; the defaults go past it (docs/indexes/pariskv.md). One file, as
every index: what it can be told, encoding, search, and what tiers keep count of, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import backend, check
from kvindex.core.protocol import (
    UNUSED,
    AppendsAsync,
    Attended,
    Attends,
    Codes,
    Contents,
    DecodesStep,
    EncodesBlocks,
    Executor,
    Hits,
    Rows,
)
from kvindex.core.resident import ResidentRows
from kvindex.ops import group, priority, regression
from kvindex.ops.attention import cap
from kvindex.ops.block_layout import BLOCK
from kvindex.ops.coarse import TIERS, ceil_share
from kvindex.ops.codes import FACTOR, SUBSPACE
from kvindex.ops.coverage import SAMPLE, log_total, log_weights, sample, within
from kvindex.storage.columns import BlockColumns

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
      "tempered": by a lower power of it, `1 - 1 / √k` (`ops.priority.temper`).
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
        weighted = self.coarse == "dots" and self.weights == "log"
        if self.center and self.coarse != "none" and not weighted:
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


@dataclass(frozen=True)
class _Asked:
    """Queries of a search `[B, G, g, D]`: rotated, whole, and those that vote, which signs may have
    told (`_regressed`), as directions and whole; codes, of full blocks and of the open one; and
    inner products with the centers, `[B, G, g, S]`, or None.
    """

    voting_directions: Tensor
    rotated_queries: Tensor
    voting_queries: Tensor
    codes: list[Codes]
    offsets: Tensor | None

    @staticmethod
    def of(index: ParisKV, queries: Tensor) -> _Asked:
        folded = group.fold(queries, index.geometry.kv_heads, index.config.group)
        directions, norms = index.ops.transform.normalize(folded)
        rotated = index.ops.transform.rotate(directions, index._rotation)
        codes, offsets = index._parts(), None
        if index.config.center:
            centers = torch.cat([part["centers"] for part in codes], dim=2)
            offsets = folded @ centers.float().mT
        matrix, norms = index._regressed(), norms[..., None]
        voting = rotated if matrix is None else regression.voting(rotated, matrix)
        return _Asked(voting, rotated * norms, voting * norms, codes, offsets)

    def codes_of(
        self, name: str, ids: Tensor, gather: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """A column's entries of rows int64 `[B, G, C]`."""
        first, *rest = (part[name] for part in self.codes)
        if not rest:
            return gather(first, ids)
        (opened,), full = rest, first.shape[2]
        known = gather(first, ids.masked_fill(ids >= full, UNUSED))
        return known + gather(opened, (ids - full).clamp_min(UNUSED))  # zeros for unused


_Statistics = tuple[Tensor, tuple[int, Tensor] | None]


class ParisKV(BaseIndex):
    """A few bits per coordinate and a scale; nothing to train, nothing that drift makes wrong.

    Codes are a function of their block: a full block is encoded once, the last one, while it is
    open, from the keys it has (docs/decisions/0024-codes-of-a-block.md).
    Hits' scores: what `group.agree` returns for the estimates of `q·k`.
    """

    Config = ParisKVConfig
    presets: ClassVar = {
        "drawn": {},
        "fast": FAST,
        "precise": FAST | {"magnitude_bits": 5},
        "accurate": FAST | {"block": "subspace", "weight_bits": 8},
        "scan": FAST | {"coarse": "none"},
        "paper": PAPER,
    }
    statistics = ("_histogram",)

    _histogram: Tensor  # keys per centroid, int64 [B, G, M, 256], which tiers need

    _open: Codes | None  # of the open block, `[B, G, n, ...]`, once they were asked for
    _weight_scale: Tensor | None  # since the last change
    _fitted: tuple[int, Tensor] | None = None  # of `_regressed`: to how many tokens
    _usual: object = None  # what `_checked_step` saw last

    _executor: Executor | None = None  # made once the base is
    _attends = False  # as the executor says since the last change

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, ops, config = self.geometry, self.ops, self.config
        self._block = SUBSPACE if config.block == "subspace" else g.head_dim
        self._rotation = ops.transform.rotation(g.head_dim, config.seed, g.device)
        self._levels = ops.codes.levels(self._block, config.magnitude_bits, g.device)
        self._level = ops.codes.lloyd_max(self._block, 0)[0]
        if config.weights == "log":
            self._factors = ops.codes.log_factors(config.weight_bits, g.device)
        constants = {"rotation": self._rotation, "levels": self._levels}
        self._executor = executor = backend.accelerate(self.backend, g, config, constants)
        self.block_tokens = config.center or (BLOCK if config.weights == "log" else 1)
        self._codes = executor.codes if executor else BlockColumns(self.block_tokens)
        self._update()

    # Encoding: `_codes` has the full blocks, `_learned` the keys of the open one

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """As `BaseIndex._prepared`: the codes of the blocks that these keys fill."""
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        executor, held = self._executor, len(self._codes)
        looks = executor is not None and executor.encodes and held == len(self)
        keys, valid = self._since(held, known, valid)
        full = keys.shape[2] // self.block_tokens * self.block_tokens
        last = keys[:, :, full:]
        self._check_finite("keys", last if looks else known)
        filled = keys[:, :, :full], None if valid is None else valid[:, :full]
        if executor is None or not executor.encodes:
            codes = self._encoded(*filled) if full else {}
        else:
            wrong = self._wrong(looks)
            codes = executor.prepare(*filled, beyond=last.shape[2], wrong=wrong)
            if wrong is not None and not self._defers and bool(wrong):
                executor.discard()
                self._check_finite("keys", known)  # which says what is wrong
        if self.block_tokens == 1 or (not last.numel() and held == len(self) > 0):
            return self._learned, codes  # nothing was open, nothing is
        return {"open_keys": last.clone()}, codes

    def _since(
        self, start: int, keys: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Keys from id `start` on, the first of the open block, and which are valid, once these
        are appended.
        """
        if start == len(self):
            return keys, valid
        if valid is not None or self.valid is not None:
            ones = torch.ones((len(keys), keys.shape[2]), dtype=torch.bool, device=keys.device)
            held = ones[:, :1].expand(-1, len(self) - start)
            held = held if self.valid is None else self.valid[:, start:]
            valid = torch.cat([held, ones if valid is None else valid], dim=1)
        return torch.cat([self._learned["open_keys"], keys], dim=2), valid

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        start = len(self._codes)
        codes = self._encoded(*self._since(start, keys, None))
        new = len(self) - start
        return {
            name: codes[name] if name == "centers" else codes[name][:, :, new:] for name in codes
        }

    def _encoded(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Codes of keys `[B, G, N, D]`, the first of which begins a block."""
        compiled = self._executor.encoded(keys, valid) if self._executor else None
        return self._coded(keys, valid) if compiled is None else compiled

    def _coded(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """As `_encoded`, op by op."""
        ops, config, codes = self.ops, self.config, {}
        floats = keys.float()
        if config.center:
            codes["centers"] = ops.codes.centers(keys, valid, config.center)
            spread = codes["centers"].repeat_interleave(config.center, dim=2)
            floats = floats - spread[:, :, : keys.shape[2]].float()
        directions, norms = ops.transform.normalize(floats)
        rotated = ops.transform.rotate(directions, self._rotation)
        codes = ops.codes.encode(rotated, norms, self._levels, block=self._block) | codes
        if config.weights == "bfloat16":
            return {**codes, "weights": codes["weights"].bfloat16()}
        logs = ops.codes.log_codes(codes["weights"], config.weight_bits)
        if valid is not None:
            logs = logs.masked_fill(~valid[:, None, :, None], 0)
        if config.weight_bits == 8:
            return {**codes, "weights": logs.to(torch.uint8)}
        lower = (logs & 255).to(torch.uint8)
        return {**codes, "weights": (logs >> 8).to(torch.uint8), "fractions": lower}

    def _learned_before(self, length: int) -> Codes:
        """The keys of the block that is open then: of one that was full, as the store has them."""
        start, held = length // self.block_tokens * self.block_tokens, len(self._codes)
        if not self._learned or start == held:
            keys = self._learned.get("open_keys")
            return {} if keys is None else {"open_keys": keys[:, :, : length - start]}
        ids = torch.arange(start, length, device=self.geometry.device)
        ids = ids.expand(len(self.counts), self.geometry.kv_heads, -1)
        keys = self._store.gather(ids).keys
        if self.valid is not None:
            keys = keys.masked_fill(~self.valid[:, None, start:length, None], 0)
        return {"open_keys": keys}

    def _wrong(self, looks: bool) -> Tensor | None:
        """A flag that kernels set to 1 for a valid key that is not finite, if they are to look."""
        if self._check is False or not looks:
            return None
        if self._defers:
            return self._flag("keys", check.ALLOWED_NUMBER)
        return torch.zeros((), dtype=torch.int32, device=self.geometry.device)

    def _parts(self) -> list[Codes]:
        """Codes of the full blocks and of the open one, where there are."""
        full = {name: self._codes[name] for name in self._codes} if len(self._codes) else {}
        return [part for part in (full, self._opened()) if part]

    def _opened(self) -> Codes:
        """Codes of the open block, if there is one; made when they are asked for."""
        start = len(self._codes)
        if self._open is None and start < len(self):
            valid = None if self.valid is None else self.valid[:, start:]
            self._open = self._encoded(self._learned["open_keys"], valid)
        return self._open or {}

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        if self._executor:
            return self._executor.search(queries, k)
        if self.weighted:
            return self._drawn(_Asked.of(self, queries), k)
        return self._ranked(_Asked.of(self, queries), k)[0]

    def _alone(self, name: str) -> bool:
        return self._executor is not None or super()._alone(name)  # searches share buffers

    def _offers(self, wanted: type) -> bool:
        if wanted is DecodesStep or wanted is Attends:
            return self.attends
        if wanted is EncodesBlocks:
            return self.block_tokens > 1
        return self.supports_async_append if wanted is AppendsAsync else super()._offers(wanted)

    @property
    def supports_async_append(self) -> bool:
        """Whether kernels write codes where they lie, and nothing waits for them."""
        return self._executor is not None and self._executor.appends_async

    @property
    def attends(self) -> bool:
        """Whether kernels search, fetch and attend in one go."""
        return self._attends

    def _paths(self) -> list[str]:
        if self._executor:
            return [*super()._paths(), self._executor.explain()]
        why = backend.refusal(self.backend, self.geometry, self.config)
        return [*super()._paths(), f"executor: none, op by op ({why})"]

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """As `protocol.Attends.attend`, for an index that holds a token."""
        executor, wrong = self._checked_step(queries, k)
        return executor.attend(queries.detach(), resident, k, wrong)

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        *,
        k: int,
        graphs: bool = True,
    ) -> Attended:
        """As `protocol.DecodesStep.decode_step`, for an index that holds a token."""
        executor, wrong = self._checked_step(queries, k)
        some = queries.detach(), token, resident, window
        return executor.decode_step(*some, k, wrong, graphs)

    def _checked_step(self, queries: Tensor, k: int) -> tuple[Executor, Tensor | None]:
        """The executor, and a flag that its kernels set to 1 for a query that is not finite.

        None where they are not to look. Raises as `attend`.
        """
        executor, usual = self._attending(), (check.kind(queries), self._batch)
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        if usual != self._usual:
            g = self.geometry
            shape = {"B": self._batch, "H": g.q_heads, "D": g.head_dim}
            self._check_tensor("queries", queries, shape)
            self._usual = usual
        if self._defers and self._check is not False:
            # kernels see the queries anyway
            return executor, self._flag("queries", check.ALLOWED_NUMBER)
        self._check_finite("queries", queries)
        return executor, None

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As `protocol.Attends.attend_hits`, for an index that holds a token."""
        executor = self._attending()
        check.at_least("len(index)", len(self), 1)
        g = self.geometry
        self._check_tensor("queries", queries, {"B": self._batch, "H": g.q_heads, "D": g.head_dim})
        hits = replace(hits, ids=self._checked_ids(hits, 0, executor.length))
        if hits.log_weight is not None:
            shape = {"B": self._batch, "H": g.q_heads, "K": hits.ids.shape[-1]}
            check.tensor("hits.log_weight", hits.log_weight, shape, torch.float32, g.device)
        return executor.attend_hits(queries.detach(), hits, resident)

    def _attending(self) -> Executor:
        executor = self._executor
        if executor is None or not self._attends:
            raise ValueError(
                f"attend: got an index with backend={self.backend!r} whose rows or options no "
                "kernel attends to, allowed is one that `attends`; search and fetch serve any"
            )
        return executor

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Have all that searches for `k` rows need until the index holds `tokens` tokens.

        Only fused kernels need something (buffers for candidates), and make it at the first
        search where nobody has. Before a search is captured in a CUDA graph, call this: the graph
        keeps the buffers that there were (docs/cuda.md). Raises ValueError for sizes out of
        range, or for an empty index.
        """
        check.at_least("k", k, 1)
        check.at_least("tokens", tokens, 1)
        check.at_least("len(index)", len(self), 1)
        if not self._executor:
            return
        self._executor.warm_up(k, tokens)
        g, batch = self.geometry, len(self.counts)
        queries = torch.zeros((batch, g.q_heads, g.head_dim), dtype=g.dtype, device=g.device)
        self.search(queries, k=k)  # kernels are compiled when they run first
        if self.attends:
            self.attend(queries, ResidentRows(g, batch, 1), k=k)

    def reserve(self, tokens: int) -> None:
        """Take now the memory that codes and rows need until the index holds `tokens` tokens.

        Memory for rows on the host is pinned, which takes a driver so long that steps meanwhile
        wait for it: whoever knows how long an answer may be has it done before the first token.
        Only kernels with blocks of their own have this to do, and not for an empty index.
        Raises ValueError for a number out of range or more than there can be, MemoryError beyond
        the store's budget; what is held stays as it was.
        """
        check.at_least("tokens", tokens, 1)
        if self._executor and len(self):
            self._store.reserve_tokens(tokens)  # which may be refused
            self._executor.reserve(tokens)

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        asked, g = _Asked.of(self, queries), self.geometry
        hits, ids, slots = self._ranked(asked, k)
        # what the candidates leave out is judged by a sample of it
        left = torch.ones((*ids.shape[:2], len(self) + 1), dtype=torch.bool, device=g.device)
        left = left.scatter_(-1, torch.where(ids < 0, len(self), ids), False)[..., :-1]
        if self.valid is not None:
            left = left & self.valid[:, None]
        rest = self.ops.select.compact(sample(left, SAMPLE))
        known, others = (
            log_weights(
                self._estimates(asked, some),
                self._errors(asked, some),
                scale=g.scale,
                softcap=g.softcap,
            )
            for some in (ids, rest)
        )
        total = log_total(known, others, left.sum(-1))
        return within(hits, slots, known, total, coverage)

    @property
    def weighted(self) -> bool:  # type: ignore[override]  # as it was made
        """Whether rows stand for others, too."""
        drawn: bool = self.config.draw != "none"
        return drawn

    def _drawn(self, asked: _Asked, k: int) -> Hits:
        """Rows drawn among candidates that are drawn by votes, all by the same noise."""
        g, noises = self.geometry, priority.noise(self._places(), self._draw_seeds(asked))
        ids, chances = self._drawn_candidates(asked, noises, k)
        logits, weighted = self._logits(asked, ids, chances)
        sizes = priority.root_mean_square(logits - weighted.logsumexp(-1, keepdim=True))
        sizes = sizes.masked_fill(ids < 0, -math.inf)  # a row of the batch may have no candidate
        noises = noises.expand(*ids.shape[:2], -1).gather(-1, ids.clamp_min(0)) * priority.NATS
        scores, at, last = priority.draw(sizes, noises, k)
        unused, at = at < 0, at.clamp_min(0)
        log_weight = -torch.minimum(last, chances.gather(-1, at))
        if self.config.draw == "tempered":
            log_weight = log_weight * priority.temper(k)
        log_weight = log_weight.masked_fill(unused, -math.inf)
        found = ids.gather(-1, at).masked_fill(unused, UNUSED)
        return Hits(found, scores, log_weight.repeat_interleave(g.group_size, dim=1))

    def _logits(self, asked: _Asked, ids: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Of candidates, float32 `[B, G, g, C]`: as they are estimated, and each for those like
        it.
        """
        g = self.geometry
        logits = cap(self._estimates(asked, ids), g.scale, g.softcap)
        logits = logits.masked_fill((ids < 0)[:, :, None], -math.inf)
        return logits, logits - chances.masked_fill(ids < 0, 0)[:, :, None]

    def candidate_share(self, queries: Tensor, *, k: int) -> Tensor:
        """What of the index's attention the candidates of a search hold, float32 `[B, H]`.

        As their draw estimates it; the rest is what rows stand for and nobody looks at. Op by op,
        for diagnosis. queries: `[B, H, D]`. Raises as `search`, and ValueError where candidates
        are not drawn, or of an empty index.
        """
        if not self.weighted:
            raise ValueError(f"draw: got {self.config.draw!r}, allowed is 'priority' or 'tempered'")
        check.at_least("len(index)", len(self), 1)
        self.search(queries, k=k)  # which checks both
        asked = _Asked.of(self, queries.detach())
        noises = priority.noise(self._places(), self._draw_seeds(asked))
        candidates = self._drawn_candidates(asked, noises, min(k, self._rows_at_most()))
        every = self._logits(asked, *candidates)
        held, whole = (logits.logsumexp(-1) for logits in every)
        return (held - whole).exp().flatten(1)

    def _drawn_candidates(self, asked: _Asked, noises: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids, ascending `[B, G, C]`, then -1, and `log π` of each, float32."""
        votes = self._votes(asked)
        gains = priority.gains(self._vote_units(asked), self.geometry.scale)
        if self.valid is not None:
            votes = votes.masked_fill(~self.valid[:, None, None], priority.LEAST)
        totals = torch.zeros_like(gains)
        if (centers := asked.offsets) is not None:
            some = priority.sampled(centers.shape[-1]).to(centers.device)
            totals = priority.totals(centers[..., some], self.geometry.scale)
        sizes = priority.sizes(votes, gains, totals)
        priorities = (sizes + noises).masked_fill(votes[:, :, 0] == priority.LEAST, priority.LEAST)
        thresholds = priority.thresholds(priorities, self._limits(k)[1])
        ids: Tensor = self.ops.select.compact(priorities >= thresholds[..., 1:])
        own = sizes.gather(-1, ids.clamp_min(0))
        return ids, priority.log_chances(own, thresholds[..., :1])

    def _places(self) -> Tensor:
        """Positions from the first valid token on, int64 `[B or 1, 1, N]`: no padding counts."""
        places = torch.arange(len(self), device=self.geometry.device)[None, None]
        if self.valid is None:
            return places
        return places - self.valid.int().argmax(-1)[:, None, None]

    def _draw_seeds(self, asked: _Asked) -> Tensor:
        """Seeds of `priority.noise`, int64 `[B, G, 1]`."""
        first = (self._places() == 0).int().argmax(-1)[..., None]
        first = first.expand(len(self.counts), self.geometry.kv_heads, 1)
        own = asked.codes_of("signs", first, self.ops.fetch.gather_rows)[:, :, 0]
        return priority.seeds(own, self.counts.to(own.device), self.config.seed)

    def _vote_units(self, asked: _Asked) -> Tensor:
        """`q·k` that a vote stands for, float64 `[B, G, g]`."""
        peak = asked.voting_queries.abs().amax(-1).double()
        scale = self._scale_of(asked.codes)[..., None].double()
        units: Tensor = peak * scale * (self._level / (self._query_max * FACTOR))
        return units

    def _ranked(self, asked: _Asked, k: int) -> tuple[Hits, Tensor, Tensor]:
        """Hits, the candidates' ids `[B, G, C]`, and where the hits are in them `[B, G, k]`."""
        g, policy = self.geometry, self.config.group
        ids = self._candidates(asked, k)
        estimates = self._estimates(asked, ids)
        agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        scores, slots = self.ops.select.top_k(agreed, k)  # ids ascend: equal scores stay in order
        found = ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED)
        return Hits(found, scores), ids, slots

    def _estimates(self, asked: _Asked, ids: Tensor) -> Tensor:
        """Of `q·k`, for rows int64 `[B, G, C]`: float32 `[B, G, g, C]`, `-inf` for an id of -1."""
        found: Tensor = self.ops.rerank.estimate(
            asked.rotated_queries, *self._codes_of(asked, ids), self._levels
        )
        if asked.offsets is not None:
            blocks = (ids.clamp_min(0) // self.config.center)[:, :, None]
            found = found + asked.offsets.gather(-1, blocks.expand_as(found))
        return found.masked_fill((ids < 0)[:, :, None], float("-inf"))

    def _errors(self, asked: _Asked, ids: Tensor) -> Tensor:
        """Standard deviations of `_estimates`."""
        tangent = self.ops.codes.tangent(self._block, self.config.magnitude_bits)
        codes = self._codes_of(asked, ids)
        found: Tensor = self.ops.rerank.errors(asked.rotated_queries, *codes, self._levels, tangent)
        return found

    def _codes_of(self, asked: _Asked, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Signs, magnitudes and weights of rows int64 `[B, G, C]`."""
        ops = self.ops
        names = [name for name in asked.codes[0] if name != "centers"]
        codes = {name: asked.codes_of(name, ids, ops.fetch.gather_rows) for name in names}
        weights = codes["weights"]
        if self.config.weights == "log":
            weights = weights.int()
            if "fractions" in codes:
                weights = weights << 8 | codes["fractions"].int()
            weights = ops.codes.log_weights(weights, self.config.weight_bits)
        return codes["signs"], codes["magnitudes"], weights

    def _candidates(self, asked: _Asked, k: int) -> Tensor:
        """Ids that are reranked: ascending `[B, G, C]`, then -1."""
        ops, config = self.ops, self.config
        tiers, limits = self._limits(k)
        if config.coarse == "none" or int(self.counts.max()) <= config.single_stage_below:
            shape = (len(self.counts), len(self))
            flags = torch.ones(shape, dtype=torch.bool, device=self.geometry.device)
            flags = flags if self.valid is None else self.valid
            ids: Tensor = ops.select.compact(flags[:, None].expand(-1, self.geometry.kv_heads, -1))
            return ids
        votes = self._votes(asked, tiers)
        if config.candidates_per == "group":
            votes = votes.amax(2, keepdim=True)
        ids = ops.select.candidates(votes, limits, self.valid)
        return ids

    @property
    def _query_max(self) -> int:
        """Largest coordinate of a rounded query."""
        most: int = min(self.config.query_max, 2**15 // self.geometry.head_dim)
        return most

    def _votes(self, asked: _Asked, tiers: Tensor | None = None) -> Tensor:
        """Votes of all keys int32 `[B, G, g, N]`. tiers: of `_limits`, which tiers need."""
        ops, config = self.ops, self.config
        if config.coarse == "tiers":
            table = ops.coarse.tier_table(asked.voting_directions, self._histogram, tiers)
        else:
            table = ops.coarse.dot_table(asked.voting_directions, self._query_max)
        factors = offsets = [None] * len(asked.codes)
        if config.coarse == "dots" and config.weights == "log":
            scale = self._scale_of(asked.codes)
            factors = [
                ops.codes.factors(part["weights"], scale, self._factors) for part in asked.codes
            ]
            if asked.offsets is not None:
                rounding = self._query_max, scale, self._level
                counts = [part["centers"].shape[2] for part in asked.codes]
                offsets = ops.coarse.dot_offsets(asked.offsets, asked.voting_queries, *rounding)
                offsets = offsets.split(counts, dim=-1)
        every = zip(asked.codes, factors, offsets, strict=True)
        return torch.cat(
            [ops.coarse.votes(part["signs"], table, *own, config.center) for part, *own in every],
            dim=-1,
        )

    def _scale_of(self, parts: list[Codes]) -> Tensor:
        """The weight scale of all keys, float32 `[B, G]`."""
        if self._weight_scale is None:
            largest = torch.stack([part["weights"].flatten(2).amax(2) for part in parts]).amax(0)
            self._weight_scale = self.ops.codes.weight_scale(largest)
        return self._weight_scale

    def _scanned(self) -> list[Tensor]:
        names: list[str] = []
        if self.config.coarse != "none" and len(self) > self.config.single_stage_below:
            weighted = self.config.coarse == "dots" and self.config.weights == "log"
            names = ["signs", "weights"] if weighted else ["signs"]
            names += ["centers"] if self.config.center else []
        return [part[name] for part in self._parts() for name in names or part]

    def _limits(self, k: int) -> tuple[Tensor, Tensor]:
        """Keys that bound each tier, int64 `[B, tiers]`, and candidates `C`, int64 `[B]`."""
        counts: list[int] = self.counts.tolist()
        tiers = torch.tensor([self.config.tier_bounds(n) for n in counts])
        candidates = torch.tensor([self.config.candidates(n, k) for n in counts])
        return tiers.to(self.geometry.device), candidates

    def _cleared(self) -> None:
        self._histogram, self._fitted = torch.empty(0), None
        self._update()

    def _after_rollback(self) -> None:
        self._update()

    def _after_copy(self) -> None:
        super()._after_copy()
        self._update()

    def _update(self) -> None:
        """What follows from the tokens is made anew, and the executor is told of them."""
        executor, self._weight_scale, self._open = self._executor, None, None
        if executor:
            statistics = {"histogram": self._histogram} if self.config.coarse == "tiers" else {}
            if (matrix := self._regressed()) is not None:
                statistics["regression"] = matrix
            contents = Contents(
                codes=self._codes,
                rows=self._store,
                length=len(self),
                counts=self.counts,
                valid=self.valid,
                real_from=self._valid.all_from,
                opened=self._learned if executor.encodes else self._opened(),
                statistics=statistics,
            )
            self._executor = executor.update(contents)
            self._attends = self._executor.attends

    def _regressed(self) -> Tensor | None:
        """`regression.fit` to the keys of full blocks, or None where signs stand alone.

        To the first of them, up to a power of two, so that it does not matter how they came.
        """
        if self.config.signs == "alone" or not len(self):
            return None
        blocks = len(self._codes) // self.block_tokens
        tokens = (1 << blocks.bit_length() >> 1) * self.block_tokens
        if self._fitted is None or self._fitted[0] != tokens:
            self._fitted = tokens, self._fit(tokens)
        return self._fitted[1]

    def _fit(self, tokens: int) -> Tensor:
        """`_regressed` of so many tokens."""
        if not tokens:
            return regression.identity(len(self.counts), self.geometry)
        names, every = ("signs", "magnitudes", "weights"), regression.stride(tokens)
        signs, magnitudes, weights = (self._codes.every(name, tokens, every) for name in names)
        real = weights[..., 0] > 0
        return regression.fit(signs, magnitudes, real, self._levels, self._level)

    # Statistics: keys per centroid, int64 [B, G, M, 256], which tiers need, and what was fitted

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> _Statistics:
        if self.config.coarse != "tiers":
            return self._histogram, self._fitted
        added: Tensor = self.ops.coarse.histogram(codes["signs"], valid)
        return self._histogram + added if self._histogram.numel() else added, None

    def _with_truncated(self, length: int) -> _Statistics:
        if self.config.coarse != "tiers":
            stays = self._fitted is not None and self._fitted[0] <= length
            return self._histogram, self._fitted if stays else None
        valid = None if self.valid is None else self.valid[:, length:]
        gone: Tensor = self.ops.coarse.histogram(self._codes["signs"][:, :, length:], valid)
        return self._histogram - gone, None

    def _with_reordered(self, batch_indices: Tensor) -> _Statistics:
        fitted = self._fitted
        if fitted is not None:
            fitted = fitted[0], fitted[1].index_select(0, batch_indices)
        if self.config.coarse != "tiers":
            return self._histogram, fitted
        return self._histogram.index_select(0, batch_indices), None

    def _commit(self, statistics: _Statistics) -> None:
        self._histogram, self._fitted = statistics
        self._update()

    def _held(self) -> list[Tensor]:
        held = [self._histogram, self._rotation, self._levels]
        held += [self._factors] if self.config.weights == "log" else []
        if self.config.signs == "together" and len(self):  # fitted or not yet: as many bytes
            shape = len(self.counts), self.geometry.kv_heads, *2 * [self.geometry.head_dim]
            held.append(torch.empty(shape, dtype=torch.float16, device="meta"))
        return held

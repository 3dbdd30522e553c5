"""ParisKV: a coarse stage on analytic centroids, then reranking with codes of a few bits.

Qi et al., ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (ICML 2026).
`preset="paper"` is the paper's; the defaults go past it (docs/indexes/pariskv.md). The stages are
functions of `kvindex.pariskv`; here is what an index holds: codes, keys of the block that is open,
statistics, an executor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.executed import ExecutedIndex
from kvindex.core import backend, check
from kvindex.core.protocol import Codes, Contents, Hits
from kvindex.ops.codes import SUBSPACE
from kvindex.pariskv import sampling, select_rows, sign_regression
from kvindex.pariskv.config import PRESETS, ParisKVConfig
from kvindex.pariskv.encoding import Encoding
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex.storage.columns import BlockColumns
from kvindex.storage.layout import Held, Layout, TensorSpec

_Fit = Callable[[], Tensor]
_Statistics = tuple[Tensor, tuple[int, _Fit] | None]


class ParisKV(ExecutedIndex):
    """A few bits per coordinate and a scale; nothing to train, nothing that drift makes wrong.

    Codes are a function of their block: a full block is encoded once, the last one, while it is
    open, from the keys it has (docs/decisions/0024).
    Hits' scores: what `group.agree` returns for the estimates of `q·k`.
    """

    Config = ParisKVConfig
    presets: ClassVar = PRESETS
    statistics = ("_histogram",)

    _histogram: Tensor  # keys per centroid, int64 [B, G, M, 256], which tiers need

    _open: Codes | None  # of the open block, `[B, G, n, ...]`, once they were asked for
    _weight_scale: Tensor | None  # since the last change
    _fitted: tuple[int, _Fit] | None = None  # to how many tokens; made when it is asked for

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, config = self.geometry, self.config
        self.encoding = own = Encoding.of(config, g, self.ops)
        constants = {"rotation": own.rotation, "levels": own.levels}
        self._executor = executor = backend.accelerate(self.backend, g, config, constants)
        self.block_tokens = own.block_tokens
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
        return self.encoding.encode(keys, valid) if compiled is None else compiled

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

    def _layout(self, held: Held) -> Layout:
        g, config, tokens = self.geometry, self.config, self.block_tokens
        opened = held.length % tokens
        full, M = held.length - opened, g.head_dim // SUBSPACE
        width = g.head_dim // self.encoding.block
        byte = config.weights == "log"
        codes = {
            "signs": TensorSpec(f"B G {full} {M}", torch.uint8),
            "magnitudes": TensorSpec(f"B G {full} {config.magnitude_bits} {M}", torch.uint8),
            "weights": TensorSpec(
                f"B G {full} {width}", torch.uint8 if byte else torch.bfloat16, least=0
            ),
        }
        if byte and config.weight_bits > 8:
            codes["fractions"] = TensorSpec(f"B G {full} {width}", torch.uint8)
        if config.center:
            codes["centers"] = TensorSpec(f"B G {full // config.center} D", torch.bfloat16)
        layout = {f"codes.{name}": spec for name, spec in codes.items()}
        if not full and not held.has("codes"):
            layout = {}
        if tokens > 1 and (opened or held.has("learned")):
            layout["learned.open_keys"] = TensorSpec(f"B G {opened} D", g.dtype)
        empty = TensorSpec("0", torch.float32)
        layout["statistics.histogram"] = empty
        if config.coarse == "tiered_votes" and (held.length or held.has("batch")):
            layout["statistics.histogram"] = TensorSpec(
                f"B G {M} 256",
                torch.int64,
                least=0,
                allowed="the number of valid tokens in each sum",
                rule=lambda state: (
                    held.counts is not None
                    and (
                        state["statistics.histogram"].sum(-1).cpu() == held.counts[:, None, None]
                    ).all()
                ),
            )
        return layout

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        if self._executor:
            return self._executor.search(queries, k)
        if self.weighted:
            return sampling.search(*self.inputs(queries), k)
        return select_rows.search(*self.inputs(queries), k)

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        return select_rows.search_coverage(*self.inputs(queries), k, coverage)

    def inputs(self, queries: Tensor) -> tuple[Tokens, Queries]:
        """What a search op by op reads for queries `[B, H, D]`, of an index that holds a token."""
        parts = self._parts()
        tokens = Tokens(
            geometry=self.geometry,
            config=self.config,
            encoding=self.encoding,
            parts=parts,
            counts=self.counts,
            valid=self.valid,
            length=len(self),
            weight_scale=self._scale(parts),
            histogram=self._histogram,
            regression=self._regressed(),
        )
        return tokens, Queries.of(queries, tokens)

    @property
    def weighted(self) -> bool:  # type: ignore[override]  # as it was made
        """Whether rows stand for others, too."""
        is_sampled: bool = self.config.sampling != "none"
        return is_sampled

    def candidate_coverage(self, queries: Tensor, *, k: int) -> Tensor:
        """What of the index's attention the candidates of a search hold, float32 `[B, H]`.

        As their draw estimates it; the rest is what rows stand for and nobody looks at. Op by op,
        for diagnosis. queries: `[B, H, D]`. Raises as `search`, and ValueError where candidates
        are not drawn, or of an empty index.
        """
        if not self.weighted:
            raise ValueError(
                f"sampling: got {self.config.sampling!r}, allowed is 'priority' or 'tempered'"
            )
        check.at_least("len(index)", len(self), 1)
        self.search(queries, k=k)  # which checks both
        found = self.inputs(queries.detach())
        return sampling.candidate_coverage(*found, min(k, self._rows_at_most()))

    def _scale(self, parts: list[Codes]) -> Tensor | None:
        """The weight scale of all keys, float32 `[B, G]`, where votes read weights."""
        if self._weight_scale is None and self.config.weighs_votes:
            largest = torch.stack([part["weights"].flatten(2).amax(2) for part in parts]).amax(0)
            self._weight_scale = self.ops.codes.weight_scale(largest)
        return self._weight_scale

    def _scanned(self) -> list[Tensor]:
        names: list[str] = []
        if self.config.coarse != "none" and len(self) > self.config.single_stage_below:
            names = ["signs", "weights"] if self.config.weighs_votes else ["signs"]
            names += ["centers"] if self.config.center else []
        return [part[name] for part in self._parts() for name in names or part]

    def _cleared(self) -> None:
        self._histogram, self._fitted = torch.empty(0, device=self.geometry.device), None
        self._update()

    def _after_rollback(self) -> None:
        self._update()

    def _after_copy(self) -> None:
        super()._after_copy()
        if self._fitted is not None:  # from codes that the other may go on to change
            self._fitted = self._fitted[0], self._fitted[1]().detach
        self._update()

    def _update(self) -> None:
        """What follows from the tokens is made anew, and the executor is told of them."""
        self._weight_scale, self._open = None, None
        if self._executor:
            self._inform_executor(self._contents(self._executor.encodes))

    def _contents(self, encodes: bool) -> Contents:
        """What the executor is told; encodes: whether it encodes keys."""
        statistics = {"histogram": self._histogram} if self.config.coarse == "tiered_votes" else {}
        return Contents(
            codes=self._codes,
            rows=self._store,
            length=len(self),
            counts=self.counts,
            valid=self.valid,
            real_from=self._valid.all_from,
            opened=self._learned if encodes else self._opened(),
            statistics=statistics,
            regression=self._fit(),
        )

    def _regressed(self) -> Tensor | None:
        fit = self._fit()
        return None if fit is None else fit()

    def _fit(self) -> _Fit | None:
        """`Encoding.fit` to the full blocks, made when it is first asked for: a prompt's pieces do
        not. None where signs stand alone.
        """
        if self.config.sign_decoder == "mean" or not len(self):
            return None
        self._fitted = self._fitted_to(len(self._codes))
        return self._fitted[1]

    def _fitted_to(self, held: int) -> tuple[int, _Fit]:
        """As `_fit`, of so many tokens of full blocks, and how many of them it is fitted to."""
        blocks = held // self.block_tokens
        tokens = sign_regression.fitted_blocks(blocks) * self.block_tokens
        if self._fitted is not None and self._fitted[0] == tokens:
            return self._fitted
        make = partial(self.encoding.fit, self._codes.every, blocks)
        if not blocks:
            make = partial(sign_regression.identity, len(self.counts), self.geometry)
        return tokens, cache(make)

    # Statistics: keys per centroid, int64 [B, G, M, 256], which tiers need, and what was fitted

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> _Statistics:
        if self.config.coarse != "tiered_votes":
            return self._histogram, self._fitted
        added: Tensor = self.ops.coarse.histogram(codes["signs"], valid)
        return self._histogram + added if self._histogram.numel() else added, None

    def _with_written(self, statistics: _Statistics) -> _Statistics:
        """Where searches are under way they ask for a fit at the end: it is made beside them."""
        executor, written = self._executor, self._codes.written
        searched = executor is not None and executor.length is not None
        if self.config.sign_decoder == "mean" or not searched or written == len(self._codes):
            return statistics
        fitted = self._fitted_to(written)
        fitted[1]()
        return statistics[0], fitted

    def _with_truncated(self, length: int) -> _Statistics:
        if self.config.coarse != "tiered_votes":
            stays = self._fitted is not None and self._fitted[0] <= length
            return self._histogram, self._fitted if stays else None
        valid = None if self.valid is None else self.valid[:, length:]
        gone: Tensor = self.ops.coarse.histogram(self._codes["signs"][:, :, length:], valid)
        return self._histogram - gone, None

    def _with_reordered(self, batch_indices: Tensor) -> _Statistics:
        fitted = self._fitted
        if fitted is not None:
            fitted = fitted[0], fitted[1]().index_select(0, batch_indices).detach
        if self.config.coarse != "tiered_votes":
            return self._histogram, fitted
        return self._histogram.index_select(0, batch_indices), None

    def _commit(self, statistics: _Statistics) -> None:
        self._histogram, self._fitted = statistics
        self._update()

    def _held(self) -> list[Tensor]:
        held = [self._histogram, *self.encoding.constants]
        if self.config.sign_decoder == "regression" and len(
            self
        ):  # fitted or not yet: as many bytes
            shape = len(self.counts), self.geometry.kv_heads, *2 * [self.geometry.head_dim]
            held.append(torch.empty(shape, dtype=torch.float16, device="meta"))
        return held

"""The class `ParisKV`: an index that chooses candidates by coarse scores and reranks them by their
codes.

Qi et al., ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (ICML 2026).
`preset="paper"` follows the paper; the default preset improves on it (docs/indexes/pariskv.md).

The other modules of `kvindex.pariskv` have a function for each stage of a search. The class here
stores the inputs of these functions: the codes, the keys of the last block while it is not full,
and statistics. If compiled kernels run the stages, the class also has an executor, an object that
calls the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvindex.bases.executed import ExecutedIndex
from kvindex.core import backend, check
from kvindex.core.protocol import Codes, Contents, ErrorLimit, Hits, LimitsError
from kvindex.ops.codes import SUBSPACE
from kvindex.pariskv import sampling, select_rows, sign_regression
from kvindex.pariskv.config import PRESETS, ParisKVConfig
from kvindex.pariskv.encoding import Encoding
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex.storage.columns import BlockColumns
from kvindex.storage.layout import Layout, StateSizes, TensorSpec

_Fit = Callable[[], Tensor]
_Statistics = tuple[Tensor, tuple[int, _Fit] | None]


@runtime_checkable
class BoundsErrors(Protocol):
    """An executor that can choose the number of rows by their expected error."""

    @property
    def limits_error(self) -> bool:
        """True if its kernels support the options of the index."""
        ...

    def search_within(self, queries: Tensor, k: int, limit: ErrorLimit) -> Hits:
        """Sample as many rows per KV head as a limit of the error asks for, at most `k`."""
        ...


class ParisKV(ExecutedIndex):
    """Finds candidates by the sign bits of keys, reranks them with small codes, and samples rows.

    The codes take a few bits per coordinate, and need no training on the keys.

    Tokens are encoded in blocks. A block is encoded once, when it is full. The last block is called
    open while it is not full; its codes are computed from its keys when a search needs them
    (docs/decisions/0024).

    The score of a row combines the estimated inner products of its key and the query heads of the
    KV head (`kvindex.ops.group.agree`). With sampling, the score is the row's priority instead: the
    logarithm of its estimated attention weight, plus random noise.

    Source: Qi et al., ParisKV (ICML 2026).
    """

    Config = ParisKVConfig
    presets: ClassVar = PRESETS
    statistics = ("_histogram",)

    _histogram: Tensor  # keys per centroid, int64 [B, G, M, 256], if appends count them
    _counted: Tensor | None  # keys per centroid if searches count them, None before the first

    _open: Codes | None  # codes of the open block, `[B, G, n, ...]`, once computed
    _weight_scale: Tensor | None  # None after a change, until it is computed again
    _fitted: tuple[int, _Fit] | None = None  # number of fitted tokens, and a function that fits

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        g, config = self.geometry, self.config
        self.encoding = own = Encoding.of(config, g, self.ops)
        constants = {"rotation": own.rotation, "levels": own.levels}
        self._executor = executor = backend.accelerate(self.backend, g, config, constants)
        self.block_tokens = own.block_tokens
        self._codes = executor.codes if executor else BlockColumns(self.block_tokens)
        self._update()

    # The index encodes keys in blocks of `block_tokens` tokens. `_codes` stores the codes of all
    # full blocks. A last block that is not full yet is called the open block. Its keys are not
    # encoded: `_learned` stores them.

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """Encode the blocks that become full by an append of `keys`.

        Returns the keys of the last, partly filled block after the append, and the codes of the
        blocks that became full.
        """
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        executor, encoded = self._executor, len(self._codes)
        checks_here = executor is not None and executor.encodes and encoded == len(self)
        keys, valid = self._since(encoded, known, valid)
        full = keys.shape[2] // self.block_tokens * self.block_tokens
        last = keys[:, :, full:]
        self._check_finite("keys", last if checks_here else known)
        filled = keys[:, :, :full], None if valid is None else valid[:, :full]
        if executor is None or not executor.encodes:
            codes = self._encoded(*filled) if full else {}
        else:
            wrong = self._wrong(checks_here)
            codes = executor.prepare(*filled, beyond=last.shape[2], wrong=wrong)
            if wrong is not None and not self._defers and bool(wrong):
                executor.discard()
                self._check_finite("keys", known)  # raises an error that names the key
        if self.block_tokens == 1 or (not last.numel() and encoded == len(self) > 0):
            return self._learned, codes  # no block was open before, and none is now
        return {"open_keys": last.clone()}, codes

    def _since(
        self, start: int, keys: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Put the stored keys from token `start` on before `keys`, and return both in one tensor.

        The stored keys are those of the last, partly filled block of tokens. The second result is a
        mask of the valid keys, or None if all keys are valid.
        """
        if start == len(self):
            return keys, valid
        if valid is not None or self.valid is not None:
            ones = torch.ones((len(keys), keys.shape[2]), dtype=torch.bool, device=keys.device)
            earlier = ones[:, :1].expand(-1, len(self) - start)
            earlier = earlier if self.valid is None else self.valid[:, start:]
            valid = torch.cat([earlier, ones if valid is None else valid], dim=1)
        return torch.cat([self._learned["open_keys"], keys], dim=2), valid

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        start = len(self._codes)
        codes = self._encoded(*self._since(start, keys, None))
        new = len(self) - start
        return {
            name: codes[name] if name == "centers" else codes[name][:, :, new:] for name in codes
        }

    def _encoded(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Encode keys `[B, G, N, D]`. The first of them must be the first key of a block."""
        compiled = self._executor.encoded(keys, valid) if self._executor else None
        return self.encoding.encode(keys, valid) if compiled is None else compiled

    def _learned_before(self, length: int) -> Codes:
        """Return the keys of the last, partly filled block after truncation to `length` tokens.

        If truncation cuts into a full block, the keys of this block are read from the row store.
        """
        start, encoded = length // self.block_tokens * self.block_tokens, len(self._codes)
        if not self._learned or start == encoded:
            keys = self._learned.get("open_keys")
            return {} if keys is None else {"open_keys": keys[:, :, : length - start]}
        ids = torch.arange(start, length, device=self.geometry.device)
        ids = ids.expand(len(self.counts), self.geometry.kv_heads, -1)
        keys = self._store.gather(ids).keys
        if self.valid is not None:
            keys = keys.masked_fill(~self.valid[:, None, start:length, None], 0)
        return {"open_keys": keys}

    def _wrong(self, checks_here: bool) -> Tensor | None:
        """Return an int32 tensor that kernels set to 1 if a valid key is NaN or infinite.

        The result is None if kernels do not check the keys.
        """
        if self._check is False or not checks_here:
            return None
        if self._defers:
            return self._flag("keys", check.ALLOWED_NUMBER)
        return torch.zeros((), dtype=torch.int32, device=self.geometry.device)

    def _parts(self) -> list[Codes]:
        """Return the codes of the full blocks, then the codes of the last, partly filled block.

        Either is left out if it contains no tokens.
        """
        full = {name: self._codes[name] for name in self._codes} if len(self._codes) else {}
        return [part for part in (full, self._opened()) if part]

    def _opened(self) -> Codes:
        """Return the codes of the last, partly filled block, or `{}` if all blocks are full.

        The codes are computed by the first call after a change of the tokens.
        """
        start = len(self._codes)
        if self._open is None and start < len(self):
            valid = None if self.valid is None else self.valid[:, start:]
            self._open = self._encoded(self._learned["open_keys"], valid)
        return self._open or {}

    def _layout(self, sizes: StateSizes) -> Layout:
        g, config, tokens = self.geometry, self.config, self.block_tokens
        opened = sizes.length % tokens
        full, M = sizes.length - opened, g.head_dim // SUBSPACE
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
        if not full and not sizes.has("codes"):
            layout = {}
        if tokens > 1 and (opened or sizes.has("learned")):
            layout["learned.open_keys"] = TensorSpec(f"B G {opened} D", g.dtype)
        empty = TensorSpec("0", torch.float32)
        layout["statistics.histogram"] = empty
        if self._appends_count and (sizes.length or sizes.has("batch")):
            layout["statistics.histogram"] = TensorSpec(
                f"B G {M} 256",
                torch.int64,
                least=0,
                allowed="the number of valid tokens in each sum",
                rule=lambda state: (
                    sizes.counts is not None
                    and (
                        state["statistics.histogram"].sum(-1).cpu() == sizes.counts[:, None, None]
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

    def search_within(self, queries: Tensor, *, k: int, limit: ErrorLimit) -> Hits:
        """Sample as many rows per KV head as a limit of the error asks for, at most `k`.

        The search predicts the error of attention from its estimates, before any row is read
        (`kvindex.pariskv.row_budget`).

        Args:
            queries: `[B, H, D]`, after the rotary embedding.
            k: Largest number of rows per KV head, at least 1.
            limit: The limit. `limit.variance` is `[B, G]`, and `limit.resident_lse` `[B, H]`.

        Returns:
            Token ids int64 `[B, G, k]`, scores float32 `[B, G, k]` and log weights float32
            `[B, H, k]`, best rows first. Unused slots have the id -1.

        Raises:
            ValueError: The option `sampling` is "none", a shape, dtype or device does not fit, a
                query is not finite, or `k` is out of range.
            TypeError: An argument is not a tensor.
        """
        if not self.weighted:
            raise ValueError(
                f"sampling: got {self.config.sampling!r}, allowed is 'priority' or 'tempered' to "
                "choose the number of rows by their expected error"
            )
        check.wanted_rows(k)
        self._check_limit(limit)
        return self._searched(queries, k, partial(self._search_within, limit=limit))

    def _search_within(self, queries: Tensor, k: int, *, limit: ErrorLimit) -> Hits:
        executor = self._executor
        if isinstance(executor, BoundsErrors) and executor.limits_error:
            return executor.search_within(queries, k, limit)
        return sampling.search_within(*self.inputs(queries), k, limit)

    def inputs(self, queries: Tensor) -> tuple[Tokens, Queries]:
        """Collect the tensors that the stages of a search read. The index must not be empty.

        Args:
            queries: Floating point, `[B, H, D]`.

        Returns:
            The codes and statistics of all tokens, and the rotated queries.
        """
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
            histogram=self._centroid_counts(parts),
            regression=self._regressed(),
        )
        return tokens, Queries.of(queries, tokens)

    def _offers(self, wanted: type) -> bool:
        return self.weighted if wanted is LimitsError else super()._offers(wanted)

    @property
    def weighted(self) -> bool:  # type: ignore[override]  # it depends on the configuration
        """True if a search samples rows, and therefore returns log weights with them."""
        is_sampled: bool = self.config.sampling != "none"
        return is_sampled

    def candidate_coverage(self, queries: Tensor, *, k: int) -> Tensor:
        """Estimate what fraction of the attention weight of all indexed tokens the candidates have.

        This method is for diagnosis: it runs in plain torch, without kernels. It estimates the
        attention weight of all tokens by a weighted sum over the candidates. The weight of a
        candidate is 1 divided by the probability with which it was sampled.

        Args:
            queries: Floating point, `[B, H, D]`, after the rotary embedding.
            k: Rows per KV head that the search selects, at least 1.

        Returns:
            One fraction for each query head, float32 `[B, H]`.

        Raises:
            ValueError: The option `sampling` is "none", the index is empty, `k` is below 1, or the
                shape or device of `queries` does not fit the index.
            TypeError: `queries` is not a tensor.
        """
        if not self.weighted:
            raise ValueError(
                f"sampling: got {self.config.sampling!r}, allowed is 'priority' or 'tempered' to "
                "call candidate_coverage()"
            )
        check.at_least("len(index)", len(self), 1)
        self.search(queries, k=k)  # checks both arguments
        found = self.inputs(queries.detach())
        return sampling.candidate_coverage(*found, min(k, self._rows_at_most()))

    def _scale(self, parts: list[Codes]) -> Tensor | None:
        """Return a power of two that is larger than the weights of all keys, float32 `[B, G]`.

        The result is None if coarse scores (votes) do not depend on the weights.
        """
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
        if self._fitted is not None:  # fit now: the copied index may change the shared codes
            self._fitted = self._fitted[0], self._fitted[1]().detach
        self._update()

    def _update(self) -> None:
        """Discard cached results after a change of the tokens, and pass the new contents to the
        executor.
        """
        self._weight_scale, self._open, self._counted = None, None, None
        if self._executor:
            self._inform_executor(self._contents(self._executor.encodes))

    def _contents(self, encodes: bool) -> Contents:
        """Return the codes, rows and statistics that an executor needs to search this index.

        If `encodes` is True, the executor encodes keys itself. Then the result contains the keys of
        the last, partly filled block. Otherwise, it contains the codes of this block.
        """
        statistics = {"histogram": self._histogram} if self._appends_count else {}
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
        """Return the matrix that predicts keys from their sign bits, and fit it now if necessary.

        The result is None for sign_decoder="mean" or an empty index.
        """
        fit = self._fit()
        return None if fit is None else fit()

    def _fit(self) -> _Fit | None:
        """Return a function that computes the regression of keys on their sign bits.

        The regression is fitted to full blocks of tokens when the function is called for the first
        time, so appends need no time for it. The result is None for sign_decoder="mean" or an empty
        index.
        """
        if self.config.sign_decoder == "mean" or not len(self):
            return None
        self._fitted = self._fitted_to(len(self._codes))
        return self._fitted[1]

    def _fitted_to(self, stored: int) -> tuple[int, _Fit]:
        """Choose the tokens from which the regression of keys on their sign bits is computed.

        These are the first tokens of the index.

        Args:
            stored: Number of tokens in full blocks.

        Returns:
            The number of these tokens, and a function that computes the regression from them.
        """
        blocks = stored // self.block_tokens
        tokens = sign_regression.fitted_blocks(blocks) * self.block_tokens
        if self._fitted is not None and self._fitted[0] == tokens:
            return self._fitted
        make = partial(self.encoding.fit, self._codes.every, blocks)
        if not blocks:
            make = partial(sign_regression.identity, len(self.counts), self.geometry)
        return tokens, cache(make)

    # The next methods compute and update two statistics of the stored keys: the number of keys per
    # centroid (needed only for coarse="tiered_votes"), and the linear regression of keys on their
    # sign bits.

    @property
    def _appends_count(self) -> bool:
        """True if each append updates the number of keys per centroid.

        Only the option `coarse="tiered_votes"` needs this number. If keys are encoded in blocks, an
        append does not encode the last, partly filled block. In this case the first search after an
        append counts the keys instead (`_centroid_counts`).
        """
        return self.config.coarse == "tiered_votes" and self.block_tokens == 1

    def _centroid_counts(self, parts: list[Codes]) -> Tensor:
        """Return the number of valid keys per centroid, int64 `[B, G, M, 256]`.

        The result is empty unless the option `coarse` is "tiered_votes".
        """
        if self.config.coarse != "tiered_votes" or self._appends_count:
            return self._histogram
        if self._counted is None:
            signs = torch.cat([part["signs"] for part in parts], dim=2)
            self._counted = self.ops.coarse.histogram(signs, self.valid)
        return self._counted

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> _Statistics:
        if not self._appends_count:
            return self._histogram, self._fitted
        added: Tensor = self.ops.coarse.histogram(codes["signs"], valid)
        return self._histogram + added if self._histogram.numel() else added, None

    def _with_written(self, statistics: _Statistics) -> _Statistics:
        """Fit the regression of keys on their sign bits while an append is prepared.

        While the append is prepared, searches can run concurrently with the fit. If the fit ran
        later, the next search after the append would have to wait for it. If no search has run yet,
        the first search computes the fit.
        """
        executor, written = self._executor, self._codes.written
        searched = executor is not None and executor.length is not None
        if self.config.sign_decoder == "mean" or not searched or written == len(self._codes):
            return statistics
        fitted = self._fitted_to(written)
        fitted[1]()
        return statistics[0], fitted

    def _with_truncated(self, length: int) -> _Statistics:
        if not self._appends_count:
            stays = self._fitted is not None and self._fitted[0] <= length
            return self._histogram, self._fitted if stays else None
        valid = None if self.valid is None else self.valid[:, length:]
        gone: Tensor = self.ops.coarse.histogram(self._codes["signs"][:, :, length:], valid)
        return self._histogram - gone, None

    def _with_reordered(self, batch_indices: Tensor) -> _Statistics:
        fitted = self._fitted
        if fitted is not None:
            fitted = fitted[0], fitted[1]().index_select(0, batch_indices).detach
        if not self._appends_count:
            return self._histogram, fitted
        return self._histogram.index_select(0, batch_indices), None

    def _commit(self, statistics: _Statistics) -> None:
        self._histogram, self._fitted = statistics
        self._update()

    def _other_tensors(self) -> list[Tensor]:
        tensors = [self._histogram, *self.encoding.constants]
        if self.config.sign_decoder == "regression" and len(
            self
        ):  # counted even before the fit has run
            shape = len(self.counts), self.geometry.kv_heads, *2 * [self.geometry.head_dim]
            tensors.append(torch.empty(shape, dtype=torch.float16, device="meta"))
        if self.config.coarse == "tiered_votes" and not self._appends_count and len(self):
            M = self.geometry.head_dim // SUBSPACE  # counted or not yet: as many bytes
            shape = len(self.counts), self.geometry.kv_heads, M, 2**SUBSPACE
            tensors.append(torch.empty(shape, dtype=torch.int64, device="meta"))
        return tensors

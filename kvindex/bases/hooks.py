"""Hooks, what an index writes: two methods, and whichever others it needs to say more.

`_encode` and `_search` make an index of `kvindex.bases.index.BaseIndex`. `_learn` lets it learn
parameters, once; the `_with_…` hooks, `_commit` and `_cleared` let it keep statistics of its
tokens; signals tell it of the sequence (docs/adding-an-index.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from kvindex.bases.deferred import DeferredChecks
from kvindex.core.capability import Capable
from kvindex.core.config import NoConfig
from kvindex.core.protocol import (
    AppendsAsync,
    Codes,
    ExpandsBatch,
    Hits,
    ObservesQueries,
    Rows,
    WeighsRows,
)
from kvindex.ops.coverage import check_policy
from kvindex.storage.columns import Columns
from kvindex.storage.layout import Held, Layout


class Hooks(Capable, DeferredChecks, ABC, guarded=False):
    """What `BaseIndex` asks of an index, with what it does where nothing is said."""

    config: Any
    _codes: Columns
    _learned: Codes

    Config: ClassVar[type] = NoConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Fields that differ from `Config`'s defaults, by name."""
    scattered: ClassVar[bool] = False
    """Whether tokens that come together may lie anywhere, not one after the other."""
    weighted: ClassVar[bool] = False
    """Whether rows that a search finds have weights of their own (`Hits.log_weight`)."""
    needs_rope: ClassVar[bool] = False
    """Whether it cannot do without `Geometry.rope`."""

    @abstractmethod
    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Codes `[B, G, N, ...]` of finite keys `[B, G, N, D]`; invalid tokens come as zeros.

        learned: what `_learn` gave; it will hold once these keys are appended.
        """

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Hits:
        """Hits for finite queries `[B, H, D]`; the index holds at least one valid token."""

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        """Search as `_search` does, for no more rows than are estimated to hold `coverage`.

        The estimated fraction of the attention is `Hits.coverage`.
        """
        raise NotImplementedError  # `check_coverage` has refused

    def check_coverage(self, coverage: float) -> None:
        """Raises ValueError where a search cannot tell what share of the attention its rows hold.

        It can where `_search_coverage` is written and the policy of the group searches for every
        head.
        """
        if type(self)._search_coverage is Hooks._search_coverage:
            raise ValueError(
                f"coverage: got {coverage}, allowed is None: {type(self).__name__} does not know "
                "what share of the attention its rows hold"
            )
        check_policy(self.config.group)

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Parameters, tensors `[B, ...]`, once these tokens are appended; changes nothing.

        A row of the batch learns from the first append that holds a valid token of it (an index
        may ask for more), and keeps what it has learned until `reset`, or until what it was learned
        from is gone (`_learned_before`).
        """
        return {}

    def _learned_before(self, length: int) -> Codes:
        """What stays learned once the tokens from `length` on are gone; changes nothing."""
        return self._learned

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """What is learned once these tokens are appended, and their codes as `Columns` take them.

        Changes nothing that a search reads. Raises ValueError for valid keys that are not finite.
        """
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        learned = self._learn(known, valid)
        return learned, self._encode(known, learned)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Any:
        """The statistics once `codes` are appended; changes nothing."""

    def _with_written(self, statistics: Any) -> Any:
        """As `_with_appended`, which gave these, of codes that kernels have written by then.

        Beside the steps, where the append is: what is left to `_commit` they wait for.
        """
        return statistics

    def _with_truncated(self, length: int) -> Any:
        """The statistics once the tokens from `length` on are gone; changes nothing."""

    def _with_reordered(self, batch_indices: Tensor) -> Any:
        """The statistics once the batch is reordered; changes nothing."""

    def _commit(self, statistics: Any) -> None:
        """What one of those above returned becomes the index's statistics."""

    def _layout(self, held: Held) -> Layout:
        """Declare the tensors of a state, so that a damaged or forged one is not loaded.

        For example `{"codes.norms": TensorSpec("B G N 1", torch.float32, least=0)}`. A name that is
        not declared may be any finite tensor: `[B, G, N, ...]` of `codes.…`, `[B, ...]` of
        `learned.…`, and of `statistics.…` what the attribute's annotation says.

        Args:
            held: What the state says that it contains.

        Returns:
            Name -> what the tensor must be like. Named sizes of axes are `B`, `G`, `H`, `D` and `N`
            as everywhere, `Dv` (value dimension) and `g` (query heads of a KV head).
        """
        return {}

    def _held(self) -> list[Tensor]:
        """Tensors that the index keeps on the device beside the codes, for `nbytes`."""
        return []

    def _cleared(self) -> None:
        """Everything was forgotten."""

    def _scanned(self) -> list[Tensor]:
        """What a search reads of every token `[B, G, N, ...]`: all codes unless an index says."""
        return [self._codes[name] for name in self._codes]

    def _summaries(self) -> Rows | None:
        """Rows that are not tokens, keys `[B, G, S, D]`: row `s` has the id `-2 - s`."""
        return None

    # What it is

    @property
    def unit(self) -> int:
        """Tokens that come together at most: 1, unless an index selects whole pages."""
        return 1

    @property
    def depends_on_queries(self) -> bool:
        """Whether a search depends on the queries of other steps since the last append.

        Steps of such an index cannot be searched at once (`protocol.ExpandsBatch`).
        """
        return False

    def _offers(self, wanted: type) -> bool:
        """Whether it has a capability whose methods it has, as it was made."""
        if wanted is ObservesQueries:
            return type(self).observe_queries is not Hooks.observe_queries
        if wanted is ExpandsBatch:
            return not self.depends_on_queries
        if wanted is WeighsRows:
            return self.weighted
        return wanted is not AppendsAsync  # the first part of an append may wait for the device

    # Signals

    def end_prompt(self) -> None:
        """The prompt is complete. Nothing to do unless an index says so."""

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`. Nothing to do by default."""

    def mark_boundary(self) -> None:
        """A segment ends here. Nothing to do unless an index says so."""

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Ids of the tokens from `first` on, int64 `[B, T]` or `[T]`. Nothing to do by default."""

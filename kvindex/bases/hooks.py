"""Hooks: the methods that an index overrides. `_encode` and `_search` are required.

There are three further groups of hooks (docs/adding-an-index.md):

- With `_learn` an index learns parameters, once.
- With the `_with_…` hooks, `_commit` and `_cleared` it updates statistics of its tokens.
- With signals it receives information about the sequence, such as the end of the prompt.
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
    """Methods that an index on `BaseIndex` overrides, with their defaults."""

    config: Any
    _codes: Columns
    _learned: Codes

    Config: ClassVar[type] = NoConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name of a preset -> fields that differ from the defaults of `Config`."""
    scattered: ClassVar[bool] = False
    """True if tokens that a search selects together may be anywhere in the sequence."""
    weighted: ClassVar[bool] = False
    """True if the rows of a search have log weights (`Hits.log_weight`)."""
    needs_rope: ClassVar[bool] = False
    """True if the index requires `Geometry.rope`."""

    @abstractmethod
    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Encode finite keys.

        Args:
            keys: `[B, G, N, D]`; invalid tokens are zero.
            learned: Result of `_learn` for these keys.

        Returns:
            Named tensors `[B, G, N, ...]`.
        """

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Hits:
        """Search for rows. The index holds at least one valid token.

        Args:
            queries: Finite, `[B, H, D]`.
            k: Rows per KV head, at most the number that a search can find.
        """

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        """Search as `_search` does, but stop at the rows that are estimated to reach a coverage.

        Args:
            queries: Finite, `[B, H, D]`.
            k: Rows per KV head at most.
            coverage: Fraction of the attention weight to reach, in (0, 1].

        Returns:
            Hits, with the estimated fraction in `Hits.coverage`.
        """
        raise NotImplementedError  # unreachable: `check_coverage` raised before

    def check_coverage(self, coverage: float) -> None:
        """Check that a search can estimate coverage.

        It can if the index overrides `_search_coverage` and its group policy has scores for every
        query head.

        Args:
            coverage: The coverage that was asked for.

        Raises:
            ValueError: The index cannot estimate coverage.
        """
        if type(self)._search_coverage is Hooks._search_coverage:
            raise ValueError(
                f"coverage: got {coverage}, allowed is None: {type(self).__name__} does not know "
                "what fraction of the attention its rows hold"
            )
        check_policy(self.config.group)

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Return the learned parameters after these tokens are appended. Must not change the index.

        A sequence learns from the first append that contains a valid token of this sequence (an
        index may require more tokens). The parameters stay the same until `reset`, or until the
        tokens from which they were learned are removed (`_learned_before`).

        Args:
            keys: `[B, G, N, D]`; invalid tokens are zero.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            Named tensors `[B, ...]`.
        """
        return {}

    def _learned_before(self, length: int) -> Codes:
        """Return the learned parameters after the tokens from `length` on are removed.

        Must not change the index.
        """
        return self._learned

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """Learn from new tokens and encode them. Must not change any data that a search reads.

        Args:
            keys: `[B, G, N, D]`.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            The learned parameters after the append, and codes as `Columns` takes them.

        Raises:
            ValueError: A valid key is not finite.
        """
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        learned = self._learn(known, valid)
        return learned, self._encode(known, learned)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Any:
        """Return the statistics after `codes` are appended. Must not change the index."""

    def _with_written(self, statistics: Any) -> Any:
        """Extend the statistics of `_with_appended` after kernels have written the codes.

        An asynchronous append calls this concurrently with decode steps, whereas work in `_commit`
        would delay the steps.
        """
        return statistics

    def _with_truncated(self, length: int) -> Any:
        """Return the statistics without the tokens from `length` on. Must not change the index."""

    def _with_reordered(self, batch_indices: Tensor) -> Any:
        """Return the statistics after the batch is reordered. Must not change the index."""

    def _commit(self, statistics: Any) -> None:
        """Store the statistics that one of the methods above returned."""

    def _layout(self, held: Held) -> Layout:
        """Declare the tensors of a state, so that a damaged or forged state is not loaded.

        For example, `{"codes.norms": TensorSpec("B G N 1", torch.float32, least=0)}`. A tensor that
        is not declared must be finite, and must have the shape `[B, G, N, ...]` if its name begins
        with `codes.`, and `[B, ...]` if it begins with `learned.`. A tensor whose name begins with
        `statistics.` must fit the annotation of the attribute.

        Args:
            held: Sizes that the state declares.

        Returns:
            Name -> requirements for the tensor. Axes are named as everywhere: `B`, `G`, `H`, `D`,
            `N`, `Dv` (value dimension) and `g` (query heads per KV head).
        """
        return {}

    def _held(self) -> list[Tensor]:
        """Return the index's tensors on the device other than its codes, for `nbytes`."""
        return []

    def _cleared(self) -> None:
        """Reset the statistics after all tokens were removed."""

    def _scanned(self) -> list[Tensor]:
        """Return the tensors `[B, G, N, ...]` that a search reads for every token.

        By default these are all codes.
        """
        return [self._codes[name] for name in self._codes]

    def _summaries(self) -> Rows | None:
        """Return rows that stand for several tokens, keys `[B, G, S, D]`, or None.

        A search refers to summary `s` by the id `-2 - s`.
        """
        return None

    # Properties of the index

    @property
    def unit(self) -> int:
        """Largest number of tokens that a search selects together: 1, or for example a page."""
        return 1

    @property
    def depends_on_queries(self) -> bool:
        """True if a search depends on queries of other steps since the last append.

        Such an index cannot search for the queries of several steps in one call
        (`protocol.ExpandsBatch`).
        """
        return False

    def _offers(self, wanted: type) -> bool:
        """Return True if the index has the capability `wanted`."""
        if wanted is ObservesQueries:
            return type(self).observe_queries is not Hooks.observe_queries
        if wanted is ExpandsBatch:
            return not self.depends_on_queries
        if wanted is WeighsRows:
            return self.weighted
        return wanted is not AppendsAsync  # the first part of an append may wait for the device

    # Signals

    def end_prompt(self) -> None:
        """Receive the signal that the prompt is complete. Does nothing by default."""

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries. Does nothing by default.

        Args:
            queries: `[B, H, T, D]`.
            positions: Ids of their tokens, int64 `[T]`.
        """

    def mark_boundary(self) -> None:
        """Receive the signal that a segment ends with the newest token. Does nothing by default."""

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Receive the text. Does nothing by default.

        Args:
            tokens: Vocabulary ids of the tokens, int64 `[B, T]`, or `[T]` for all sequences.
            first: Id of the first of these tokens in the index.
        """

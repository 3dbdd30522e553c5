"""`Hooks`: the methods that a new index overrides. `_encode` and `_search` are required.

An index may also override the following groups of methods (docs/adding-an-index.md):

- `_learn` computes parameters such as a codebook, once, from the first tokens.
- `_with_appended`, `_with_truncated`, `_with_reordered`, `_commit` and `_cleared` update statistics
  of the stored tokens.
- `end_prompt`, `observe_queries`, `mark_boundary` and `observe_tokens` receive information about
  the sequence, such as the end of the prompt.
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
from kvindex.storage.layout import Layout, StateSizes


class Hooks(Capable, DeferredChecks, ABC, transactional=False):
    """The methods that a subclass of `BaseIndex` may override, with their defaults."""

    config: Any
    _codes: Columns
    _learned: Codes

    Config: ClassVar[type] = NoConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name of a preset -> fields that differ from the defaults of `Config`."""
    scattered: ClassVar[bool] = False
    """True if tokens that a search selects together need not be neighbors in the sequence."""
    weighted: ClassVar[bool] = False
    """True if the rows of a search have log weights (`Hits.log_weight`)."""
    needs_rope: ClassVar[bool] = False
    """True if the index requires `Geometry.rope`."""

    @abstractmethod
    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Encode keys, which are finite.

        Args:
            keys: `[B, G, N, D]`; keys of padded tokens are zero.
            learned: Result of `_learn` for these keys.

        Returns:
            Named tensors `[B, G, N, ...]`.
        """

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Hits:
        """Return the best rows for each KV head. The index contains at least one valid token.

        Args:
            queries: `[B, H, D]`, finite.
            k: Rows to select per KV head, at most the number of rows that can be found.
        """

    def _search_coverage(self, queries: Tensor, k: int, coverage: float) -> Hits:
        """Select the best rows until they are estimated to reach a fraction of the attention
        weight.

        Args:
            queries: `[B, H, D]`, finite.
            k: Largest number of rows per KV head.
            coverage: Fraction of the attention weight to reach, in (0, 1].

        Returns:
            Hits, with the estimated fraction in `Hits.coverage`.
        """
        raise NotImplementedError  # unreachable, because `check_coverage` raises ValueError first

    def check_coverage(self, coverage: float) -> None:
        """Check that a search of this index supports the argument `coverage`.

        The index must override `_search_coverage`, and its option `group` must not average the
        queries of several query heads.

        Args:
            coverage: The argument of `search`.

        Raises:
            ValueError: The index cannot estimate coverage.
        """
        if type(self)._search_coverage is Hooks._search_coverage:
            raise ValueError(
                f"coverage: got {coverage}, allowed is None: {type(self).__name__} does not "
                "estimate what fraction of the attention weight the selected rows have"
            )
        check_policy(self.config.group)

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Return the learned parameters after an append of these tokens, without changing the
        index.

        The parameters of a sequence are learned from the first append that contains a valid token
        of the sequence; an index may require more tokens. The parameters then stay the same until
        `reset`, or until tokens from which they were learned are removed (`_learned_before`).

        Args:
            keys: `[B, G, N, D]`; keys of padded tokens are zero.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            Named tensors `[B, ...]`.
        """
        return {}

    def _learned_before(self, length: int) -> Codes:
        """Return the learned parameters that the index will have after `truncate(length)`.

        This method does not change the index.
        """
        return self._learned

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """Learn parameters from new tokens and encode the tokens.

        This method must not change data that a search reads.

        Args:
            keys: `[B, G, N, D]`.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Returns:
            The learned parameters after the append, and the codes to pass to `Columns.append`.

        Raises:
            ValueError: A valid key is not finite.
        """
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        learned = self._learn(known, valid)
        return learned, self._encode(known, learned)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Any:
        """Return updated statistics about the tokens of the index, for an append of `codes`.

        This method must not change the index; `_commit` stores the result.
        """

    def _with_written(self, statistics: Any) -> Any:
        """Add further statistics to the result of `_with_appended`.

        An append calls this method after it has written the new codes to memory (`Columns.write`),
        so this method can read them. In an asynchronous append, this method runs concurrently with
        decode steps, whereas decode steps have to wait for `_commit`. So slow work belongs here.
        """
        return statistics

    def _with_truncated(self, length: int) -> Any:
        """Return updated statistics about the tokens of the index, for `truncate(length)`.

        This method must not change the index; `_commit` stores the result.
        """

    def _with_reordered(self, batch_indices: Tensor) -> Any:
        """Return updated statistics about the tokens of the index, for a reorder of the batch.

        This method must not change the index; `_commit` stores the result.
        """

    def _commit(self, statistics: Any) -> None:
        """Store updated statistics that `_with_appended`, `_with_truncated` or `_with_reordered`
        returned.
        """

    def _layout(self, sizes: StateSizes) -> Layout:
        """Declare shapes, dtypes and ranges of the tensors in a saved state, to reject damaged or
        forged states.

        An example is `{"codes.norms": TensorSpec("B G N 1", torch.float32, least=0)}`. Tensors that
        are not declared must be finite, and are checked by the beginning of their name:

        - `codes.…`: the shape must be `[B, G, N, ...]`.
        - `learned.…`: the shape must be `[B, ...]`.
        - `statistics.x`: the tensor must have the type with which the class annotates its
          attribute `x` or `_x`.

        Args:
            sizes: Sizes that the state declares.

        Returns:
            Name -> `TensorSpec`. Axes are named `B`, `G`, `H`, `D`, `N`, `Dv` (value dimension) and
            `g` (query heads per KV head).
        """
        return {}

    def _other_tensors(self) -> list[Tensor]:
        """Return the tensors on the device that `nbytes` counts in addition to the codes."""
        return []

    def _cleared(self) -> None:
        """Reset the statistics about tokens. The constructor and `reset` call this."""

    def _scanned(self) -> list[Tensor]:
        """Return the tensors `[B, G, N, ...]` that a search reads completely. The default is all
        codes.
        """
        return [self._codes[name] for name in self._codes]

    def _summaries(self) -> Rows | None:
        """Return the keys `[B, G, S, D]` and values of summary rows, or None if there are none.

        A summary row stands for several tokens. A search returns the id `-2 - s` for summary row
        `s`.
        """
        return None

    # Properties of the index

    @property
    def unit(self) -> int:
        """Largest number of tokens that a search selects together, such as the tokens of a page.

        It is 1 for an index that selects single tokens.
        """
        return 1

    @property
    def depends_on_queries(self) -> bool:
        """True if the queries of earlier decode steps change the result of a search.

        Such an index cannot search for the queries of several decode steps in one call
        (`protocol.ExpandsBatch`).
        """
        return False

    def _offers(self, wanted: type) -> bool:
        """Return True if the index supports `wanted`, one of the optional protocols of
        `core.protocol`.
        """
        if wanted is ObservesQueries:
            return type(self).observe_queries is not Hooks.observe_queries
        if wanted is ExpandsBatch:
            return not self.depends_on_queries
        if wanted is WeighsRows:
            return self.weighted
        return wanted is not AppendsAsync  # by default, start_append may wait for the device

    # Signals

    def end_prompt(self) -> None:
        """Receive the signal that the prompt is complete. Does nothing by default."""

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Receive the newest queries. Does nothing by default.

        Args:
            queries: `[B, H, T, D]`.
            positions: Positions of the tokens to which the queries belong, int64 `[T]`.
        """

    def mark_boundary(self) -> None:
        """Receive the signal that a sentence or segment of the text ends with the newest token.

        Does nothing by default.
        """

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Receive the vocabulary ids of the text. Does nothing by default.

        Args:
            tokens: Vocabulary ids, int64 `[B, T]`, or `[T]` if all sequences have the same text.
            first: Position in the index of the first of these tokens.
        """

"""`ExecutedIndex`: base of an index whose search an executor can run with compiled kernels.

The executor (`protocol.Executor`) owns the data that the kernels read, except the rows. The index
checks arguments and informs the executor of every change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import backend, check
from kvindex.core.protocol import (
    AppendsAsync,
    Attended,
    Attends,
    CapturesStep,
    Contents,
    DecodesStep,
    EncodesBlocks,
    Executor,
    Hits,
    IndexBatch,
    JoinsBatch,
    Rows,
)
from kvindex.core.resident import ResidentRows


@runtime_checkable
class CapturingExecutor(Protocol):
    """An executor whose decode steps can be captured in a caller's CUDA graph."""

    def prepare_replay(self, resident: ResidentRows, k: int, wrong: Tensor | None) -> object:
        """Prepare a replay, as `CapturesStep.prepare_replay`; `wrong` is as in `attend`."""
        ...

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
    ) -> Attended:
        """Run a step that can be captured, as `CapturesStep.captured_step`."""
        ...


@runtime_checkable
class JoiningExecutor(Protocol):
    """An executor whose index can be one sequence of a batch of several indexes."""

    def new_batch(self) -> IndexBatch:
        """Create an empty batch, as `JoinsBatch.new_batch`."""
        ...

    def batch_row(self, wrong: Tensor | None) -> object:
        """Return this index's part of a batch, as `JoinsBatch.batch_row`."""
        ...


class ExecutedIndex(BaseIndex):
    """An index whose search, attention and decode step may be run by an executor.

    A subclass creates `_executor` after calling `super().__init__` (`core.backend.accelerate`), and
    calls `_inform_executor` after every change.

    Attributes:
        block_tokens: Number of tokens that are encoded together; 1 if each key is encoded alone.
    """

    block_tokens = 1

    _executor: Executor | None = None
    _attends = False  # True if the executor can attend; set after every change
    _captures = False  # True if a caller can also capture steps of the executor
    _joins = False  # True if the executor can also be one sequence of a batch
    _usual: object = None  # kind of queries, and batch size, of the last call of `_checked_step`

    def _inform_executor(self, contents: Contents) -> None:
        """Pass the current contents of the index to the executor."""
        if self._executor:
            self._executor = self._executor.update(contents)
            self._attends = self._executor.attends
            self._captures = self._attends and isinstance(self._executor, CapturingExecutor)
            self._joins = self._attends and isinstance(self._executor, JoiningExecutor)

    def _alone(self, name: str) -> bool:
        executor = self._executor
        exclusive = executor is not None and not executor.searches_at_once
        return exclusive or super()._alone(name)

    def _offers(self, wanted: type) -> bool:
        if wanted is DecodesStep or wanted is Attends:
            return self.attends or (wanted is Attends and self._store_attends)
        if wanted is CapturesStep:
            return self._captures
        if wanted is JoinsBatch:
            return self._joins
        if wanted is EncodesBlocks:
            return self.block_tokens > 1
        return self.supports_async_append if wanted is AppendsAsync else super()._offers(wanted)

    @property
    def supports_async_append(self) -> bool:
        """True if kernels write codes in place and an append does not wait for the device."""
        return self._executor is not None and self._executor.appends_async

    @property
    def attends(self) -> bool:
        """True if kernels search, fetch and attend in one call."""
        return self._attends

    @property
    def _store_attends(self) -> bool:
        """True if the search runs op by op, without fused kernels, and the store can attend."""
        return self._executor is None and self._attending_store() is not None

    def _cache_use(self) -> tuple[int, int, int]:
        executor = self._executor
        return executor.cache_use() if executor else super()._cache_use()

    def _paths(self) -> list[str]:
        if self._executor:
            return [*super()._paths(), self._executor.explain()]
        why = backend.refusal(self.backend, self.geometry, self.config)
        return [*super()._paths(), f"executor: none, op by op ({why})"]

    def attend(self, queries: Tensor, resident: ResidentRows, *, k: int) -> Attended:
        """Search and attend, as `protocol.Attends.attend`. The index must not be empty.

        Args:
            queries: `[B, H, D]`.
            resident: Rows of sink and window.
            k: Rows per KV head, at least 1.

        Returns:
            Attention over the selected rows and the rows of sink and window.
        """
        if self._store_attends:
            return super().attend(queries, resident, k=k)
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
        """Run one decode step of a non-empty index, as `protocol.DecodesStep.decode_step`."""
        executor, wrong = self._checked_step(queries, k)
        some = queries.detach(), token, resident, window
        return executor.decode_step(*some, k, wrong, graphs)

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """Prepare a replay of a non-empty index, as `protocol.CapturesStep.prepare_replay`."""
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        return self._capturing().prepare_replay(resident, k, self._flagged_queries())

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """Run a step that can be captured, as `protocol.CapturesStep.captured_step`."""
        _, wrong = self._checked_step(queries, k)
        return self._capturing().captured_step(queries.detach(), token, resident, k, wrong)

    def _capturing(self) -> CapturingExecutor:
        if not self._captures:
            raise ValueError(
                f"captured_step: got an index with backend={self.backend!r}, whose steps cannot be "
                "captured, allowed is one that offers CapturesStep"
            )
        return cast(CapturingExecutor, self._executor)

    def new_batch(self) -> IndexBatch:
        """Create an empty batch, as `protocol.JoinsBatch.new_batch`."""
        return self._joining().new_batch()

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """Return this index's part of a batch, as `protocol.JoinsBatch.batch_row`."""
        _, wrong = self._checked_step(queries, k)
        if self._batch != 1:
            raise ValueError(f"batch_row: got a batch of {self._batch}, allowed is 1")
        return self._joining().batch_row(wrong)

    def _joining(self) -> JoiningExecutor:
        if not self._joins:
            raise ValueError(
                f"batch_row: got an index with backend={self.backend!r}, whose steps cannot be "
                "joined with others, allowed is one that offers JoinsBatch"
            )
        return cast(JoiningExecutor, self._executor)

    def _checked_step(self, queries: Tensor, k: int) -> tuple[Executor, Tensor | None]:
        """Check the arguments of a step; return the executor and a flag for its kernels.

        The kernels set the flag to 1 for a query that is not finite. The flag is None where kernels
        need not check.
        """
        executor, usual = self._attending(), (check.kind(queries), self._batch)
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        if usual != self._usual:
            g = self.geometry
            shape = {"B": self._batch, "H": g.q_heads, "D": g.head_dim}
            self._check_tensor("queries", queries, shape)
            self._usual = usual
        wrong = self._flagged_queries()
        if wrong is None:
            self._check_finite("queries", queries)
        return executor, wrong

    def _flagged_queries(self) -> Tensor | None:
        """Return the flag that kernels set for a query that is not finite; None without checks."""
        if self._defers and self._check is not False:
            return self._flag("queries", check.ALLOWED_NUMBER)
        return None

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to given rows, as `protocol.Attends.attend_hits`. The index must not be empty.

        Args:
            queries: `[B, H, D]`.
            hits: Result of a search.
            resident: Rows of sink and window.
        """
        if self._store_attends:
            return super().attend_hits(queries, hits, resident)
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
                "kernel supports, allowed is one whose `attends` is True; search and fetch "
                "support any"
            )
        return executor

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare everything that searches for `k` rows need, up to `tokens` tokens.

        Only fused kernels need preparation: it allocates buffers for candidates, which otherwise
        the first search allocates. Call this before a search is captured in a CUDA graph, because
        the graph keeps using the buffers that exist at capture (docs/cuda.md).

        Args:
            k: Rows per KV head.
            tokens: Largest number of tokens.

        Raises:
            ValueError: A number is out of range, or the index is empty.
        """
        check.at_least("k", k, 1)
        check.at_least("tokens", tokens, 1)
        check.at_least("len(index)", len(self), 1)
        if not self._executor:
            return
        self._executor.warm_up(k, tokens)
        g, batch = self.geometry, len(self.counts)
        queries = torch.zeros((batch, g.q_heads, g.head_dim), dtype=g.dtype, device=g.device)
        self.search(queries, k=k)  # compiles the kernels
        if self.attends:
            self.attend(queries, ResidentRows(g, batch, 1), k=k)

    def reserve(self, tokens: int) -> None:
        """Allocate the memory that codes and rows need, up to `tokens` tokens.

        Memory for rows on the host is pinned. This takes the driver so long that decode steps would
        wait for it. If the length of an answer is known, call this before the first token. The call
        has an effect only if kernels store the rows, and only if the index is not empty.

        Args:
            tokens: Number of tokens.

        Raises:
            ValueError: The number is out of range or more than is supported.
            MemoryError: The store's budget is exceeded; the index is unchanged.
        """
        check.at_least("tokens", tokens, 1)
        if self._executor and len(self):
            self._store.reserve_tokens(tokens)  # first, because it may raise MemoryError
            self._executor.reserve(tokens)

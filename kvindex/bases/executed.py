"""`ExecutedIndex`: base of an index that kernels may run whole (`protocol.Executor`).

The executor owns what kernels read; the index checks arguments and tells it of every change.
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
    """An `Executor` whose steps can be captured in a caller's graph."""

    def prepare_replay(self, resident: ResidentRows, k: int, wrong: Tensor | None) -> object:
        """As `CapturesStep.prepare_replay`; wrong: as in `attend`."""
        ...

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
    ) -> Attended:
        """As `CapturesStep.captured_step`; wrong: as in `attend`."""
        ...


@runtime_checkable
class JoiningExecutor(Protocol):
    """An `Executor` that can be a row of a batch with others like it."""

    def new_batch(self) -> IndexBatch:
        """As `JoinsBatch.new_batch`."""
        ...

    def batch_row(self, wrong: Tensor | None) -> object:
        """As `JoinsBatch.batch_row`; wrong: as in `attend`."""
        ...


class ExecutedIndex(BaseIndex):
    """An index that says what its executor can do, and hands it what it checked.

    A class on it makes `_executor` once the base is, if there is one (`core.backend.accelerate`),
    and calls `_inform_executor` after every change.

    block_tokens: tokens of a block, whose codes are a function of its keys; 1: of each key alone.
    """

    block_tokens = 1

    _executor: Executor | None = None
    _attends = False  # as the executor says since the last change
    _captures = False  # whether its steps can be captured by a caller, too
    _joins = False  # whether it can be a row of a batch with others
    _usual: object = None  # what `_checked_step` saw last

    def _inform_executor(self, contents: Contents) -> None:
        """The executor is told what the index holds now."""
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
        """Whether kernels write codes where they lie, and nothing waits for them."""
        return self._executor is not None and self._executor.appends_async

    @property
    def attends(self) -> bool:
        """Whether kernels search, fetch and attend in one go."""
        return self._attends

    @property
    def _store_attends(self) -> bool:
        """Whether ops search one by one, and the store attends to what they find."""
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
        """As `protocol.Attends.attend`, for an index that holds a token."""
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
        """As `protocol.DecodesStep.decode_step`, for an index that holds a token."""
        executor, wrong = self._checked_step(queries, k)
        some = queries.detach(), token, resident, window
        return executor.decode_step(*some, k, wrong, graphs)

    def prepare_replay(self, resident: ResidentRows, *, k: int) -> object:
        """As `protocol.CapturesStep.prepare_replay`, for an index that holds a token."""
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        return self._capturing().prepare_replay(resident, k, self._flagged_queries())

    def captured_step(
        self, queries: Tensor, token: Rows, resident: ResidentRows, *, k: int
    ) -> Attended:
        """As `protocol.CapturesStep.captured_step`, for an index that holds a token."""
        _, wrong = self._checked_step(queries, k)
        return self._capturing().captured_step(queries.detach(), token, resident, k, wrong)

    def _capturing(self) -> CapturingExecutor:
        if not self._captures:
            raise ValueError(
                f"captured_step: got an index with backend={self.backend!r}, whose steps are not "
                "captured, allowed is one that offers CapturesStep"
            )
        return cast(CapturingExecutor, self._executor)

    def new_batch(self) -> IndexBatch:
        """As `protocol.JoinsBatch.new_batch`."""
        return self._joining().new_batch()

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """As `protocol.JoinsBatch.batch_row`."""
        _, wrong = self._checked_step(queries, k)
        if self._batch != 1:
            raise ValueError(f"batch_row: got a batch of {self._batch}, allowed is 1")
        return self._joining().batch_row(wrong)

    def _joining(self) -> JoiningExecutor:
        if not self._joins:
            raise ValueError(
                f"batch_row: got an index with backend={self.backend!r}, whose steps take no "
                "others' rows, allowed is one that offers JoinsBatch"
            )
        return cast(JoiningExecutor, self._executor)

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
        wrong = self._flagged_queries()
        if wrong is None:
            self._check_finite("queries", queries)
        return executor, wrong

    def _flagged_queries(self) -> Tensor | None:
        """Where kernels tell of queries that are not finite, which they see anyway; or None."""
        if self._defers and self._check is not False:
            return self._flag("queries", check.ALLOWED_NUMBER)
        return None

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As `protocol.Attends.attend_hits`, for an index that holds a token."""
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

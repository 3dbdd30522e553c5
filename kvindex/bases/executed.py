"""`ExecutedIndex`: base of indexes whose search and attention can run as compiled kernels.

The kernels are called by an executor (`protocol.Executor`). The executor owns the data that the
kernels read, except the rows. The index checks arguments and passes its new contents to the
executor after every change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core import backend, check
from kvindex.core.protocol import (
    AppendsAsync,
    Attended,
    Attends,
    CapturesAll,
    CapturesStep,
    CapturesTokens,
    Contents,
    DecodesStep,
    EncodesBlocks,
    ErrorLimit,
    Executor,
    Hits,
    IndexBatch,
    JoinsBatch,
    LimitsSteps,
    Rows,
)
from kvindex.core.resident import ResidentRows

CHECKED = torch.zeros((), dtype=torch.int32)
"""Passed as `wrong` to an executor that raises errors itself (`Executor.checks_tokens`)."""


@runtime_checkable
class CapturingExecutor(Protocol):
    """An executor (it calls the kernels of an index) whose decode steps can be captured in a CUDA
    graph of the caller.
    """

    def prepare_replay(self, resident: ResidentRows, k: int, wrong: Tensor | None) -> object:
        """Prepare the capture or a replay of a decode step (see `CapturesStep.prepare_replay`).

        wrong: an int32 tensor `[]` that kernels set to 1 if a query is not finite; None for no
        check.
        """
        ...

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        k: int,
        wrong: Tensor | None,
    ) -> Attended:
        """Run a decode step that can be captured in a CUDA graph (see
        `CapturesStep.captured_step`).

        wrong: an int32 tensor `[]` that kernels set to 1 if a query is not finite; None for no
        check.
        """
        ...


@runtime_checkable
class SeveralTokensExecutor(Protocol):
    """An executor whose decode steps of several tokens can be captured in a CUDA graph."""

    @property
    def captures_tokens(self) -> bool:
        """True if its kernels support the index and its batch size."""
        ...

    def prepare_tokens(
        self,
        resident: ResidentRows,
        k: int,
        tokens: int,
        wrong: Tensor | None,
        limit: ErrorLimit | None = None,
    ) -> object:
        """Prepare the capture or a replay (see `CapturesTokens.prepare_tokens`).

        wrong: an int32 tensor `[]` that kernels set to 1 if a query is not finite; None for no
        check. limit: see `LimitsSteps`.
        """
        ...

    def captured_tokens(
        self,
        queries: Tensor,
        tokens: Rows,
        resident: ResidentRows,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run a decode step of several tokens (see `CapturesTokens.captured_tokens`)."""
        ...


@runtime_checkable
class AllRowsExecutor(Protocol):
    """An executor whose decode steps with full attention can be captured in a CUDA graph."""

    @property
    def captures_all(self) -> bool:
        """True if its kernels support the index, its rows and its batch size."""
        ...

    def prepare_all(
        self, resident: ResidentRows, tokens: int, skip: int, masked: bool = False
    ) -> object:
        """Prepare the capture or a replay (see `CapturesAll.prepare_all`)."""
        ...

    def captured_all(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Run a decode step with full attention (see `CapturesAll.captured_all`)."""
        ...


@runtime_checkable
class JoiningExecutor(Protocol):
    """An executor that can run decode steps of several indexes in one batch.

    An executor calls the kernels of an index.
    """

    def new_batch(self) -> IndexBatch:
        """Create an object that runs decode steps of several indexes.

        See `JoinsBatch.new_batch`.
        """
        ...

    def batch_row(self, wrong: Tensor | None) -> object:
        """Return this index's data for a decode step that runs several indexes in one batch.

        See `JoinsBatch.batch_row`. wrong: an int32 tensor `[]` that kernels set to 1 if a query is
        not finite; None for no check.
        """
        ...


@runtime_checkable
class LimitingExecutor(Protocol):
    """An executor whose decode steps can choose the number of rows by their expected error.

    Its methods `attend`, `decode_step`, `prepare_replay` and `captured_step` have a further
    argument, `limit`.
    """

    @property
    def limits_steps(self) -> bool:
        """True if its kernels support the options of the index."""
        ...


class ExecutedIndex(BaseIndex):
    """Base of indexes that have an executor, an object that runs search and attention as kernels.

    The constructor of a subclass sets `_executor` (`core.backend.accelerate`) after calling
    `super().__init__`. The subclass calls `_inform_executor` after every change.

    Attributes:
        block_tokens: Number of tokens that are encoded together; 1 if each key is encoded alone.
    """

    block_tokens = 1

    _executor: Executor | None = None
    _attends = False  # True if the executor can attend; set after every change
    _captures = False  # True if a caller can capture decode steps of the executor in a CUDA graph
    _captures_tokens = False  # the same for decode steps of several tokens
    _captures_all = False  # the same for steps that attend to all rows
    _joins = False  # True if the executor can run decode steps in one batch with other indexes
    _limits = False  # True if decode steps of the executor can have a limit of the error
    _usual: object = None  # shape, dtype and device of the queries that were checked last
    _usual_limit: tuple[ErrorLimit | None, int | None] = None, None  # checked last, and the batch

    def _inform_executor(self, contents: Contents) -> None:
        if self._executor:
            self._executor = self._executor.update(contents)
            self._attends = self._executor.attends
            self._captures = self._attends and isinstance(self._executor, CapturingExecutor)
            self._joins = self._attends and isinstance(self._executor, JoiningExecutor)
            limiting = self._executor
            limits = isinstance(limiting, LimitingExecutor) and limiting.limits_steps
            self._limits = self._attends and limits
            several = self._executor
            captures = isinstance(several, SeveralTokensExecutor) and several.captures_tokens
            self._captures_tokens = self._attends and captures
            entire = self._executor
            self._captures_all = isinstance(entire, AllRowsExecutor) and entire.captures_all

    def _runs_alone(self, name: str) -> bool:
        executor = self._executor
        exclusive = executor is not None and not executor.searches_at_once
        return exclusive or super()._runs_alone(name)

    def _offers(self, wanted: type) -> bool:
        if wanted is DecodesStep or wanted is Attends:
            return self.attends or (wanted is Attends and self._store_attends)
        if wanted is CapturesStep:
            return self._captures
        if wanted is CapturesTokens:
            return self._captures_tokens
        if wanted is CapturesAll:
            return self._captures_all
        if wanted is JoinsBatch:
            return self._joins
        if wanted is LimitsSteps:
            return self._limits
        if wanted is EncodesBlocks:
            return self.block_tokens > 1
        return self.supports_async_append if wanted is AppendsAsync else super()._offers(wanted)

    @property
    def supports_async_append(self) -> bool:
        """True if an append can run concurrently with searches.

        In this case kernels write the new codes after the existing ones, and the append does not
        wait for the device.
        """
        return self._executor is not None and self._executor.appends_async

    @property
    def attends(self) -> bool:
        """True if kernels search, fetch and attend in one call."""
        return self._attends

    @property
    def _store_attends(self) -> bool:
        """True if there is no executor, but the row store can compute attention."""
        return self._executor is None and self._attending_store() is not None

    def _cache_use(self) -> tuple[int, int, int]:
        executor = self._executor
        return executor.cache_use() if executor else super()._cache_use()

    def _paths(self) -> list[str]:
        if self._executor:
            return [*super()._paths(), self._executor.explain()]
        why = backend.refusal(self.backend, self.geometry, self.config)
        return [*super()._paths(), f"executor: none, op by op ({why})"]

    def attend(
        self, queries: Tensor, resident: ResidentRows, *, k: int, limit: ErrorLimit | None = None
    ) -> Attended:
        """Search, and attend to the selected rows and to the rows of `resident`.

        The index must not be empty (see `protocol.Attends.attend`).

        Args:
            queries: `[B, H, D]`.
            resident: Rows of the attention sink and the local window.
            k: Rows to select per KV head, at least 1.
            limit: Select fewer rows if the error is then expected to be within this limit (see
                `protocol.LimitsSteps`), or None.

        Returns:
            Attention over the selected rows and the rows of `resident`.
        """
        within = self._within(limit)
        if self._store_attends:
            return super().attend(queries, resident, k=k)
        executor, wrong = self._checked_step(queries, k)
        return executor.attend(queries.detach(), resident, k, wrong, **within)

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        *,
        k: int,
        graphs: bool = True,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run one decode step. The index must not be empty.

        See `protocol.DecodesStep.decode_step`, and `protocol.LimitsSteps` for `limit`.
        """
        within = self._within(limit)
        if not self.checks_tokens:
            executor, wrong = self._checked_step(queries, k)
            some = queries.detach(), token, resident, window
            return executor.decode_step(*some, k, wrong, graphs, **within)
        executor = self._checked_shapes(queries, k)
        return executor.decode_step(queries, token, resident, window, k, CHECKED, graphs, **within)

    @property
    def checks_tokens(self) -> bool:
        """True if `decode_step` raises ValueError for a key that is out of range."""
        executor = self._executor
        return executor is not None and executor.checks_tokens and self._check is not False

    def prepare_replay(
        self, resident: ResidentRows, *, k: int, limit: ErrorLimit | None = None
    ) -> object:
        """Prepare the capture or a replay of a decode step in a CUDA graph.

        The index must have at least one token. See `protocol.CapturesStep.prepare_replay`, and
        `protocol.LimitsSteps` for `limit`.
        """
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        prepare, within = self._capturing().prepare_replay, self._within(limit)
        return prepare(resident, k, self._flagged_queries(), **within)

    def captured_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        *,
        k: int,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run a decode step that the caller can capture in a CUDA graph.

        See `protocol.CapturesStep.captured_step`, and `protocol.LimitsSteps` for `limit`.
        """
        _, wrong = self._checked_step(queries, k)
        step, within = self._capturing().captured_step, self._within(limit)
        return step(queries.detach(), token, resident, k, wrong, **within)

    def prepare_tokens(
        self,
        resident: ResidentRows,
        *,
        k: int,
        tokens: int,
        limit: ErrorLimit | None = None,
    ) -> object:
        """Prepare the capture or a replay of a decode step of several tokens.

        The index must have at least one token. See `protocol.CapturesTokens.prepare_tokens`, and
        `protocol.LimitsSteps` for `limit`.
        """
        check.at_least("k", k, 1)
        check.at_least("tokens", tokens, 1)
        check.at_least("len(index)", len(self), 1)
        prepare, within = self._capturing_tokens().prepare_tokens, self._within(limit)
        return prepare(resident, k, tokens, self._flagged_queries(), **within)

    def captured_tokens(
        self,
        queries: Tensor,
        tokens: Rows,
        resident: ResidentRows,
        *,
        limit: ErrorLimit | None = None,
    ) -> Attended:
        """Run a decode step of several tokens that the caller can capture in a CUDA graph.

        See `protocol.CapturesTokens.captured_tokens`, and `protocol.LimitsSteps` for `limit`. Its
        `resident_lse` is float32 `[B·T, H]` here.
        """
        self._check_tokens(queries)
        step, within = self._capturing_tokens().captured_tokens, dict[str, Any]()
        if limit is not None:
            within = self._within(replace(limit, resident_lse=None)) | dict(limit=limit)
            if (lse := limit.resident_lse) is not None:
                shape: dict[str, int | None] = {"B·T": len(queries), "H": self.geometry.q_heads}
                check.tensor("limit.resident_lse", lse, shape, torch.float32, queries.device)
        return step(queries.detach(), tokens, resident, **within)

    def prepare_all(
        self, resident: ResidentRows, *, tokens: int, skip: int, masked: bool = False
    ) -> object:
        """Prepare the capture or a replay of a decode step that attends to all tokens.

        The index must have at least one token. See `protocol.CapturesAll.prepare_all`.
        """
        check.at_least("tokens", tokens, 1)
        check.at_least("skip", skip, 0)
        if masked and skip:
            raise ValueError(f"skip: got {skip} with masked=True, allowed is 0")
        check.at_least("len(index)", len(self), 1)
        return self._capturing_all().prepare_all(resident, tokens, skip, masked)

    def captured_all(self, queries: Tensor, tokens: Rows, resident: ResidentRows) -> Attended:
        """Run a decode step that attends to all tokens, and that the caller can capture.

        See `protocol.CapturesAll.captured_all`.
        """
        self._check_tokens(queries)
        return self._capturing_all().captured_all(queries.detach(), tokens, resident)

    def _check_tokens(self, queries: Tensor) -> None:
        """Check queries `[B·T, H, D]` of several tokens of each sequence."""
        g, batch = self.geometry, self._batch or 1
        shape = {"B·T": None, "H": g.q_heads, "D": g.head_dim}
        check.tensor("queries", queries, shape, g.dtype, g.device)
        if not len(queries) or len(queries) % batch:
            raise ValueError(
                f"queries: got {len(queries)} tokens, allowed is a multiple of {batch} sequences"
            )

    def _capturing_all(self) -> AllRowsExecutor:
        if not self._captures_all:
            raise ValueError(
                f"captured_all: got an index with backend={self.backend!r} and {self._batch} "
                "sequences, whose steps with full attention cannot be captured in a CUDA graph; "
                "call attend_all instead"
            )
        return cast(AllRowsExecutor, self._executor)

    def _capturing_tokens(self) -> SeveralTokensExecutor:
        if not self._captures_tokens:
            raise ValueError(
                f"captured_tokens: got an index with backend={self.backend!r} and "
                f"{self._batch} sequences, whose decode steps of several tokens cannot be captured "
                "in a CUDA graph; attend for each token instead"
            )
        return cast(SeveralTokensExecutor, self._executor)

    def _within(self, limit: ErrorLimit | None) -> dict[str, Any]:
        """Return the argument `limit` of the executor's methods, or nothing if there is no limit.

        Raise ValueError if the executor does not support it, or if a shape, dtype or device does
        not fit.
        """
        if limit is None:
            return {}
        if not self._limits:
            raise ValueError(
                f"limit: got a limit of the error, allowed is None for an index with backend="
                f"{self.backend!r} and these options; call search_within and attend_hits instead"
            )
        usual, batch = self._usual_limit
        if usual is not limit or batch != self._batch:
            self._check_limit(limit)
            self._usual_limit = limit, self._batch
        return {"limit": limit}

    def _check_limit(self, limit: ErrorLimit) -> None:
        """Raise ValueError if a shape, dtype or device in `limit` does not fit."""
        g = self.geometry
        sizes: dict[str, int | None] = {"B": self._batch, "G": g.kv_heads, "H": g.q_heads}
        parts = {"variance": (limit.variance, "BG"), "resident_lse": (limit.resident_lse, "BH")}
        for name, (tensor, axes) in parts.items():
            if tensor is not None or name == "variance":
                shape = {axis: sizes[axis] for axis in axes}
                check.tensor(f"limit.{name}", tensor, shape, torch.float32, g.device)

    def _capturing(self) -> CapturingExecutor:
        if not self._captures:
            raise ValueError(
                f"captured_step: got an index with backend={self.backend!r}, whose decode steps "
                "cannot be captured in a CUDA graph; call decode_step or attend instead"
            )
        return cast(CapturingExecutor, self._executor)

    def new_batch(self) -> IndexBatch:
        """Create an object that runs decode steps of several indexes.

        See `protocol.JoinsBatch.new_batch`.
        """
        return self._joining().new_batch()

    def batch_row(self, queries: Tensor, *, k: int) -> object:
        """Return this index's data for a decode step that runs several indexes in one batch.

        This index must have batch size 1 (see `protocol.JoinsBatch.batch_row`).
        """
        _, wrong = self._checked_step(queries, k)
        if self._batch != 1:
            raise ValueError(f"batch_row: got an index with {self._batch} sequences, allowed is 1")
        return self._joining().batch_row(wrong)

    def _joining(self) -> JoiningExecutor:
        if not self._joins:
            raise ValueError(
                f"batch_row: got an index with backend={self.backend!r}, whose decode steps cannot "
                "be batched with those of other indexes; call decode_step or attend instead"
            )
        return cast(JoiningExecutor, self._executor)

    def _checked_step(self, queries: Tensor, k: int) -> tuple[Executor, Tensor | None]:
        """Check the arguments of a decode step, and return the executor and the error flag of the
        queries.

        Kernels set the flag to 1 if a query is not finite. The flag is None if kernels need not
        check.
        """
        executor, wrong = self._checked_shapes(queries, k), self._flagged_queries()
        if wrong is None:
            self._check_finite("queries", queries)
        return executor, wrong

    def _checked_shapes(self, queries: Tensor, k: int) -> Executor:
        """Check the arguments of a decode step, except the numbers in the queries.

        Return the executor.
        """
        executor, usual = self._attending(), (check.kind(queries), self._batch)
        check.at_least("k", k, 1)
        check.at_least("len(index)", len(self), 1)
        if usual != self._usual:
            g = self.geometry
            shape = {"B": self._batch, "H": g.q_heads, "D": g.head_dim}
            self._check_tensor("queries", queries, shape)
            self._usual = usual
        return executor

    def _flagged_queries(self) -> Tensor | None:
        """Return the flag that kernels set if a query is not finite, or None if kernels need not
        check.
        """
        if self._defers and self._check is not False:
            return self._flag("queries", check.ALLOWED_NUMBER)
        return None

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows of `hits` and of `resident`. The index must have at least one token.

        See `protocol.Attends.attend_hits`.

        Args:
            queries: `[B, H, D]`.
            hits: Result of a search.
            resident: Rows of the attention sink and the local window.
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
                f"attend: got an index with backend={self.backend!r}, but no attention kernel "
                "supports its rows and options; call search and fetch instead, which every index "
                "supports"
            )
        return executor

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Compile kernels and allocate buffers for searches of `k` rows among up to `tokens`
        tokens.

        Without this call, the first search compiles the kernels and allocates the buffers. Call
        this before a search is captured in a CUDA graph, because the graph keeps using the buffers
        that exist at capture (docs/cuda.md). The call does nothing if the index runs without fused
        kernels.

        Args:
            k: Rows to select per KV head.
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
        """Allocate the memory for codes and rows of `tokens` tokens in total.

        If the length of an answer is known, call this before its first token. Rows on the host are
        in pinned memory, and pinning takes so long that decode steps would wait for it. The call
        does nothing if the index is empty or runs without fused kernels.

        Args:
            tokens: Number of tokens.

        Raises:
            ValueError: The number is out of range or more than is supported.
            MemoryError: The memory limit of the store would be exceeded. The index is unchanged.
        """
        check.at_least("tokens", tokens, 1)
        if self._executor and len(self):
            self._store.reserve_tokens(tokens)  # first, because it may raise MemoryError
            self._executor.reserve(tokens)

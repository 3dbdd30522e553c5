"""Run ParisKV on a CPU with compiled kernels: append, search, attention and decode steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Codes, Contents, ErrorLimit, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu import threads
from kvindex.cpu.pariskv.constants import Constants
from kvindex.cpu.pariskv.sampling import ErrorTerms, SampledStages, seeds_of
from kvindex.cpu.pariskv.sign_votes import Found, Stages
from kvindex.cpu.pariskv.supported import unreadable
from kvindex.cpu.pariskv.whole_step import WholeStep
from kvindex.cpu.state import ResidentState, State
from kvindex.pariskv import row_budget
from kvindex.pariskv.block_layout import BLOCK
from kvindex.pariskv.config import ParisKVConfig
from kvindex.storage.columns import BlockColumns


class ParisKVExecutor:
    """Runs the index `ParisKV` on a CPU (implements `kvindex.core.protocol.Executor`)."""

    encodes, appends_async, searches_at_once = True, False, True
    checks_tokens = True
    length = None

    _has_tables = True  # whether `WholeStep` can run the stages

    _contents: Contents  # set by `update`
    _most: int  # largest number of valid tokens of a sequence

    def __init__(
        self, geometry: Geometry, config: ParisKVConfig, constants: Constants, codes: BlockColumns
    ) -> None:
        self._geometry, self._config, self._constants = geometry, config, constants
        self.codes = codes
        self._ready: Stages | None = None
        self._resident: ResidentState | None = None
        self._step: WholeStep | None = None

    @classmethod
    def of(
        cls, geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
    ) -> ParisKVExecutor:
        """Create the executor of an empty index."""
        constants = Constants.of(geometry, config, rotation, levels)
        block = config.center or (BLOCK if config.weights == "log" else 1)
        return cls(geometry, config, constants, BlockColumns(block))

    @property
    def attends(self) -> bool:
        """True if a kernel can compute attention over the rows of the store."""
        return unreadable(self._contents.rows) is None

    def explain(self) -> str:
        """Describe how the index runs, encodes keys and computes attention, in one line each."""
        return "\n".join(
            [
                "executor: compiled by Numba",
                f"append: codes are made {'by one kernel' if self.encodes else 'op by op'}",
                f"attend: {unreadable(self._contents.rows) or 'in one go'}",
            ]
        )

    def cache_use(self) -> tuple[int, int, int]:
        """Return zeros, because rows are in the CPU's memory and need no cache."""
        return 0, 0, 0

    def update(self, contents: Contents) -> ParisKVExecutor:
        """Return the executor to use after the contents of the index have changed.

        This executor stores the new contents and is returned. Only if the codes are in a different
        object than before, a new executor is returned.
        """
        if contents.codes is not self.codes:
            if not isinstance(contents.codes, BlockColumns):
                name = type(contents.codes).__name__
                raise TypeError(f"codes: got {name}, allowed is BlockColumns")
            other = type(self)(self._geometry, self._config, self._constants, contents.codes)
            return other.update(contents)
        self._contents, self._ready, self._step = contents, None, None
        self._most = int(contents.counts.max()) if len(contents.counts) else 0
        return self

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Codes:
        """Encode the keys of an append. The index stores the codes when it completes the append."""
        return self._constants.encoder(keys, valid, wrong) if keys.shape[2] else {}

    def encoded(self, keys: Tensor, valid: Tensor | None) -> Codes | None:
        """Encode keys and return their codes."""
        return self._constants.encoder(keys, valid)

    def discard(self) -> None:
        """Cancel an append. There is nothing to undo, because `prepare` stores nothing."""

    def warm_up(self, k: int, tokens: int) -> None:
        """Do nothing: a background thread compiles kernels, and buffers grow when needed."""

    def reserve(self, tokens: int) -> None:
        """Do nothing: the memory for codes grows when needed."""

    def search(self, queries: Tensor, k: int) -> Hits:
        """Select `k` rows per KV head for queries `[B, H, D]`."""
        # The variable `stages` references the memory that kernels read, so that this memory is not
        # freed if another thread calls `update` meanwhile.
        folded, stages = self._folded(queries), self._stages
        hits, find = self._finding(stages, folded, k)
        threads.run(find, stages.most_parts(len(folded)))
        shape = (len(queries), self._geometry.kv_heads, k)
        ids, scores = torch.from_numpy(hits.ids), torch.from_numpy(hits.scores)
        return Hits(ids.view(shape), scores.view(shape), hits.weights(len(queries)))

    @property
    def limits_error(self) -> bool:
        """True if `search_within` supports the options of the index."""
        return self._config.sampling != "none"

    def search_within(self, queries: Tensor, k: int, limit: ErrorLimit) -> Hits:
        """Sample as many rows per KV head as a limit of the error asks for, at most `k`."""
        folded, stages = self._folded(queries), self._stages
        assert isinstance(stages, SampledStages)
        stages = replace(stages, limit=ErrorTerms.of(limit, self._geometry.group_size))
        candidates = row_budget.candidates(self._config, self._contents.counts, k)
        limits = candidates.repeat_interleave(self._geometry.kv_heads).numpy()
        asked = stages.prepare_query(folded)
        hits, find = stages.find(asked, stages.scan(asked), k, limits)
        threads.run(find, stages.most_parts(len(folded)))
        shape = (len(queries), self._geometry.kv_heads, k)
        ids, scores = torch.from_numpy(hits.ids), torch.from_numpy(hits.scores)
        return Hits(ids.view(shape), scores.view(shape), hits.weights(len(queries)))

    def attend(
        self, queries: Tensor, resident: ResidentRows, k: int, wrong: Tensor | None = None
    ) -> Attended:
        """Select `k` rows per KV head, and attend to them and to the rows in `resident`.

        `resident` contains the rows of sink and window, which are not selected by a search.
        """
        folded, stages = self._folded(queries), self._stages
        # Kernels need a buffer for at least one selected row, even if the index has no valid row.
        hits, find = self._finding(stages, folded, max(1, min(k, self._most)))
        rows, resident_state = (
            (hits.ids, hits.weights(len(queries))),
            self._resident_state(resident),
        )
        output, lse, attend = stages.attend(folded, *rows, resident, resident_state)

        def part(i: int, parts: int) -> None:
            find(i, parts)
            attend(i, parts)

        threads.run(part, stages.most_parts(len(folded)))
        return self._attended(queries, output, lse, hits.found)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """Attend to the rows in `hits` and in `resident` (sink and window), without a search."""
        folded, stages, resident_state = (
            self._folded(queries),
            self._stages,
            self._resident_state(resident),
        )
        ids = hits.ids.contiguous().view(len(folded), -1).numpy()
        output, lse, attend = stages.attend(folded, ids, hits.log_weight, resident, resident_state)
        threads.run(attend, stages.most_parts(len(folded)))
        return self._attended(queries, output, lse, (ids >= 0).sum(1, dtype=np.int32))

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        k: int,
        wrong: Tensor | None,
        graphs: bool,
    ) -> Attended:
        """Add a token to the rows of sink and window, search, and attend.

        The arguments are those of `Executor.decode_step`.
        """
        check_token(token, resident, window)
        step = self._whole_step(k, resident)
        if step is not None:
            attended = step.run(queries, token, resident, window, wrong is not None)
            if attended is not None:
                return attended
        if wrong is not None:
            check.finite("queries", queries)
            check.finite("keys", token.keys)
        stage_token(token, resident, window)
        return self.attend(queries.detach(), resident, k)

    def _whole_step(self, k: int, resident: ResidentRows) -> WholeStep | None:
        """Return the object that runs a decode step on one thread with prepared kernel arguments.

        The object is reused as long as its arguments are valid. The result is None if a decode step
        uses several threads, or if `WholeStep` does not support the stages of the search.
        """
        stages, k = self._stages, max(1, min(k, self._most))
        state = self._resident_state(resident)
        if self._step is None or not self._step.serves(stages, k, state):
            limits = self._limits(stages, k)
            self._check_resident(resident)
            if not self._has_tables or stages.most_parts(len(limits)) > 1:
                return None
            self._step = WholeStep.of(stages, k, limits, resident, state)
        return self._step

    def _check_resident(self, resident: ResidentRows) -> None:
        """Raise ValueError if shape, dtype or device of the rows in `resident` does not fit."""
        g, rows = self._geometry, resident.rows
        shape = len(self._contents.counts), g.kv_heads, resident.room, g.head_dim + g.value_dim
        if rows.shape != shape or rows.dtype != g.dtype or not rows.is_cpu:
            raise ValueError(
                f"resident: got {rows.dtype} {tuple(rows.shape)} on {rows.device}, allowed is "
                f"{g.dtype} {shape} on cpu"
            )

    def _folded(self, queries: Tensor) -> np.ndarray:
        """Convert queries `[B, H, D]` to a float32 array `[B·G, g, D]`, grouped by KV head."""
        g = self._geometry
        floats: np.ndarray = queries.float().contiguous().numpy()
        return floats.reshape(-1, g.group_size, g.head_dim)

    @property
    def _stages(self) -> Stages:
        """Object that runs the stages of a search on the current codes and rows of the index."""
        if self._ready is None:
            constants, heads = self._constants, self._geometry.kv_heads
            contents = replace(self._contents, opened=self._opened())
            state = State.of(contents, self.codes, heads, constants.factors)
            made = self._geometry, self._config, constants, state
            if self._config.sampling == "none":
                self._ready = Stages(*made)
            else:
                seeds = seeds_of(contents, self.codes, self._config.seed)
                self._ready = SampledStages(*made, seeds)
        return self._ready

    def _opened(self) -> Codes:
        """Encode the keys of the last, partly filled block; return `{}` if all blocks are full."""
        contents, start = self._contents, len(self.codes)
        if start == contents.length:
            return {}
        valid = None if contents.valid is None else contents.valid[:, start:]
        return self._constants.encoder(contents.opened["open_keys"], valid)

    def _resident_state(self, resident: ResidentRows) -> ResidentState:
        self._resident = ResidentState.of(resident, self._resident)
        return self._resident

    def _limits(self, stages: Stages, k: int) -> np.ndarray:
        """Return how many candidates a search for `k` rows takes, int64 `[B·G]`.

        The result has one number for each KV head of each sequence.
        """
        limits = stages.state.limits
        if k not in limits:
            counts = self._contents.counts.tolist()
            candidates = [self._config.candidates(n, k) for n in counts]
            limits[k] = np.repeat(candidates, self._geometry.kv_heads)
        return limits[k]

    def _finding(self, stages: Stages, queries: np.ndarray, k: int) -> tuple[Found, threads.Part]:
        """Compute the votes (coarse scores) of all keys. The rows are selected later.

        Args:
            stages: The stages of the search. The caller must keep a reference to this object until
                the rows are selected, because the kernels read memory that it references.
            queries: Float32 `[B·G, g, D]`.
            k: Number of rows to select.

        Returns:
            A `Found` object, and a function that selects the rows and stores them in this object.
            Each thread calls the function for some of the groups (`threads.run`). A group is the
            query heads of one KV head of one sequence.
        """
        asked = stages.prepare_query(queries)
        return stages.find(asked, stages.scan(asked), k, self._limits(stages, k))

    def _attended(
        self, queries: Tensor, output: np.ndarray, lse: np.ndarray, found: np.ndarray
    ) -> Attended:
        g, (batch, heads, _) = self._geometry, queries.shape
        return Attended(
            torch.from_numpy(output.reshape(batch, heads, g.value_dim)).to(g.dtype),
            torch.from_numpy(lse.reshape(batch, heads)),
            torch.from_numpy(found.reshape(batch, -1)),
        )


def check_token(token: Rows, resident: ResidentRows, window: Rows) -> None:
    """Check the key and the value of a new token before they are written.

    Raises:
        ValueError: A shape, dtype or device does not fit, or the buffer `resident` is full.
    """
    batch, heads, room, wide = resident.rows.shape
    D, dtype = token.keys.shape[-1], resident.rows.dtype
    key, value = (batch, heads, 1, D), (batch, heads, 1, wide - D)
    given = token.keys, token.values, window.keys, window.values
    for tensor, shape in zip(given, (key, value, key, value), strict=True):
        if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
            names = "keys", "values", "window.keys", "window.values"
            name = next(name for name, one in zip(names, given, strict=True) if one is tensor)
            raise ValueError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, allowed is "
                f"{dtype} {shape} on cpu"
            )
    if len(resident) >= room:
        raise ValueError(
            f"resident: got {len(resident)} rows, allowed is below {room}, the size of its buffer"
        )


def stage_token(token: Rows, resident: ResidentRows, window: Rows) -> None:
    """Write the keys and values of a new token to `resident` and to `window`.

    If `check_token` raises an error, nothing is written.
    """
    check_token(token, resident, window)
    resident.add(token.keys, token.values, None)
    window.keys.copy_(token.keys)
    window.values.copy_(token.values)

"""An attention layer that stores old tokens in an index and new tokens in a window.

A token's id in the index is its position in the sequence. New tokens enter the window. When the
window is full, the newest `local_window` tokens stay, and the older ones move into the index. The
sink is the first tokens of the sequence that are not padding. Every query attends to the sink, so a
search need not return sink tokens: the index marks them as invalid (docs/pipeline/regions.md).

These classes implement the layer:

- `LayerContents`: the index and the window.
- `Updates`: when tokens move into the index.
- `Retrieval`: how a decoded token searches and attends.
- `SparsePrompt`: sparse attention of a prompt.
- `Tally`: counts for `traffic`.
- `CapturedSteps`: decode steps that a caller captures in a CUDA graph.
- `JoinedSteps`: decode steps that run together with those of other sequences.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    Attended,
    KVIndex,
    ObservesQueries,
    ReportsCoverage,
    ReportsRecipe,
    Rows,
)
from kvindex.core.resident import ResidentRows
from kvindex.core.transaction import Transactional
from kvindex.layer.arguments import (
    DEFAULT_K,
    check_bias,
    check_computed,
    check_finite,
    check_new_rows,
    check_plain,
    check_queries,
    check_rows,
    check_sparse,
    check_tokens,
    check_valid,
    check_visible,
    checked_rows,
    checked_sinks,
)
from kvindex.layer.captured import CapturedSteps, JoinedSteps
from kvindex.layer.chosen import attend_chosen, check_ids
from kvindex.layer.contents import LayerContents
from kvindex.layer.dense import attend_densely
from kvindex.layer.output_scale import FEWEST, NAMES, OutputScale
from kvindex.layer.retrieval import Retrieval, Wanted, output_of
from kvindex.layer.sparse import IndexedRows, SparsePrompt, StoredRows, check_prefill
from kvindex.layer.stats import Tally, Traffic
from kvindex.layer.updates import LAG, Updates, longest_buffer, unit_of
from kvindex.layer.window import Window
from kvindex.storage.layout import TensorSpec, check_layout
from kvindex.storage.recipe import Recipe, class_name
from kvindex.storage.saved import save_folder
from kvindex.storage.state import ABOUT, State, below, check_signed, length_and_batch, signed

SPARSE = "read_sparsely"
"""Name of the entry of a state that says that tokens were read with sparse attention. Their keys
and values in later layers differ from those of dense attention."""

SETTLING = frozenset({"state_dict", "__deepcopy__"})
"""Methods that only read the layer, except that they first finish a pending append. The append
changes the layer, so no other method may run at the same time."""


class AttentionLayer(Transactional):
    """An attention layer that keeps recent tokens in a window and older ones in an index.

    Each call of `step` appends tokens and computes their attention. Tokens of a prompt attend to
    all tokens before them. A decoded token attends to the sink (the first tokens that are not
    padding), to the `k` rows per KV head that the index finds for its query, and to the window (the
    newest tokens). A row is one token's key and value.

    When the window is full, its oldest tokens move into the index. If the index encodes blocks of
    tokens (`protocol.EncodesBlocks`) and `update_every` is a multiple of the block size, only whole
    blocks move. If the index can append concurrently with searches (`protocol.AppendsAsync`), a
    move ends `LAG` tokens after it began, and the window is up to `LAG` tokens longer.

    Args:
        index: An empty index.
        k: Rows that each query retrieves per KV head, or "auto" for as many as `error` asks for, at
            most 1,024.
        coverage: Retrieve fewer than `k` rows if fewer rows are estimated to have this fraction of
            the attention weight of the tokens in the index (`KVIndex.search`). None: retrieve `k`.
        error: Retrieve fewer than `k` rows if fewer rows are expected to give an error of the
            layer's output below this, relative to the size of its outputs. The number differs
            between KV heads and steps. None: retrieve `k`, or with `k="auto"` the same as 0.1. Only
            some indexes support it (`protocol.LimitsError`).
        sink: Number of sink tokens.
        local_window: Number of tokens that stay in the window when older ones move into the index.
        update_every: Number of new tokens after which tokens move into the index.
        dense_below: A decoded token attends to all tokens while the sequence is shorter than this.
            Old tokens move into the index all the same.
        search_up_to: `step` treats up to this many tokens as decoded tokens, whose queries search
            one after the other, for example to verify speculated tokens. `step` treats more tokens
            as a chunk of a prompt.
        update_phase: In [0, 1). Tokens move into the index when the length of the sequence modulo
            `update_every` equals `update_phase * update_every`. With different phases, the layers
            of a model move their tokens at different decode steps. If the index encodes blocks, a
            full block waits for that length. None: tokens move as soon as `update_every` new ones
            are in the window.
        graphs: Whether an index with `protocol.DecodesStep` may capture its decode step in a CUDA
            graph and replay the graph for later tokens. The results are the same.
        prefill: How the tokens of a prompt attend: "dense" to all tokens before them, or "sparse"
            to chosen blocks of 128 tokens (docs/prompts.md).
        prefill_mass: With `prefill="sparse"`, the fraction of the estimated attention weight that
            the chosen blocks of each query head have.
        prefill_last: With `prefill="sparse"`, number of tokens at the end of a prompt that attend
            to all tokens, for example those of a question after a long text.
        prefill_selector: With `prefill="sparse"`, how blocks are chosen: "sampled" by the exact
            attention of 32 of the 128 queries of a block, or "pooled" by the mean query of a block
            and the mean key of each block, which takes less time and loses more.

    Raises:
        ValueError: A size is out of range, the index is not empty, `coverage` or `error` is given
            and the index cannot estimate it, or both are given.
        TypeError: `index` is a name.

    Examples:
        ```python
        index = kvindex.create("pariskv", q_heads=32, kv_heads=8, head_dim=128)
        layer = AttentionLayer(index)
        output = layer.step(queries, keys, values)  # [B, H, T, Dv], from [B, H, T, D] and so on
        ```

    Source: Qi et al., ParisKV (ICML 2026), section 4.2.1.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        k: int | str = DEFAULT_K,
        coverage: float | None = None,
        error: float | None = None,
        sink: int = 64,
        local_window: int = 256,
        update_every: int = 256,
        dense_below: int = 2048,
        search_up_to: int = 1,
        update_phase: float | None = None,
        graphs: bool = True,
        prefill: str = "dense",
        prefill_mass: float = 0.95,
        prefill_last: int = 128,
        prefill_selector: str = "sampled",
    ) -> None:
        if isinstance(index, str):
            raise TypeError(
                f"index: got {index!r}, allowed is an empty index, for example the result of "
                f"kvindex.create({index!r}, q_heads=…, kv_heads=…, head_dim=…)"
            )
        self.k, self.error = checked_rows(k, coverage, error, index)
        self.coverage = None if coverage is None else check.within("coverage", coverage, 0, 1)
        self.dense_below = check.at_least("dense_below", dense_below, 0)
        self.graphs = check.flag("graphs", graphs)
        tells = capability(index, ReportsCoverage)
        if coverage is not None and tells is not None:
            tells.check_coverage(coverage)
        self.sink = check.at_least("sink", sink, 0)
        self.local_window = check.at_least("local_window", local_window, 0)
        self.update_every = check.at_least("update_every", update_every, 1)
        self.search_up_to = check.at_least("search_up_to", search_up_to, 1)
        how: dict[str, Any] = dict(prefill_mass=prefill_mass, prefill_last=prefill_last)
        check_prefill(prefill, how | {"prefill_selector": prefill_selector})
        self.prefill, self.prefill_mass, self.prefill_last = prefill, prefill_mass, prefill_last
        self.prefill_selector = prefill_selector
        self._sparse = SparsePrompt(prefill_selector, prefill_mass, prefill_last)
        self._scale = OutputScale()
        if prefill == "sparse":
            check_sparse(index.geometry)
        if update_phase is not None and not 0 <= update_phase < 1:
            raise ValueError(
                f"update_phase: got {update_phase}, allowed is a number in [0, 1), or None"
            )
        self.update_phase = update_phase
        if len(index):
            count = len(index)
            raise ValueError(f"index: got an index with {count} tokens, allowed is an empty index")

        unit = self._unit(index)
        turns = dict[str, Any](update_every=update_every, update_phase=update_phase)
        most = longest_buffer(index, unit, **turns)
        room = local_window + most + LAG + search_up_to - 1
        sizes = dict(sink_size=sink, local_size=local_window, room=room)
        self._contents = LayerContents(index, Window(index.geometry, unit=unit, **sizes))
        self._tally = Tally(histogram=self.error is not None)
        self._updates = Updates(self._contents, most=most, **turns)
        self._retrieval = Retrieval(self._contents, self._tally)
        counting = self._tally, self._retrieval.row_bytes
        self._captured = CapturedSteps(self._contents, self._updates, *counting)
        self._joined = JoinedSteps(self._contents, *counting)
        self._searched = 0  # tokens of the last call of `step` if it searched the index, else 0
        self._speculated = 0  # inside `speculating`, its number of tokens
        self._full = False  # whether decoded tokens attend to all tokens (`attending_fully`)
        self._usual: object = None  # shapes and dtypes of the last tensors that passed the checks

    def _unit(self, index: KVIndex) -> int:
        return unit_of(index, self.update_every)

    # What the layer contains

    @property
    def index(self) -> KVIndex:
        """The index with the older tokens.

        Assigning to this attribute replaces the index, for example by a wrapper around it.
        """
        return self._contents.index

    @index.setter
    def index(self, index: KVIndex) -> None:
        self._contents.index = index

    @property
    def _window(self) -> Window:
        return self._contents.window

    def __len__(self) -> int:
        """Number of tokens in the index and in the window together, `N`."""
        return len(self._contents)

    @property
    def tokens(self) -> int:
        """Number of tokens in the layer, equal to `len(self)` but safe to read from any thread.

        The number is correct even while tokens move from the window into the index.
        """
        return self._contents.tokens

    @property
    def batch_size(self) -> int:
        """Number of sequences in the batch, `B`. It is 0 before the first token."""
        return self._window.batch_size

    @property
    def valid(self) -> Tensor | None:
        """Mask bool `[B, N]`: False for padding tokens. None if no token is padding."""
        return self._window.valid

    @property
    def traffic(self) -> Traffic:
        """Numbers of rows (keys and values) that attention has read for queries that searched."""
        return self._tally.traffic

    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use. Any thread may call this at any time.

        Returns:
            The bytes of the index per memory tier, as `KVIndex.nbytes` returns them, and under
            `window` the bytes of the sink, of the newest tokens, and of the mean keys that sparse
            attention of prompts uses.
        """
        nbytes = self._contents.nbytes()
        return nbytes | {"window": nbytes["window"] + self._sparse.nbytes}

    @property
    def prefill_fraction(self) -> float | None:
        """Fraction of the blocks of keys that sparse attention of prompts has read.

        1 is the number of blocks that dense attention reads. Tokens that attended densely do not
        count. None if all tokens did. On a GPU, the host waits for the device.
        """
        return self._sparse.fraction

    @property
    def measuring(self) -> bool:
        """True if decode steps do not search yet, because `error` or `k="auto"` needs the values
        and outputs of more tokens."""
        return self.error is not None and not self._scale.known

    def set_rows(self, k: int | str, *, error: float | None = None) -> None:
        """Change how many rows later queries retrieve. The tokens of the layer stay, and `traffic`
        counts from 0.

        With "auto" or `error`, sizes of values and outputs must have been measured. A layer that
        was created with a fixed number has not measured any, so its decode steps attend to all
        tokens until they have been measured (`measuring`).

        Args:
            k: Rows per KV head, or "auto", as for the constructor.
            error: Allowed error of the layer's output, as for the constructor.

        Raises:
            ValueError: An argument is out of range, or the index or `coverage` does not allow it.
        """
        self.k, self.error = checked_rows(k, self.coverage, error, self.index)
        self._tally.restart(histogram=self.error is not None)

    def expect_prompt(self, length: int) -> None:
        """Announce the length of the sequence at the end of the prompt.

        With `prefill="sparse"`, the last `prefill_last` tokens before this length attend to all
        tokens. Without this call, the last tokens of each chunk do.

        Args:
            length: Number of tokens, those that the layer has included.

        Raises:
            ValueError: `length` is less than the number of tokens in the layer.
        """
        self._sparse.end = check.at_least("length", length, len(self))

    # Steps

    def decodes(self, tokens: int) -> bool:
        """Return True if a call of `step` with this number of tokens is a decode step.

        Otherwise, the call reads a part of a prompt.
        """
        return len(self) > 0 and tokens <= max(self.search_up_to, self._speculated)

    def step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        bias: Tensor | None = None,
        sink_logits: Tensor | None = None,
        ids: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Append `T` tokens, and return their causal attention.

        If `T` is larger than `search_up_to`, the tokens are a chunk of a prompt, and attend exactly
        to all tokens before them. Otherwise they are decoded tokens, whose queries search the index
        one after the other. As long as the sequence has fewer than `dense_below` tokens, decoded
        tokens attend to all tokens.

        After a call with several decoded tokens, no token moves into the index before the next
        call. So the caller can remove rejected tokens with `truncate`. If the index learns from
        queries, it does not forget the queries of these tokens. A call that fails leaves the layer
        unchanged.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            valid: Bool `[B, T]`, False for padding at any position; None where no token is padded.
            bias: `[B, H, T, N + T]`, added to the logits. Searches ignore the bias, so it should be
                0 for tokens that have left the window, for example a position bias that is 0 beyond
                a distance of `local_window` tokens.
            sink_logits: `[H]` or `[B, H, T]`, the logits of learned sinks. Each logit adds a term
                to the softmax's denominator that belongs to no token
                (`ops.attention.with_sink_logits`).
            ids: Int64 `[B, G, T, K]`, positions of the tokens to attend to, chosen by the caller:
                distinct for each query, -1 for an unused slot. The index does not search. (The
                index `exact` then stores no codes.)
            visible: Bool `[B, T, N + T]`, the tokens that each query attends to, in place of the
                causal mask. This is for prompts with an image, whose tokens attend to each other in
                both directions. With `visible` the index does not search. Later queries are not
                limited by it.

        Returns:
            Attention outputs `[B, H, T, Dv]`. The output of a padding token has no meaning if no
            real token comes before it.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a key that is not padding is NaN
                or infinite (on a CUDA device a later call raises this).
            TypeError: An argument is not a tensor.
        """
        self._check_shapes(queries, keys, values)
        keys, values, valid = self._checked_rows(keys, values, valid)
        before, T = len(self), queries.shape[2]
        if bias is not None or visible is not None:
            self._check_options(queries, bias, ids, visible)
        sinks = checked_sinks(sink_logits, queries)
        if ids is not None:
            ids = check_ids(ids, queries, self.index, before)
        sparse = self.prefill == "sparse" and not self.decodes(T) and ids is None
        if sparse:
            check_plain(self._window.valid if valid is None else valid, bias, sinks, visible)
        decoded = self.decodes(T) and visible is None

        # 1. If the last call of `step` postponed an update, do the update now: move tokens from the
        # window into the index. Before the first decode step, report the end of the prompt to the
        # index.
        if decoded:
            self._updates.begin_decoding()
        else:
            self._updates.catch_up()

        # 2. Append the keys and values of the new tokens to the window, and compute the attention
        # output of the new tokens.
        long_enough = before + 1 >= self.dense_below and len(self.index) > 0 and not self._full
        measured = self.error is None or self._scale.known
        searches = decoded and long_enough and ids is None and measured
        wanted = self._wanted()
        if not (searches and self._retrieval.checks_keys(valid, bias, wanted)):
            check_finite("keys", keys)
        if searches:  # tokens enter the window, search, and attend one after the other
            how: Any = dict(wanted=wanted, graphs=self.graphs)
            output = self._retrieval.decode(queries, keys, values, valid, bias, sinks, **how)
        else:
            self._window.append(len(self.index), keys, values, valid)
            self._retrieval.observe(queries, valid)
            if ids is not None:  # attend to the rows that the caller chose
                output = self._attend_chosen(queries, sinks, ids, counts=decoded)
            elif sparse:  # a chunk of a prompt: attend to chosen blocks of tokens
                indexed = IndexedRows(self.index, self._window.rows, self._window.sink)
                output = self._sparse.attend(queries, before, indexed)
            else:  # attend to all tokens
                output = self._attend_densely(queries, bias, sinks, visible)
            if ids is None and visible is None:
                self._measure(values, output, valid)

        # 3. If the window is full, move its old tokens into the index.
        if decoded and T > 1:
            self._updates.defer(before)  # because the caller may reject and truncate these tokens
        else:
            self._updates.update_if_due(int(T == 1 and visible is None))
        self._searched = T if searches else 0
        return output

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        queries: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        """Append tokens of a prompt without computing their attention.

        This changes the layer as `step` does.

        Args:
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            valid: Bool `[B, T]`, False for padding; None where no token is padded.
            queries: `[B, H, T, D]`, after the rotary embedding. Only an index that learns from the
                queries of a prompt (`protocol.ObservesQueries`) needs them.
            outputs: The attention outputs of the tokens, `[B, H, T, Dv]`, for a layer with `error`.
                Without them, such a layer measures only later tokens.

        Raises:
            ValueError: A shape, dtype or device does not fit, a key that is not padding is NaN or
                infinite, or the index needs `queries` and there are none.
        """
        if queries is None and capability(self.index, ObservesQueries) is not None:
            raise ValueError(
                f"queries: got None for the index {type(self.index).__name__}, which learns from "
                "the queries of a prompt; allowed are the queries of the new tokens"
            )
        check_new_rows(self.index.geometry, self.batch_size, keys, values)
        check_computed(self.index.geometry, keys, queries, outputs)
        keys, values, valid = self._checked_rows(keys, values, valid)
        check_finite("keys", keys)
        if not keys.shape[2]:
            return
        self._updates.catch_up()
        self._window.append(len(self.index), keys, values, valid)
        if queries is not None:
            self._retrieval.observe(queries, valid)
        if outputs is not None:
            self._measure(values, outputs, valid)
        self._updates.update_if_due(0)
        self._searched = 0

    def attend(self, queries: Tensor, *, sink_logits: Tensor | None = None) -> Tensor:
        """Compute the attention of another layer, which has queries but no keys and values.

        Some models have layers that use the keys and values of an earlier layer. The queries attend
        to the tokens of this layer. No token is appended. If the last
        call of `step` searched the index, this call also searches it, with the given queries.
        Otherwise the given queries attend to all tokens. The index does not learn from the queries.

        Args:
            queries: `[B, H, T, D]`, of the newest `T` tokens, after the rotary embedding.
            sink_logits: `[H]` or `[B, H, T]`, the logits of learned sinks (see `step`).

        Returns:
            Attention outputs `[B, H, T, Dv]`.

        Raises:
            ValueError: A shape, dtype or device does not fit, or `T` is too large. If the last
                call of `step` searched the index, `T` may be up to the number of its tokens.
                Otherwise `T` may be up to the number of tokens in the layer.
            TypeError: An argument is not a tensor.
        """
        most = self._searched or len(self)
        check_queries(self.index.geometry, self.batch_size, queries, most)
        T = queries.shape[2]
        sinks = checked_sinks(sink_logits, queries)
        if not self._searched:
            return self._attend_densely(queries, None, sinks)
        check_finite("queries", queries)
        outputs, how = [], dict[str, Any](wanted=self._wanted())
        for t in range(T):
            own = None if sinks is None else sinks[..., t]
            query, newer = queries[:, :, t], T - 1 - t
            outputs.append(self._retrieval.attend(query, None, own, newer=newer, **how))
        return torch.stack(outputs, dim=2)

    def read_chunk(self, queries: Tensor, rows: Rows, *, valid: Tensor | None = None) -> Tensor:
        """Append a chunk of a prompt, and attend to keys and values that the caller has stored.

        Attention reads all keys and values from `rows`, and none from the index. If the index has
        the capability `protocol.AppendsAsync`, it may still be appending tokens when this method
        returns. The next chunk or `settle` waits for the append.

        Args:
            queries: `[B, H, T, D]`, of the new tokens, after the rotary embedding.
            rows: Keys `[B, G, N + T, D]` and values `[B, G, N + T, Dv]` of the `N` tokens in the
                layer, followed by those of the `T` new tokens.
            valid: Bool `[B, T]`, False for padding; None where no new token is padded.

        Returns:
            Attention outputs `[B, H, T, Dv]`.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a key that is not padding is NaN
                or infinite (on a CUDA device a later call raises this).
            TypeError: An argument is not a tensor.
        """
        before, T = len(self), queries.shape[2]
        check_rows(self.index.geometry, self.batch_size, rows, before + T)
        new = rows.keys[:, :, before:], rows.values[:, :, before:]
        keys, values, valid = self._checked(queries, *new, valid)
        if self.prefill == "sparse":
            check_plain(self._window.valid if valid is None else valid, None, None, None)
        self.settle()
        self._window.append(len(self.index), keys, values, valid)
        self._retrieval.observe(queries, valid)
        if self.prefill == "sparse":
            output = self._sparse.attend(queries, before, StoredRows(self.index, rows))
        else:
            output = attend_densely(self.index, rows, queries, self.valid, indexed=0)
        self._measure(values, output, valid)
        self._updates.update_chunk()
        return output

    # Speculation: steps whose tokens may be rejected

    @contextmanager
    def speculating(self, tokens: int) -> Iterator[None]:
        """Context manager for steps whose tokens the caller may remove with `truncate`.

        Inside, a step of up to `tokens` tokens is a decode step, as with `search_up_to`. No token
        moves into the index, so all tokens that were appended inside can be removed. A move that
        is due when the context ends happens then. If the `with` block raises an exception, the
        move waits for the next step.

        Args:
            tokens: Largest number of tokens of a step, at least 1.

        Raises:
            ValueError: `tokens` is below 1, or the layer is already in such a context.
        """
        self.begin_speculating(tokens)
        try:
            yield
        except BaseException:
            self.end_speculating(failed=True)
            raise
        self.end_speculating()

    def begin_speculating(self, tokens: int, *, since: int | None = None) -> None:
        """Begin what `speculating` does in a `with` block; `end_speculating` ends it.

        Args:
            tokens: Largest number of tokens of a step, at least 1.
            since: Position of the first token that the caller may remove, if replays have already
                appended such tokens. None means the next token.

        Raises:
            ValueError: `tokens` is below 1, `since` is not a position of the sequence, or the layer
                is already speculating.
        """
        check.at_least("tokens", tokens, 1)
        if since is not None and not 0 <= since <= len(self):
            raise ValueError(f"since: got {since}, allowed is 0 to {len(self)}")
        if self._speculated:
            raise ValueError("tokens: got a call inside another speculating() of the same layer")
        if self._updates.deferred:
            self._catch_up()
        self._hold_updates(since)
        self._speculated = tokens

    def end_speculating(self, *, failed: bool = False) -> bool:
        """End what `begin_speculating` has begun, and move tokens into the index if that is due.

        Args:
            failed: Whether a step has failed. A move that is due then waits for the next step, and
                the call raises no error.

        Returns:
            True if tokens were moved, or began to move.
        """
        self._speculated = 0  # whatever happens next
        self._updates.release()
        if failed or self._drop_update():
            return False
        self._catch_up()
        return True

    @contextmanager
    def attending_fully(self) -> Iterator[None]:
        """Context manager in which decoded tokens attend to all tokens instead of searching."""
        before, self._full = self._full, True
        try:
            yield
        finally:
            self._full = before

    # Methods of their own, so that they are transactions. The first two do not change what replays
    # depend on, and record no checkpoint.

    def _hold_updates(self, since: int | None) -> None:
        self._updates.hold(since)
        self._captured.unchanged(self._situation())

    def _drop_update(self) -> bool:
        """Forget the update that `_hold_updates` has postponed. Return False if it must run."""
        if self._updates.overdue:
            return False
        self._updates.drop()
        self._captured.unchanged(self._situation())
        return True

    def _catch_up(self) -> None:
        self._updates.catch_up()

    # Parts of a step

    def _wanted(self) -> Wanted:
        """Return how many rows a search shall retrieve now."""
        limits = self.error is not None and self._scale.known
        variance = self._scale.variance(self.error) if limits and self.error else None
        return Wanted(self.k, self.coverage, variance)

    def _measure(self, values: Tensor, outputs: Tensor, valid: Tensor | None) -> None:
        """Measure the outputs of new tokens whose queries have not searched.

        values: values of the new tokens, `[B, G, T, Dv]`.
        """
        if self.error is None or not outputs.shape[2]:
            return
        self._scale.measure(values, outputs, valid)

    def _checked(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Check new tokens. Return their keys and values with zeros for padding, and their mask.

        The returned mask is `valid`, or None if no token is padded.
        """
        self._check_shapes(queries, keys, values)
        keys, values, valid = self._checked_rows(keys, values, valid)
        check_finite("keys", keys)
        return keys, values, valid

    def _check_shapes(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Check shapes, dtypes and devices, unless the last call had the same ones."""
        kinds = check.kind(queries), check.kind(keys), check.kind(values), self.batch_size
        if kinds == self._usual:
            return
        check_tokens(self.index.geometry, self.batch_size, queries, keys, values)
        self._usual = kinds

    def _checked_rows(
        self, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Check the mask `valid`, and set the keys and values of padded tokens to zero.

        Return keys, values and mask. The mask is None if no token is padding. The shapes of keys
        and values are not checked, and NaN and infinite values are not detected.
        """
        if valid is not None:
            check_valid(valid, keys)
            valid = None if bool(valid.all()) else valid
        if valid is not None:
            padded = ~valid[:, None, :, None]
            keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        return keys, values, valid

    def _check_options(
        self, queries: Tensor, bias: Tensor | None, ids: Tensor | None, visible: Tensor | None
    ) -> None:
        """Check the shapes of `bias` and `visible`, and that both are None if `ids` is given."""
        length = len(self) + queries.shape[2]
        if visible is not None:
            check_visible(visible, queries, length)
            if ids is not None:
                raise ValueError("visible: got a tensor, allowed is None, because ids is given")
        if bias is not None:
            check_bias(bias, queries, length)
            if ids is not None:
                raise ValueError("bias: got a tensor, allowed is None, because ids is given")

    def _attend_densely(
        self,
        queries: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Return the attention `[B, H, T, Dv]` of the newest tokens to all tokens."""
        window = self._window
        options: Any = dict(sink=window.sink, visible=visible)
        return attend_densely(
            self.index, window.rows, queries, window.valid, bias, sinks, **options
        )

    def _attend_chosen(
        self, queries: Tensor, sinks: Tensor | None, ids: Tensor, *, counts: bool
    ) -> Tensor:
        """Return the attention `[B, H, T, Dv]` of the newest tokens to the tokens `ids`.

        If `counts` is True, `traffic` counts the rows that are read.
        """
        read = attend_chosen(self.index, self._window, queries, ids)
        newer, outputs = len(read), []
        for t, one in enumerate(read):
            own = None if sinks is None else sinks[..., t]
            length = len(self) - newer + t + 1
            attended = self._retrieval.counted(one, length) if counts else one.attended
            outputs.append(output_of(attended, own))
        return torch.stack(outputs, dim=2)

    # Truncation, and the order of the batch

    def settle(self) -> None:
        """Finish all pending moves of tokens from the window into the index."""
        self._updates.settle()

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on.

        Args:
            length: Number of tokens to keep, at least 0.

        Raises:
            ValueError: `length` is negative.
        """
        check.at_least("length", length, 0)
        self._searched = 0
        self._updates.keep(length)
        if length < len(self):
            self._sparse.truncate(length)
        if length == 0:
            self._scale.reset()
        self._contents.truncate(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` of the batch by sequence `batch_indices[b]`.

        Args:
            batch_indices: Int64 `[B']`. A sequence may occur several times, or not at all.

        Raises:
            ValueError: The shape or dtype does not fit, or an entry is not a sequence of the batch.
            TypeError: `batch_indices` is not a tensor.
        """
        batch = self.batch_size
        check.rows("batch_indices", batch_indices, batch or None)
        if batch:
            self._updates.finish()
            self._contents.reorder(batch_indices)
            self._sparse.reorder(batch_indices)
            self._scale.reorder(batch_indices)

    def reset(self) -> None:
        """Remove all tokens, and reset the counts of `traffic`."""
        self._updates.reset()
        self._contents.reset()
        self._sparse.reset()
        self._scale.reset()
        self._searched, self._speculated, self._broken = 0, 0, None
        self._tally.reset()

    # Decode steps in a CUDA graph that the caller captures and replays

    def capture_refusal(self, tokens: int = 1, *, full: bool | None = None) -> str | None:
        """Return why a CUDA graph cannot capture the next decode step.

        Args:
            tokens: Number of tokens of the decode step.
            full: Whether the tokens attend to all tokens. None means that they do inside
                `attending_fully`.

        Returns:
            The reason, or None if a graph can capture the decode step.
        """
        if type(self).step is not AttentionLayer.step:
            return f"layer: got {type(self).__name__}, which overrides AttentionLayer.step"
        if self._full if full is None else full:
            return self._captured.full_refusal()
        options = self.coverage, self.error
        how: Any = dict(dense_below=self.dense_below, tokens=tokens)
        refusal = self._captured.refusal(*options, **how)
        if refusal is None and self.error is not None and not self._scale.known:
            return f"tokens: too few outputs are measured to choose the number of rows ({FEWEST})"
        return refusal

    def prepare_replay(self, tokens: int = 1) -> object | None:
        """Prepare a capture or a replay of `captured_step` on the current stream.

        After this call, all data is at the addresses that the graph reads.

        Args:
            tokens: Number of tokens of the decode step.

        Returns:
            An object that identifies the graph: while calls return the same object, the caller can
            replay the same graph. None if no graph can be used for the next token, and the caller
            must call `step`; `capture_refusal` returns the reason.
        """
        if self.capture_refusal(tokens) is not None:
            self._captured.forget()
            return None
        how: Any = dict(tokens=tokens, full=self._full)
        return self._captured.prepare(self._situation(), self._wanted(), **how)

    def prepare_next(self, tokens: int = 1, ahead: int = 0) -> object | None:
        """Prepare the next replay like `prepare_replay`, but in less time.

        This works only if no method but `count_replay` was called since the last preparation. It
        does little work, so it can be called for every layer and every token.

        Args:
            tokens: Number of tokens of the decode step.
            ahead: Number of tokens that earlier replays append, and that are not counted yet.

        Returns:
            The object that `prepare_replay` would return. None if the caller must call
            `prepare_replay` instead: another call has changed the layer, tokens must move into the
            index, or the buffer with the rows of sink and window is full.
        """
        if self._updates.deferred:
            return None
        return self._captured.prepare_next(self._situation(), tokens, ahead, full=self._full)

    def _situation(self) -> tuple[Any, ...]:
        """Return a value that shows whether the layer has changed since a CUDA graph was prepared.

        As long as the value is the same, `prepare_next` is sufficient before a replay. When it has
        changed, `prepare_replay` must be called.
        """
        chosen = self.k, self.coverage, self.error, self.dense_below
        return self.calls_begun, id(self.index), *chosen

    def captured_step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Launch a decode step, so that a CUDA graph captures it.

        The step has `T` real tokens of each sequence. Inside `attending_fully`, they attend to all
        tokens. The kernels read the positions and the number of rows from device memory. Call
        `prepare_replay` before the capture and before each replay, and `count_replay` after each
        replay.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            sink_logits: `[H]` or `[B, H, T]`, the logits of learned sinks (see `step`).

        Returns:
            Attention outputs `[B, H, T, Dv]`, which the next replay overwrites.

        Raises:
            ValueError: A shape, dtype or device does not fit. NaN and infinite values are not
                detected.
            TypeError: An argument is not a tensor.
        """
        self._check_shapes(queries, keys, values)
        sinks = checked_sinks(sink_logits, queries)
        token, wanted = Rows(keys, values), self._wanted()
        return self._captured.step(queries, token, sinks, wanted, full=self._full)

    def count_replay(
        self,
        kept: int | Sequence[int] = 1,
        of: int = 1,
        *,
        full: bool | None = None,
        held: bool = False,
    ) -> bool:
        """Count the tokens that a replay of the CUDA graph has appended.

        If the window is then full, its old tokens move into the index. If this raises an error, the
        tokens stay in the layer.

        Args:
            kept: Number of tokens that stay, at least 1. The others are removed. Or one number for
                each sequence, the largest at least 1. All sequences then have the length of the
                largest number, and others get padding in place of tokens that they do not keep.
            of: Number of tokens of the decode step.
            full: Whether the tokens have attended to all tokens. None means that they have inside
                `attending_fully`.
            held: Whether no tokens may move into the index now, because the caller may remove some.
                If the result is True for the tokens that stay, the caller must then call
                `begin_speculating` with `since`, the position of the first of these tokens, and
                `end_speculating`, which moves older tokens.

        Returns:
            True if tokens were moved into the index, or began to move; with `held`, if that is due.

        Raises:
            ValueError: `kept` is below 1 or above `of`, or does not have one number for each
                sequence.
        """
        given: Sequence[object] = kept if isinstance(kept, (list, tuple)) else (kept,)
        each = [check.at_least("kept", one, 0) for one in given]
        most = max(each, default=0)
        if not 1 <= most <= of:
            raise ValueError(f"kept: got {kept}, allowed is 1 to {of}; truncate() removes all")
        if given is kept and len(each) != self.batch_size:
            raise ValueError(
                f"kept: got {len(each)} numbers, allowed are {self.batch_size}, one for each "
                "sequence"
            )
        same = min(each) == most
        full = self._full if full is None else full
        due = self._captured.count(most if same else each, of, full=full)
        if due and not held:
            self._update_replayed(most)
        return due

    def undo_replays(self, length: int) -> bool:
        """Remove the tokens from position `length` on, if replays have appended all of them.

        This takes less time than `truncate`, and `prepare_next` is still sufficient afterwards.

        Args:
            length: Number of tokens to keep.

        Returns:
            False if the caller must call `truncate`. The layer is then unchanged.
        """
        if not self._window.drop_staged(length - len(self.index)):
            return False
        self._captured.check_updates()
        self._searched = 0
        return True

    def _update_replayed(self, kept: int) -> None:
        self._updates.update_if_due(kept)  # a method of its own, so that it is a transaction

    # The following methods are for decode steps of several sequences in one batch, where each
    # sequence has its own layer object. For each object, `pool.LayerPool` first calls `way_back`,
    # `begin_decoding` and `joins`. Then it calls `row_of_step`, `limit_of_step` and `count_joined`
    # for each token,
    # and at the end `end_joined`. If any of these calls fails, the pool undoes the step: it calls
    # the functions that `way_back` returned.

    def way_back(self, tokens: int) -> Callable[[], None]:
        """Return a function that undoes the next decode step, which appends `tokens` tokens.

        The layer's state is copied only if the decode step moves tokens into the index.
        """
        if not self._updates.idle_for(tokens):
            return partial(self.rollback, self.checkpoint())
        before = self._joined.checkpoint(), self._updates.checkpoint(), self._searched
        return partial(self._uncount, before)

    def _uncount(self, before: tuple[Any, Any, int]) -> None:
        joined, updates, self._searched = before
        self._updates.rollback(updates)
        self._joined.rollback(joined)

    def begin_decoding(self) -> None:
        """Prepare the layer for a decode step.

        Move tokens into the index if the last call postponed that. Before the first decode step,
        also report the end of the prompt to the index.
        """
        self._updates.begin_decoding()

    def joins(self, tokens: int) -> bool:
        """Return True if this layer's next decode step can run together with other sequences.

        `tokens` is the number of tokens of the decode step.
        """
        if not self.decodes(tokens) or self.coverage is not None:
            return False
        searches = len(self) + 1 >= self.dense_below and not self._full
        limited = self.error is not None
        if limited and not (searches and self._scale.known):
            return False  # the outputs of such a step are measured
        return self._joined.possible(searches=searches, limited=limited)

    def limit_of_step(self) -> Tensor | None:
        """Return the largest variance of attention weights in the next step, float32 `[1, G]`.

        None if searches retrieve a fixed number of rows. The result is the same tensor until the
        limit changes.
        """
        return self._wanted().variance

    def resident_room(self, tokens: int) -> int:
        """Return how many rows the buffer of sink and window must be able to store.

        A row is the key and the value of one token. The caller may pass such a buffer to `lie_in`.
        `tokens` is the number of tokens of the next decode step.
        """
        return self._window.room(tokens)

    def lies_in(self, resident: ResidentRows) -> bool:
        """Return True if `resident` is the buffer with this layer's sink and window.

        The buffer contains their rows, that is, keys and values.
        """
        return self._window.lies_in(resident)

    def lie_in(self, resident: ResidentRows | None) -> None:
        """Store keys and values of sink and window in the buffer `resident` from now on.

        The buffer has batch size 1. With None, the layer makes a new buffer.
        """
        self._window.lie_in(resident)

    def asks(self) -> int:
        """Return how many rows per KV head to request from the index, or 0 if the index is empty.

        A row is the key and the value of one token.
        """
        return self._joined.asks(self.k)

    def row_of_step(self, queries: Tensor, tokens: int, *, k: int) -> object | None:
        """Prepare the search of this sequence in a decode step that it shares with other sequences.

        This also writes the rows of sink and window to their buffer.

        Args:
            queries: `[1, H, D]`.
            tokens: Number of further tokens for which the buffer must have room.
            k: Number of rows to retrieve per KV head.

        Returns:
            The result of `JoinsBatch.batch_row`, or None if the index is empty.

        Raises:
            ValueError: `JoinsBatch.batch_row` raised it.
        """
        return self._joined.row(queries, tokens, k=k)

    def count_joined(self, attended: Attended) -> None:
        """Count a token that a joined step has appended, and the rows that attention has read.

        In a joined step, the decode steps of several sequences run together. A row is the key and
        the value of one token. `attended` is the attention output of the appended token.
        """
        self._joined.count(attended)

    def end_joined(self, tokens: int) -> None:
        """End a decode step of `tokens` tokens that ran together with other sequences.

        After a decode step of one token, old tokens move into the index if the window is full.
        After several tokens, the move waits for the next decode step, because the caller may reject
        some of the new tokens.
        """
        searched = len(self.index) > 0
        if tokens > 1:
            self._updates.defer(len(self) - tokens)
        else:
            self._updates.update_if_due(1)
        self._searched = tokens if searched else 0

    # Transactions and copies

    def _runs_alone(self, name: str) -> bool:
        return name in SETTLING or super()._runs_alone(name)

    def checkpoint(self) -> Any:
        """Return the layer's present state for `rollback`, without waiting for the GPU."""
        parts = self._contents, self._updates, self._tally, self._sparse, self._scale
        own = self._searched, self.k, self.error
        return tuple(part.checkpoint() for part in parts), own

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state that `checkpoint` returned.

        An index that is not `Restorable` has no checkpoints, so it is only truncated to its former
        length. If it has learned from queries since the checkpoint, this is not undone.
        """
        (contents, updates, tally, sparse, scale), own = checkpoint
        self._searched, self.k, self.error = own
        self._sparse.rollback(sparse)
        self._scale.rollback(scale)
        self._captured.forget()
        self._updates.rollback(updates)
        self._tally.rollback(tally)
        self._contents.rollback(contents)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Finish a pending append, and return an independent copy of the layer.

        A copy that is made inside `speculating` or `attending_fully` is outside of these contexts.
        """
        self.settle()
        twin = super().__deepcopy__(memo)
        twin._speculated, twin._full = 0, False
        twin._updates.release()
        return twin

    # State, and files

    def state_dict(self) -> State:
        """Finish a pending append, and return the state of the layer as named tensors.

        `traffic` is not part of the state.

        Returns:
            The tensors of the index, with names that begin with `index.`, and the tensors of window
            and sink.

        Raises:
            ValueError: The index does not offer `protocol.KeepsState`.
        """
        self.settle()
        flags = {"prompt_ended": torch.tensor(self._updates.prompt_ended)}
        if self._sparse.used_from is not None:
            flags[SPARSE] = torch.tensor(True)
        return signed(self._whose(), self._contents.packed() | flags | self._scale.packed())

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Check whether `load_state_dict` would load a state.

        Args:
            state: A result of `state_dict`. Its tensors may be on the meta device.

        Raises:
            ValueError: The state does not fit this layer.
            TypeError: The state is not a mapping from names to tensors.
        """
        check_signed(self._whose(), state)
        self._contents.check_index(state)
        self._check_own(state)

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        parts = {
            name: part
            for name, part in state.items()
            if name != ABOUT and not name.startswith("index.")
        }
        flags = {name: parts.pop(name) for name in ("prompt_ended", SPARSE) if name in parts}
        means = {name: parts.pop(name) for name in NAMES if name in parts}
        check_layout(dict.fromkeys(("prompt_ended", *flags), TensorSpec("", torch.bool)), flags, {})
        if SPARSE in flags and self.prefill != "sparse":
            raise ValueError(
                "state: got tokens that were read with sparse attention, but this layer has "
                "prefill='dense'; load them into a layer with prefill='sparse', or read the text "
                "again"
            )
        if means:
            g, known = self.index.geometry, length_and_batch(below("index", state))
            sizes = known | {"G": g.kv_heads, "H": g.q_heads}
            check_layout(OutputScale.layout(), means, sizes)
        self._contents.check_window(parts, state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state into this empty layer.

        Args:
            state: The result of `state_dict`, called on a layer with the same sizes and the same
                kind of index.

        Raises:
            ValueError: The state does not fit this layer, or the layer has tokens. The layer is
                unchanged.
            TypeError: The state is not a mapping from names to tensors.
        """
        check_signed(self._whose(), state)
        self._check_own(state)
        if len(self):
            raise ValueError(
                f"layer: got a layer with {len(self)} tokens, allowed is an empty layer"
            )
        self._contents.unpack(state)
        self._scale.unpack(state, self.index.geometry.device)
        self._updates.prompt_ended, self._broken = bool(state["prompt_ended"]), None
        self._sparse.used_from = 0 if SPARSE in state else None

    def _whose(self) -> dict[str, Any]:
        sizes = dict(sink=self.sink, local_window=self.local_window, update_every=self.update_every)
        return {"layer": sizes}

    def recipe(self) -> Recipe:
        """Return the options with which `kvindex.load` makes an empty copy of this layer.

        Returns:
            A dict with `layer` (the name of the class), `options` (the constructor's arguments),
            and `index` (the recipe of the index, or None if the index has no recipe).
        """
        index, names = capability(self.index, ReportsRecipe), inspect.signature(AttentionLayer)
        options = {name: vars(self)[name] for name in names.parameters if name != "index"}
        made = None if index is None else index.recipe()
        return {"layer": class_name(type(self)), "options": options, "index": made}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the layer and its index to a new folder, for `kvindex.load`.

        The folder appears only when all of its files are complete.

        Args:
            folder: A path that does not exist yet.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The index does not offer `protocol.KeepsState`.
        """
        save_folder(folder, "layer", self.recipe(), {"state": self.state_dict})

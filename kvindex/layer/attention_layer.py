"""What an attention layer does in a step: append, attend, move old tokens into the index.

A token's id in the index is its position in the sequence. New tokens wait in the window (local,
then buffer); when the buffer is full the newest `local` tokens stay and the older ones move to
the index. A row's sink is its first real tokens among those that moved: they are always attended
to, and marked invalid in the index so that it never returns them (docs/pipeline/regions.md).
How they move is in `updates.py`, how a token searches in `retrieval.py`, what a step refuses in
`arguments.py`; steps with other layers, and those of a caller's graph, are in `captured.py`.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import AppendsAsync, KVIndex, ObservesQueries, ReportsRecipe, Rows
from kvindex.layer.arguments import (
    check_bias,
    check_new_rows,
    check_queries,
    check_rows,
    check_valid,
    check_visible,
)
from kvindex.layer.captured import CapturedSteps, JoinsSteps
from kvindex.layer.chosen import attend_chosen, check_ids
from kvindex.layer.dense import attend_densely
from kvindex.layer.retrieval import output_of
from kvindex.storage.recipe import Recipe, class_name
from kvindex.storage.saved import save_folder


class AttentionLayer(JoinsSteps, CapturedSteps):
    """Attention over an index: append, attend, and let old tokens go into the index.

    index: empty; k: rows per KV head that a step retrieves; coverage: fewer, where fewer are
    estimated to hold this fraction of the index's attention (`KVIndex.search`); sink, local_window,
    update_every: sizes of the regions in tokens; dense_below: while the sequence is shorter,
    attention is dense (the index fills all the same); search_up_to: a step of up to so many tokens
    after others searches, each of its tokens for itself, as in verifying what was speculated; a
    longer one is a piece of a prompt.

    Into an index of blocks (`protocol.EncodesBlocks`) go whole ones, where `update_every` is a
    multiple of them. Of an index whose appends run beside searches (`protocol.AppendsAsync`),
    updates end `LAG` tokens after they began, and the window is so much longer; update_phase: they
    begin when the length is this share of `update_every` past a multiple of it, that layers may
    take turns; a block may then wait for its turn.
    graphs: on a GPU, steps that are all alike are captured in a CUDA graph and replayed, by an
    index that can (`protocol.DecodesStep`); results are the same. Raises ValueError for sizes out
    of range, or a coverage that the index cannot tell.
    """

    def __init__(
        self,
        index: KVIndex,
        *,
        k: int = 100,
        coverage: float | None = None,
        sink: int = 64,
        local_window: int = 256,
        update_every: int = 256,
        dense_below: int = 2048,
        search_up_to: int = 1,
        update_phase: float | None = None,
        graphs: bool = True,
    ) -> None:
        super().__init__(
            index,
            k=k,
            coverage=coverage,
            dense_below=dense_below,
            graphs=graphs,
            sink=sink,
            local_window=local_window,
            update_every=update_every,
            search_up_to=search_up_to,
            update_phase=update_phase,
        )

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
        """Append `T` tokens and attend from them, causally.

        Steps of more than `search_up_to` queries attend exactly to all tokens. Shorter steps search
        once the sequence is long enough, with one query after the other, as in steps of one token.
        If a shorter step has several tokens, a due update of the window waits for the next step. So
        `truncate` removes rejected tokens completely, except for what an index has learned from
        their queries. A call that fails leaves the layer as it was.

        Args:
            queries: `[B, H, T, D]`, after the rotary embedding.
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            valid: Bool `[B, T]`, False for padding at any position; None where no token is padded.
            bias: `[B, H, T, N + T]`, added to the logits. Indexes search without it, so it should
                be 0 for rows that have left the window (for example a bias by distance that reaches
                no further than `local_window` tokens).
            sink_logits: `[H]` or `[B, H, T]`, the logits of learned sinks. Each is a term of the
                softmax's denominator that belongs to no token (`ops.attention.with_sink_logits`).
            ids: Int64 `[B, G, T, K]`, the positions of rows that the caller chose, distinct for
                each token, -1 where unused. Each token attends only to its rows, and nothing is
                searched (`exact` then keeps no codes).
            visible: Bool `[B, T, N + T]`, the tokens that each query attends to, in place of all
                tokens up to its own. For a prompt, or a chunk of one, with an image that is
                attended to in both directions. Such a step does not search, and later queries
                attend to every valid token.

        Returns:
            Attention outputs `[B, H, T, Dv]`. A padded query attends to the real tokens before it;
            if there are none, its output has no meaning.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a valid key is NaN or infinite (on
                a CUDA device this is raised later).
            TypeError: An argument is not a tensor.
        """
        keys, values, valid = self._checked(queries, keys, values, valid)
        before, T = len(self), queries.shape[2]
        if visible is not None:
            check_visible(visible, queries, before + T)
            if ids is not None:
                raise ValueError("visible: got a tensor, allowed is None together with ids")
        decoded = self.decodes(T) and visible is None
        if decoded:
            self._begin_decoding()
        else:
            self._update_due()
        if bias is not None:
            check_bias(bias, queries, before + T)
        sinks = self._sinks(sink_logits, queries)
        if ids is not None:
            if bias is not None:
                raise ValueError("bias: got a tensor, allowed is None beside ids")
            ids = check_ids(ids, queries, self.index, before)
        searches = decoded and before + 1 >= self.dense_below and len(self.index) > 0
        if ids is not None:
            searches, tokens = False, (queries, keys, values)
            output = self._attend_chosen(*tokens, valid, sinks, ids, counts=decoded)
        elif searches:
            output = self._search(queries, keys, values, valid, bias, sinks)
        else:
            self._window.append(len(self.index), keys, values, valid)
            self._observe(queries, valid)
            rows, real = self._window.rows, self._window.valid
            first = self._window.sink
            options: Any = dict(sink=first, visible=visible)
            output = attend_densely(self.index, rows, queries, real, bias, sinks, **options)
        if decoded and T > 1:
            self._looked = before
        else:
            self._update(int(T == 1 and visible is None))
        self._searched = T if searches else 0
        return output

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens of a prompt without computing their attention.

        Afterwards the layer's state is the same as after a `step` of these tokens. But the index
        has not seen their queries.

        Args:
            keys: `[B, G, T, D]`, after the rotary embedding.
            values: `[B, G, T, Dv]`.
            valid: Bool `[B, T]`, False for padding; None where no token is padded.

        Raises:
            ValueError: A shape, dtype, device or number does not fit, as in `step`; or the index
                learns from queries (`protocol.ObservesQueries`), which are missing here.
        """
        if capability(self.index, ObservesQueries) is not None:
            raise ValueError(
                f"index: got {type(self.index).__name__}, which learns from the queries of a "
                "prompt; allowed without queries is an index that does not"
            )
        check_new_rows(self.index.geometry, self.batch_size, keys, values)
        keys, values, valid = self._checked_rows(keys, values, valid)
        if not keys.shape[2]:
            return
        self._update_due()
        self._window.append(len(self.index), keys, values, valid)
        self._update(0)
        self._searched = 0

    # Parts of a step

    def _checked(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with padded tokens as zeros, and `valid`, None where none is padded.

        Or an error, and nothing changed.
        """
        self._check_shapes(queries, keys, values)
        return self._checked_rows(keys, values, valid)

    def _checked_rows(
        self, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `_checked`, for keys and values that have the right shapes."""
        if valid is not None:
            check_valid(valid, keys)
            valid = None if bool(valid.all()) else valid
        if valid is not None:
            padded = ~valid[:, None, :, None]
            keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
        self._check_finite("keys", keys)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        return keys, values, valid

    def _attend_chosen(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        sinks: Tensor | None,
        ids: Tensor,
        counts: bool,
    ) -> Tensor:
        """Append tokens that attend to the rows `ids`. counts: whether `traffic` counts them."""
        self._window.append(len(self.index), keys, values, valid)
        self._observe(queries, valid)
        read = attend_chosen(self.index, self._window, queries, ids)
        newer, outputs = len(read), []
        for t, one in enumerate(read):
            own = None if sinks is None else sinks[..., t]
            attended = self._counted(one, len(self) - newer + t + 1) if counts else one.attended
            outputs.append(output_of(attended, own))
        return torch.stack(outputs, dim=2)

    # Other steps

    def attend(self, queries: Tensor, *, sink_logits: Tensor | None = None) -> Tensor:
        """Attend again from the newest `T` tokens, with queries of another layer that shares these
        keys and values: `[B, H, T, Dv]`.

        queries `[B, H, T, D]`; sink_logits: as in `step`. They search where the last step searched,
        and else attend exactly to everything. Nothing is appended, and the index observes no query.
        Raises ValueError or TypeError for a wrong tensor, or for more tokens than there are, or
        than the last step had that searched.
        """
        most = self._searched or len(self)
        check_queries(self.index.geometry, self.batch_size, queries, most)
        T = queries.shape[2]
        sinks = self._sinks(sink_logits, queries)
        if not self._searched:
            rows, real = self._window.rows, self._window.valid
            first = self._window.sink
            return attend_densely(self.index, rows, queries, real, None, sinks, sink=first)
        self._check_finite("queries", queries)
        outputs = []
        for t in range(T):
            own = None if sinks is None else sinks[..., t]
            outputs.append(self._retrieve(queries[:, :, t], None, own, newer=T - 1 - t))
        return torch.stack(outputs, dim=2)

    def read_piece(self, queries: Tensor, rows: Rows, *, valid: Tensor | None = None) -> Tensor:
        """As `step` of a piece of a prompt, whose caller holds the rows of all tokens.

        queries `[B, H, T, D]`: of the newest tokens; rows `[B, G, N + T, D]`: theirs, after those
        of the `N` tokens before; valid bool `[B, T]`, as of `step`. Queries attend to these rows,
        not to the index's, however few they are. An index that can (`protocol.AppendsAsync`)
        appends beside what comes next, until the next piece or `settle`. Raises as `step`.
        """
        before, T = len(self), queries.shape[2]
        check_rows(self.index.geometry, self.batch_size, rows, before + T)
        new = rows.keys[:, :, before:], rows.values[:, :, before:]
        keys, values, valid = self._checked(queries, *new, valid)
        self.settle()
        self._window.append(len(self.index), keys, values, valid)
        self._observe(queries, valid)
        output = attend_densely(self.index, rows, queries, self._window.valid, indexed=0)
        if self._window.buffer >= self.update_every:
            self._begin_update(capability(self.index, AppendsAsync))
        return output

    # Of subclasses, and of files

    def capture_refusal(self) -> str | None:
        """Why a graph cannot hold the step of the next token, or None where it can."""
        if type(self).step is not AttentionLayer.step:
            return f"layer: got {type(self).__name__}, whose step is its own"
        return super().capture_refusal()

    def recipe(self) -> Recipe:
        """The layer's options, and how its index is made, which None stands for if unknown."""
        index, names = capability(self.index, ReportsRecipe), inspect.signature(AttentionLayer)
        options = {name: vars(self)[name] for name in names.parameters if name != "index"}
        made = None if index is None else index.recipe()
        return {"layer": class_name(type(self)), "options": options, "index": made}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write layer and index to a new folder, for `kvindex.load`.

        The folder is whole, or is not there. Raises OSError for one that is there already or cannot
        be written, and as `state_dict`.
        """
        save_folder(folder, "layer", self.recipe(), {"state": self.state_dict})

"""What an attention layer does in a step: append, attend, move old tokens into the index.

A token's id in the index is its position in the sequence. New tokens wait in the window (local,
then buffer); when the buffer is full the newest `local` tokens stay and the older ones move to
the index. A row's sink is its first real tokens among those that moved: they are always attended
to, and marked invalid in the index so that it never returns them (docs/pipeline/regions.md).
How they move is in `updates.py`, what a step refuses in `arguments.py`.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability, required
from kvindex.core.protocol import (
    AppendsAsync,
    Attended,
    Attends,
    CapturesStep,
    DecodesStep,
    KVIndex,
    ObservesQueries,
    Rows,
    TellsCoverage,
    TellsRecipe,
)
from kvindex.core.resident import ResidentRows
from kvindex.core.restore import Restorable, cut_back
from kvindex.layer.arguments import (
    check_bias,
    check_queries,
    check_rows,
    check_tokens,
    check_valid,
    checked_sinks,
)
from kvindex.layer.chosen import attend_chosen, check_ids
from kvindex.layer.dense import attend_densely
from kvindex.layer.joined import JoinsSteps
from kvindex.layer.retrieval import (
    Retrieved,
    attend_resident,
    decode_step,
    output_of,
    row_bytes,
    rows_to_ask,
    search_and_attend,
)
from kvindex.layer.stats import Counts, Traffic
from kvindex.storage.recipe import Recipe, class_name
from kvindex.storage.saved import save_folder


class AttentionLayer(JoinsSteps):
    """Attention over an index: append, attend, and let old tokens go into the index.

    index: empty; k: rows per KV head that a step retrieves; coverage: fewer, where fewer hold this
    share of the index's attention (`KVIndex.search`); sink, local_window, update_every: sizes of
    the regions in tokens; dense_below: while the sequence is shorter, attention is dense (the index
    fills all the same); search_up_to: a step of up to so many tokens after others searches, each of
    its tokens for itself, as in verifying what was speculated; a longer one is a piece of a prompt.

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
        self.k = check.wanted_rows(k)
        self.coverage = None if coverage is None else check.within("coverage", coverage, 0, 1)
        self.dense_below = check.at_least("dense_below", dense_below, 0)
        self.graphs = check.flag("graphs", graphs)
        tells = capability(index, TellsCoverage)
        if coverage is not None and tells is not None:
            tells.check_coverage(coverage)
        super().__init__(
            index,
            sink=sink,
            local_window=local_window,
            update_every=update_every,
            search_up_to=search_up_to,
            update_phase=update_phase,
        )
        self._row_bytes = row_bytes(index)
        self._usual: object = None  # kinds of tensors that were checked last
        self._prepared: tuple[object, CapturesStep, ResidentRows, int] | None = None
        self._due_at = 0  # length before which no replay lets an update begin or end

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        return self._regions.valid

    @property
    def batch_size(self) -> int:
        """Rows of the batch, `B`; 0 before the first token and after `reset`."""
        return self._regions.batch_size

    @property
    def traffic(self) -> Traffic:
        """What the searching steps have read so far."""
        return self._tally.traffic

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
    ) -> Tensor:
        """Append `T` tokens and attend from them, causally: `[B, H, T, Dv]`.

        queries `[B, H, T, D]`, keys `[B, G, T, D]`, values `[B, G, T, Dv]`; valid bool `[B, T]`
        marks left padding. More than `search_up_to` queries attend exactly to everything; so many
        or fewer search once the sequence is long enough, one after the other, as steps of one token
        would. An update of the window that is due after several tokens waits for the next step, so
        that `truncate` removes rejected ones without a trace, but for what an index has learned
        from their queries. What a padded query gets means nothing. bias: a term of the logits
        `[B, H, T, N + T]`, by which no index searches: it should be 0 for rows that have left the
        window (a bias by distance, of no more tokens than are `local`). sink_logits: of learned
        sinks, `[H]` or `[B, H, T]`: each is a term of the softmax's denominator that belongs to no
        token (`ops.attention.with_sink_logits`). ids: positions of rows that the caller chose,
        int64 `[B, G, T, K]`, distinct for each token, -1 for none: each token attends to its rows
        alone, wherever they lie, and nothing is searched for (`exact` keeps no codes).

        Raises ValueError or TypeError for a wrong tensor, NaN or infinity in valid keys (on a
        CUDA device later), or a padded token after a real one; the layer stays as it was.
        """
        keys, values, valid = self._checked(queries, keys, values, valid)
        before, T = len(self), queries.shape[2]
        decoded = self.decodes(T)
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
            self._regions.append(len(self.index), keys, values, valid)
            self._observe(queries)
            window, real = self._regions.window, self._regions.valid
            first = self._regions.sink
            output = attend_densely(self.index, window, queries, real, bias, sinks, sink=first)
        if decoded and T > 1:
            self._looked = before
        else:
            self._update(int(T == 1))
        self._searched = T if searches else 0
        return output

    # What a step does, in order

    def _checked(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with padded tokens as zeros, and `valid`, None where none is padded.

        Or an error, and nothing changed.
        """
        self._check_shapes(queries, keys, values)
        if valid is not None:
            check_valid(valid, keys)
            valid = self._regions.padding(len(self), valid)
        if valid is not None:
            padded = ~valid[:, None, :, None]
            keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
        self._check_finite("keys", keys)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        return keys, values, valid

    def _check_shapes(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raises TypeError or ValueError; what is as in the step before is seen at a glance."""
        kinds = check.kind(queries), check.kind(keys), check.kind(values), self.batch_size
        if kinds == self._usual:
            return
        check_tokens(self.index.geometry, self.batch_size, queries, keys, values)
        self._usual = kinds

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        """As `check.finite`, where that does not wait for a device."""
        if self.index.geometry.device.type != "cuda":
            check.finite(name, tensor)

    def _sinks(self, sink_logits: Tensor | None, queries: Tensor) -> Tensor | None:
        """Logits of learned sinks as float32 `[B, H, T]`, or None."""
        return None if sink_logits is None else checked_sinks(sink_logits, queries)

    def _observe(self, queries: Tensor, new: int = 0) -> None:
        """Show queries `[B, H, T, D]` to an index that looks at them.

        new: how many of their tokens are still to come into the window.
        """
        observer = capability(self.index, ObservesQueries)
        if observer is not None:
            length, T = len(self) + new, queries.shape[2]
            positions = torch.arange(length - T, length, device=queries.device)
            observer.observe_queries(queries, positions)

    def _search(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Append `T` tokens one by one, each of which searches: `[B, H, T, Dv]`."""
        before, T = len(self), queries.shape[2]
        if T == 1:
            return self._search_one(queries, keys, values, valid, bias, sinks)
        outputs = []
        for t in range(T):
            one = slice(t, t + 1)
            real = None if valid is None else valid[:, one]
            term = None if bias is None else bias[:, :, one, : before + t + 1]
            parts = queries[:, :, one], keys[:, :, one], values[:, :, one]
            own = None if sinks is None else sinks[..., one]
            outputs.append(self._search_one(*parts, real, term, own))
        return torch.cat(outputs, dim=2)

    def _search_one(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `_search`, of one token."""
        index, regions, indexed = self.index, self._regions, len(self.index)
        sinks = None if sinks is None else sinks[..., 0]
        plain = valid is None and bias is None and self.coverage is None
        decodes = capability(index, DecodesStep) if plain else None
        if decodes is None or capability(index, ObservesQueries) is not None:
            self._check_finite("queries", queries)  # as the index would, but before it is too late
        if decodes is None:
            regions.append(indexed, keys, values, valid)
            self._observe(queries)
            some = None if bias is None else bias[:, :, 0]
            return self._retrieve(queries[:, :, 0], some, sinks)[:, :, None]
        self._observe(queries, new=1)
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(index, self.k)
        read = decode_step(decodes, one, token, regions, indexed, k, self.graphs)
        return output_of(self._counted(read, len(self)), sinks).unsqueeze(2)

    def _retrieve(
        self, queries: Tensor, bias: Tensor | None, sinks: Tensor | None, newer: int = 0
    ) -> Tensor:
        """Attention of queries `[B, H, D]` to sink, hits and window: `[B, H, Dv]`.

        bias: of all tokens, `[B, H, N]`; sinks: `[B, H]`; newer: newest tokens that are not seen.
        """
        index, regions, k = self.index, self._regions, rows_to_ask(self.index, self.k)
        plain = bias is None and self.coverage is None and not newer
        attends = capability(index, Attends) if plain else None
        if attends is not None:
            read = attend_resident(attends, regions, len(index), queries, k=k)
            return output_of(self._counted(read, len(self)), sinks)
        length = len(self) - newer
        options: Any = dict(k=k, coverage=self.coverage, bias=bias, sink_logits=sinks, newer=newer)
        read = search_and_attend(index, regions, queries, **options)
        return output_of(self._counted(read, length), sinks)

    def _counted(self, read: Retrieved, length: int) -> Attended:
        """What a step attended to, which `traffic` counts. length: tokens of the sequence."""
        padded, found = self._regions.padded, read.attended.found
        size = self._row_bytes
        step = Counts(found, read.beside, read.masked, length, padded, size, read.coverage)
        self._tally.count(step)
        return read.attended

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
        self._regions.append(len(self.index), keys, values, valid)
        self._observe(queries)
        read = attend_chosen(self.index, self._regions, queries, ids)
        newer, outputs = len(read), []
        for t, one in enumerate(read):
            own = None if sinks is None else sinks[..., t]
            attended = self._counted(one, len(self) - newer + t + 1) if counts else one.attended
            outputs.append(output_of(attended, own))
        return torch.stack(outputs, dim=2)

    def _update(self, decoded: int) -> None:
        """Let an update begin or end, with so many tokens that are no piece of a prompt."""
        if self._is_due(decoded):
            self._update_window(decoded)

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
            window, real = self._regions.window, self._regions.valid
            first = self._regions.sink
            return attend_densely(self.index, window, queries, real, None, sinks, sink=first)
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
        self._regions.append(len(self.index), keys, values, valid)
        self._observe(queries)
        output = attend_densely(self.index, rows, queries, self._regions.valid, indexed=0)
        if self._regions.buffer >= self.update_every:
            self._begin_update(capability(self.index, AppendsAsync))
        return output

    # Steps of a caller's graph

    def capture_refusal(self) -> str | None:
        """Why a graph cannot hold the step of the next token, or None where it can."""
        index, name = self.index, type(self.index).__name__
        if type(self).step is not AttentionLayer.step:
            return f"layer: got {type(self).__name__}, whose step is its own"
        if self.coverage is not None:
            return f"coverage: got {self.coverage}, allowed is None"
        if capability(index, ObservesQueries) is not None:
            return f"index: got {name}, which looks at every token's queries on the host"
        if not self._sealed or len(self) + 1 < self.dense_below or not len(index):
            return f"tokens: got {len(self)}, too few for a step that searches"
        if capability(index, CapturesStep) is None:
            return f"index: got {name}, whose steps are no kernels that read the device's counts"
        return None if self._looked is None else "an update is due before the next token"

    def prepare_replay(self) -> object | None:
        """Before a graph with `captured_step` is captured or replayed on the current stream.

        Then what it reads is where it reads it. Gives the same object for as long as one graph may
        be replayed; None where the next token must take `step` (`capture_refusal`).
        """
        self._prepared = None
        if self.capture_refusal() is not None:
            return None
        index, resident = self._capturing()
        k, self._due_at = rows_to_ask(self.index, self.k), self._due_from()
        self._prepared = self._prepared_for(), index, resident, k
        return index.prepare_replay(resident, k=k)

    def prepare_next(self) -> object | None:
        """As `prepare_replay`, or None where that must be called: where anything but `count_replay`
        was called since, or the resident rows have no room.

        Before each token of many layers: it asks the index alone.
        """
        if (prepared := self._prepared) is None:
            return None
        made_for, index, resident, k = prepared
        if made_for != self._prepared_for() or len(resident) >= resident.room:
            return None
        return index.prepare_replay(resident, k=k)

    def _prepared_for(self) -> object:
        """What `prepare_replay` depends on, but for the index's part."""
        return self.calls_begun, id(self.index), self.k, self.coverage, self.dense_below

    def captured_step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `step` of one real token for each row of the batch, for a CUDA graph of the caller's.

        Where the token goes and how many rows there are is read on the device. Before a capture
        and before each replay comes `prepare_replay`, after each replay `count_replay`; what is
        given back is overwritten by the next one. Raises as `step`, but for values.
        """
        self._check_shapes(queries, keys, values)
        sinks = self._sinks(sink_logits, queries)
        index, resident = self._capturing()
        one, token, k = queries.select(2, 0), Rows(keys, values), rows_to_ask(self.index, self.k)
        attended = index.captured_step(one, token, resident, k=k)
        self._tally.watch(attended.found)
        return output_of(attended, None if sinks is None else sinks[..., 0]).unsqueeze(2)

    def _capturing(self) -> tuple[CapturesStep, ResidentRows]:
        """The index, and its resident rows with room for a token."""
        resident = self._regions.resident(len(self.index), more=1)
        return required(self.index, CapturesStep), resident

    def count_replay(self) -> None:
        """A graph with `captured_step` has been replayed: the token is the layer's, an update may
        begin or end. Where that raises, the token has come all the same.
        """
        regions = self._regions
        resident = regions.count_staged()
        length = len(self)
        sizes = len(resident), resident.masked, length, regions.padded
        self._tally.count(Counts(None, *sizes, self._row_bytes))
        if length >= self._due_at and self._is_due(1):
            self._update_replayed()

    def _update_replayed(self) -> None:
        """As `_update` after a token, as a call of its own."""
        self._update(1)

    def checkpoint(self) -> Any:
        """What the layer is now, for `rollback`: it asks the device for nothing."""
        index, regions, tally = self.index, self._regions, self._tally
        before = index.checkpoint() if isinstance(index, Restorable) else len(index)
        parts = before, regions, regions.checkpoint(), tally, tally.checkpoint()
        return parts, self._move, self._sealed, self._looked, self._searched

    def rollback(self, checkpoint: Any) -> None:
        """Be again what `checkpoint` says, the index, too.

        One that is no `Restorable` is truncated to what it held, and keeps what signals told it.
        """
        self._prepared = None
        parts, move, self._sealed, self._looked, self._searched = checkpoint
        before, self._regions, regions, self._tally, tally = parts
        if self._move is not None and self._move is not move:
            self._move.wait()  # the index writes to the same places again
        self._move = move
        self._regions.rollback(regions)
        self._tally.rollback(tally)
        if isinstance(self.index, Restorable):
            self.index.rollback(before)
        else:
            cut_back(self.index, before)

    def recipe(self) -> Recipe:
        """The layer's options, and how its index is made, which None stands for if unknown."""
        index, names = capability(self.index, TellsRecipe), inspect.signature(AttentionLayer)
        options = {name: vars(self)[name] for name in names.parameters if name != "index"}
        made = None if index is None else index.recipe()
        return {"layer": class_name(type(self)), "options": options, "index": made}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write layer and index to a new folder, for `kvindex.load`.

        The folder is whole, or is not there. Raises OSError for one that is there already or cannot
        be written, and as `state_dict`.
        """
        save_folder(folder, "layer", self.recipe(), {"state": self.state_dict})

"""Run the decode steps of a given continuation in parallel, as one batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import ExpandsBatch, KVIndex
from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import checked_sinks
from kvindex.layer.retrieval import attend_over, output_of, rows_to_ask, search


class ParallelLayer(AttentionLayer):
    """An attention layer that can run the decode steps of several known tokens in parallel.

    The tokens are known in advance if an index is compared with full attention on a given text. The
    index does not change until the next tokens are appended to it, so all decode steps until then
    can search in one batch. Afterwards the index gets the queries of these steps in their order.
    Only one sequence without padding is supported.

    Raises:
        ValueError: The index cannot search for several steps in one batch (it lacks the capability
            `ExpandsBatch`).
    """

    _begun = False

    def __init__(self, index: KVIndex, **options: Any) -> None:
        super().__init__(index, **options)
        self._expanding()

    def begin(self) -> None:
        """End the prompt. Later calls of `step` run each token as a decode step."""
        self._updates.end_prompt()
        self._begun = True

    def pause(self) -> None:
        """Return to the behaviour of `AttentionLayer`, until the next call of `begin`.

        A call of `step` with one token is then a decode step, and a call with several tokens reads
        a part of a prompt.
        """
        self._begun = False

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
        """Compute attention for `T` tokens.

        After a call of `begin`, each of the `T` tokens is a decode step of its own. The outputs
        then equal those of `T` calls of `AttentionLayer.step` with one token each. Without `begin`,
        this method calls `AttentionLayer.step` once, with all `T` tokens.

        Args:
            queries: Queries `[1, H, T, D]`.
            keys: Keys `[1, G, T, D]`.
            values: Values `[1, G, T, Dv]`.
            valid: Which tokens are no padding, as in `AttentionLayer.step`.
            bias: Bias of the logits, as in `AttentionLayer.step`. Must be None after `begin`.
            sink_logits: Sink logits, as in `AttentionLayer.step`.
            ids: Positions that the caller chose, as in `AttentionLayer.step`. Must be None after
                `begin`.
            visible: Mask, as in `AttentionLayer.step`. Must be None after `begin`.

        Returns:
            Attention outputs `[1, H, T, Dv]`.

        Raises:
            ValueError: `begin` was called, and `bias`, `ids` or `visible` is a tensor.
        """
        own: dict[str, Any] = dict(bias=bias, ids=ids, visible=visible)
        if not self._begun:
            own |= dict(valid=valid, sink_logits=sink_logits)
            return super().step(queries, keys, values, **own)
        for name, given in own.items():
            if given is not None:
                raise ValueError(
                    f"{name}: got a tensor, allowed is None while decode steps run in parallel"
                )
        keys, values, _ = self._checked(queries, keys, values, valid)
        sinks = checked_sinks(sink_logits, queries)
        done, outputs = 0, []
        while done < queries.shape[2]:
            self._begin_steps()
            room = max(self.update_every - self._window.buffer, 1)
            block = slice(done, done + room)
            done += room
            parts = queries[:, :, block], keys[:, :, block], values[:, :, block]
            some = None if sinks is None else sinks[..., block]
            if len(self.index) and (self.error is None or self._scale.known):
                outputs.append(self._steps(*parts, some))
            else:  # no step searches
                outputs.append(self._densely(*parts, some))
        return torch.cat(outputs, dim=2)

    def _densely(
        self, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Append `T` tokens that attend to all tokens, also if prompts are read sparsely."""
        prefill, self.prefill = self.prefill, "dense"
        try:
            return super().step(queries, keys, values, sink_logits=sinks)
        finally:
            self.prefill = prefill

    def _measure(self, values: Tensor, outputs: Tensor, valid: Tensor | None) -> None:
        """Measure tokens of decode steps one by one, as `AttentionLayer` does."""
        if not self._begun:
            return super()._measure(values, outputs, valid)
        for t in range(outputs.shape[2]):
            one = slice(t, t + 1)
            real = None if valid is None else valid[:, one]
            super()._measure(values[:, :, one], outputs[:, :, one], real)
        return None

    def attend(self, queries: Tensor, *, sink_logits: Tensor | None = None) -> Tensor:
        """Attend to the keys and values of this layer with the queries of another layer.

        Raises:
            ValueError: Decode steps run in parallel, which this method does not support.
        """
        if self._begun:
            raise ValueError(
                "queries: got the queries of a layer that shares another layer's keys and values, "
                "but parallel decode steps support only layers with keys of their own"
            )
        return super().attend(queries, sink_logits=sink_logits)

    def _steps(self, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Run `T` decode steps, during which nothing is appended to the index, as one batch.

        The queries are `[1, H, T, D]`, and the sink logits `[1, H, T]` or None. Return the
        attention outputs `[1, H, T, Dv]`.
        """
        T, before = queries.shape[2], len(self._window)
        self._window.append(len(self.index), keys, values, None)
        each = queries[0].transpose(0, 1).contiguous()  # decode step t is sequence t of the batch
        index = self._expanding().expand_batch(T)
        rows = torch.arange(before + T, device=queries.device)
        seen = rows <= torch.arange(before, before + T, device=queries.device)[:, None]
        own = None if sinks is None else sinks[0].mT
        wanted = replace(self._wanted(), k=rows_to_ask(self.index, self.k))
        hits = search(index, self._window, each, seen, wanted, sink_logits=own)
        over = self._window, each, hits, index.fetch(hits), seen
        read = attend_over(self.index, *over, sink_logits=own)
        output = output_of(self._retrieval.counted(read, len(self)), own)
        positions = torch.arange(len(self) - T, len(self), device=queries.device)
        for step in range(T):
            self.index.observe_queries(queries[:, :, step, None], positions[step, None])
        self._end_steps()
        return output.transpose(0, 1)[None]

    def _begin_steps(self) -> None:
        """Called before parallel steps, for a subclass that does not move tokens after them."""

    def _end_steps(self) -> None:
        """Called after parallel steps: move tokens into the index, if that is due."""
        self._updates.update()

    def _expanding(self) -> ExpandsBatch:
        """Return the index as `ExpandsBatch`. Raise ValueError if it lacks this capability."""
        index = capability(self.index, ExpandsBatch)
        if index is None:
            raise ValueError(
                f"index: got {type(self.index).__name__}, whose searches depend on earlier steps "
                "or serve one step at a time, so decode steps cannot run in parallel; pass an "
                "index with the capability `ExpandsBatch`, or use `AttentionLayer`"
            )
        return index

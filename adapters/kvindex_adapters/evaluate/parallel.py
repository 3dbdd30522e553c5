"""Run teacher-forced decode steps in parallel, as one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import ExpandsBatch, KVIndex
from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import checked_sinks
from kvindex.layer.retrieval import attend_over, output_of, rows_to_ask


class ParallelLayer(AttentionLayer):
    """A layer that, after `begin`, runs a step of several tokens as one decode step per token.

    An index does not change between two updates, so all steps between two updates can search it in
    one batch. The index observes the queries of these steps one by one before the next update. This
    only supports one sequence without padding.

    Raises:
        ValueError: The index cannot search for several steps in one batch (it lacks
            `ExpandsBatch`).
    """

    _begun = False

    def __init__(self, index: KVIndex, **options: Any) -> None:
        super().__init__(index, **options)
        self._expanding()

    def begin(self) -> None:
        """End the prompt: the tokens that follow are decode steps."""
        self._updates.end_prompt()
        self._begun = True

    def pause(self) -> None:
        """Treat the tokens that follow as a prompt, or as single steps, until `begin`."""
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
        """Compute the outputs of `AttentionLayer.step` for each token one by one.

        Args:
            queries: As in `AttentionLayer.step`, for one sequence.
            keys: As in `AttentionLayer.step`.
            values: As in `AttentionLayer.step`.
            valid: As in `AttentionLayer.step`.
            bias: Must be None after `begin`.
            sink_logits: As in `AttentionLayer.step`.
            ids: Must be None after `begin`.
            visible: Must be None after `begin`.

        Returns:
            Attention outputs `[1, H, T, Dv]`.

        Raises:
            ValueError: `begin` was called, and bias, ids or visible is a tensor.
        """
        own: dict[str, Any] = dict(bias=bias, ids=ids, visible=visible)
        if not self._begun:
            own |= dict(valid=valid, sink_logits=sink_logits)
            return super().step(queries, keys, values, **own)
        for name, given in own.items():
            if given is not None:
                raise ValueError(
                    f"{name}: got a tensor, allowed is None where steps run in parallel"
                )
        keys, values, _ = self._checked(queries, keys, values, valid)
        sinks = checked_sinks(sink_logits, queries)
        done, outputs = 0, []
        while done < queries.shape[2]:
            room = max(self.update_every - self._window.buffer, 1)
            block = slice(done, done + room)
            done += room
            parts = queries[:, :, block], keys[:, :, block], values[:, :, block]
            some = None if sinks is None else sinks[..., block]
            if len(self.index):
                outputs.append(self._steps(*parts, some))
            else:  # no step searches
                outputs.append(super().step(*parts, sink_logits=some))
        return torch.cat(outputs, dim=2)

    def attend(self, queries: Tensor, *, sink_logits: Tensor | None = None) -> Tensor:
        """See `AttentionLayer.attend`. Raise ValueError while steps run in parallel."""
        if self._begun:
            raise ValueError(
                "queries: got those of a layer that shares the keys of another layer, allowed is "
                "a layer with its own keys while steps run in parallel"
            )
        return super().attend(queries, sink_logits=sink_logits)

    def _steps(self, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Run the steps between two updates. Return the output, `[1, H, T, Dv]`.

        The queries are `[1, H, T, D]`, and the sinks `[1, H, T]` or None.
        """
        T, before = queries.shape[2], len(self._window)
        self._window.append(len(self.index), keys, values, None)
        each = queries[0].transpose(0, 1).contiguous()  # each step is a sequence of a batch
        index = self._expanding().expand_batch(T)
        hits = index.search(each, k=rows_to_ask(self.index, self.k), coverage=self.coverage)
        rows = torch.arange(before + T, device=queries.device)
        seen = rows <= torch.arange(before, before + T, device=queries.device)[:, None]
        own = None if sinks is None else sinks[0].mT
        over = self._window, each, hits, index.fetch(hits), seen
        read = attend_over(self.index, *over, sink_logits=own)
        output = output_of(self._retrieval.counted(read, len(self)), own)
        positions = torch.arange(len(self) - T, len(self), device=queries.device)
        for step in range(T):
            self.index.observe_queries(queries[:, :, step, None], positions[step, None])
        self._updates.update()
        return output.transpose(0, 1)[None]

    def _expanding(self) -> ExpandsBatch:
        """Return the index's capability to search for several steps. Raise ValueError without
        it."""
        index = capability(self.index, ExpandsBatch)
        if index is None:
            raise ValueError(
                f"index: got {type(self.index).__name__}, whose searches depend on earlier steps "
                "or serve one step at a time; allowed is an index that can search for several "
                "steps in one batch (`ExpandsBatch`), or a layer that runs them one by one"
            )
        return index

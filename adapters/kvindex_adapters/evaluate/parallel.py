"""Teacher-forced decoding steps in parallel: one forward, batched over the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer


class ParallelLayer(AttentionLayer):
    """After `begin`, each of several tokens attends as a decoding step of its own would.

    Between two updates an index does not change, so all steps between them can search it at once,
    and it hears of their queries one by one before the update. For a batch of 1 without padding.
    Raises ValueError for an index that follows the steps (`depends_on_queries`), and for one, a
    wrapper say, that does not serve many queries at once (`expand_batch`).
    """

    _begun = False

    def __init__(self, index: KVIndex, **options: Any) -> None:
        super().__init__(index, **options)
        name = type(index).__name__
        if getattr(index, "depends_on_queries", False):
            raise ValueError(
                f"index: got {name}, whose search depends on the steps before it; allowed is one "
                "whose steps can be searched at once, or a layer that makes them one by one"
            )
        if not hasattr(index, "expand_batch"):
            raise ValueError(f"index: got {name}, allowed is one that has `expand_batch`")

    def begin(self) -> None:
        """End the prompt: tokens that follow are steps."""
        self.index.end_prompt()
        self._sealed = self._begun = True

    def step(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The output of `AttentionLayer.step` for each token one by one: `[1, H, T, Dv]`.

        Raises ValueError for a bias.
        """
        if not self._begun:
            return super().step(queries, keys, values, valid=valid, bias=bias)
        if bias is not None:
            raise ValueError("bias: got a tensor, allowed is None where steps come at once")
        keys, values, _ = self._checked(queries, keys, values, valid)
        done, outputs = 0, []
        while done < queries.shape[2]:
            room = max(self.update_every - self._regions.buffer, 1)
            block = slice(done, done + room)
            done += room
            parts = queries[:, :, block], keys[:, :, block], values[:, :, block]
            # with an empty index every step is exact
            outputs.append(self._steps(*parts) if len(self.index) else super().step(*parts))
        return torch.cat(outputs, dim=2)

    def _steps(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Steps between two updates: queries `[1, H, T, D]`; gives `[1, H, T, Dv]`."""
        T, held = queries.shape[2], len(self._regions)
        self._regions.append(len(self.index), keys, values, None)
        each = queries[0].transpose(0, 1).contiguous()  # the steps are rows of a batch
        inner: Any = self.index  # not of the protocol: `BaseIndex` and wrappers around it have it
        index: KVIndex = inner.expand_batch(T)
        hits = index.search(each, k=self._wanted, coverage=self.coverage)
        rows = torch.arange(held + T, device=queries.device)
        seen = rows <= torch.arange(held, held + T, device=queries.device)[:, None]
        output = self._over_regions(each, hits, index.fetch(hits), seen)
        positions = torch.arange(len(self) - T, len(self), device=queries.device)
        for step in range(T):
            self.index.observe_queries(queries[:, :, step, None], positions[step, None])
        self._update()
        return output.transpose(0, 1)[None]

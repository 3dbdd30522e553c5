"""Many teacher-forced steps in one forward: the same attention, batched over the steps."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer


class ParallelLayer(AttentionLayer):
    """After `begin`, each of several tokens attends as a decoding step of its own would.

    Between two updates an index does not change, so all steps between them can search it at once.
    For a batch of 1 without padding, and indexes that have `repeated`, as `kvindex.BaseIndex`.
    """

    _begun = False

    def begin(self) -> None:
        """The prompt is complete: what comes now are steps."""
        self.index.seal()
        self._sealed = self._begun = True

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """As `AttentionLayer.step` does for each token in turn: `[1, H, T, Dv]`."""
        if not self._begun:
            return super().step(queries, keys, values, valid=valid)
        keys, values, _ = self._checked(queries, keys, values, valid)
        done, outputs = 0, []
        while done < queries.shape[2]:
            room = self.update_every - self._regions.buffer
            some = slice(done, done + room)
            done += room
            outputs.append(self._steps(queries[0, :, some], keys[:, :, some], values[:, :, some]))
        return torch.cat(outputs)[None].transpose(1, 2)

    def _steps(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Steps between two updates: queries `[H, T, D]`; gives `[T, H, Dv]`."""
        T, held = queries.shape[1], len(self._regions)
        self._regions.append(len(self.index), keys, values, None)
        each = queries.transpose(0, 1).contiguous()  # the steps are rows of a batch
        # not of the protocol: `BaseIndex` and wrappers that pass it on have it
        index = self.index.repeated(T)  # type: ignore[attr-defined]
        hits = index.search(each, k=self.k, mass=self.mass)
        rows = torch.arange(held + T, device=queries.device)
        seen = rows <= torch.arange(held, held + T, device=queries.device)[:, None]
        output = self._over_regions(each, hits, index.fetch(hits), seen)
        self._update()
        return output

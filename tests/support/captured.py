"""`exact` with steps for a CUDA graph in plain torch, which is fast where kernels are emulated."""

import torch

from kvindex.core.protocol import Attended
from kvindex.indexes.exact import Exact
from kvindex.layer.retrieval import bias_of
from kvindex.ops import attention


class Captured(Exact):
    """An index whose captured steps attend to all present rows.

    After an append, a new graph is needed.
    """

    _reads = None

    def prepare_replay(self, resident, *, k):
        parts = [rows for _, rows in self._store.blocks(16_384)]
        keys, values = (torch.cat([getattr(part, name) for part in parts], 2) for name in PARTS)
        valid = torch.ones(len(keys), len(self), dtype=torch.bool)
        valid = valid if self.valid is None else self.valid.clone()
        reads = keys, values, valid, resident
        if self._reads is None or not all(map(same, self._reads, reads)):
            self._reads, self._found = reads, torch.zeros(keys.shape[:2], dtype=torch.int64)
        return self._reads

    def captured_step(self, queries, token, resident, *, k):
        keys, values, valid, _ = self._reads
        resident.rows.index_copy_(2, resident.count, torch.cat([token.keys, token.values], -1))
        resident.count.add_(1)
        seen = (torch.arange(resident.room) < resident.count) & resident.mask.bool()
        visible = torch.cat([valid, seen], 1)[:, None]
        D, g = token.keys.shape[-1], self.geometry
        keys = torch.cat([keys, resident.rows[..., :D]], 2)
        values = torch.cat([values, resident.rows[..., D:]], 2)
        self._found.add_(valid.sum(1, keepdim=True))
        options = dict(scale=g.scale, softcap=g.softcap, bias=bias_of(visible), return_lse=True)
        return Attended(*attention.attend(queries, keys, values, **options), self._found)


PARTS = ("keys", "values")


def same(one, other):
    """Return True if two tensors are equal, or two objects identical."""
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other

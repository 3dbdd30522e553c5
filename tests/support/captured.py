"""`exact` with a step for a caller's graph in plain torch: quick where kernels are emulated."""

import torch

from kvindex.core.protocol import Attended
from kvindex.indexes.exact import Exact
from kvindex.layer.retrieval import bias_of
from kvindex.ops import attention


class Captured(Exact):
    """Its captured steps attend to all rows; each update makes another graph of them."""

    _reads = None

    def prepare_replay(self, resident, *, k):
        made_of = len(self), resident
        if self._reads is None or self._reads[0] != made_of:
            parts = [rows for _, rows in self._store.blocks(16_384)]
            rows = [
                torch.cat([getattr(part, name) for part in parts], 2) for name in ("keys", "values")
            ]
            valid = self.valid
            if valid is None:
                valid = torch.ones(len(rows[0]), len(self), dtype=torch.bool)
            found = torch.zeros(rows[0].shape[:2], dtype=torch.int64)
            self._reads = made_of, rows, valid.clone(), found
        return self._reads

    def captured_step(self, queries, token, resident, *, k):
        _, rows, valid, found = self._reads
        resident.rows.index_copy_(2, resident.count, torch.cat([token.keys, token.values], -1))
        resident.count.add_(1)
        seen = (torch.arange(resident.room) < resident.count) & resident.mask.bool()
        visible = torch.cat([valid, seen], 1)[:, None]
        D, g = token.keys.shape[-1], self.geometry
        keys = torch.cat([rows[0], resident.rows[..., :D]], 2)
        values = torch.cat([rows[1], resident.rows[..., D:]], 2)
        found.add_(valid.sum(1, keepdim=True))
        options = dict(scale=g.scale, softcap=g.softcap, bias=bias_of(visible), return_lse=True)
        return Attended(*attention.attend(queries, keys, values, **options), found)

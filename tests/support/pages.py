"""A user's own store: rows in separate pages, as a serving engine would provide them."""

import torch

from kvindex.core.protocol import Rows
from kvindex.core.restore import Restorable


class Pages(Restorable):
    """A `kvindex.storage.store.RowStore` with pages `[B, G, page_tokens, D + Dv]`."""

    row_codec = "plain"

    def __init__(self, geometry, page_tokens=16):
        self.geometry, self.page_tokens = geometry, page_tokens
        self.pages, self.length = (), 0

    @property
    def row_bytes(self):
        g = self.geometry
        return (g.head_dim + g.value_dim) * g.dtype.itemsize

    def __len__(self):
        return self.length

    def join(self, keys, values):
        return torch.cat([keys, values], dim=-1)

    def reserve(self, rows):
        B, G, count, width = rows.shape
        if not self.length and self.pages and len(self.pages[0]) != B:
            self.pages = ()
        missing = -(-(self.length + count) // self.page_tokens) - len(self.pages)
        new = [rows.new_empty((B, G, self.page_tokens, width)) for _ in range(missing)]
        self.pages = (*self.pages, *new)

    def reserve_tokens(self, tokens):
        pass

    def write(self, rows):
        pass

    def append(self, rows):
        self.reserve(rows)
        for at, row in enumerate(rows.unbind(2), self.length):
            self.pages[at // self.page_tokens][:, :, at % self.page_tokens] = row
        self.length += rows.shape[2]

    def gather(self, ids):
        g = self.geometry
        if not self.length:
            flat = torch.zeros((*ids.shape[:2], 1, g.head_dim + g.value_dim), dtype=g.dtype)
        else:
            flat = torch.cat(self.pages, dim=2)
        at = ids.clamp_min(0)[..., None].expand(-1, -1, -1, flat.shape[-1])
        rows = flat.gather(2, at).masked_fill((ids < 0)[..., None], 0)
        return Rows(*rows.split([g.head_dim, g.value_dim], dim=-1))

    def blocks(self, size):
        for start in range(0, self.length, size):
            ids = torch.arange(start, min(start + size, self.length))
            yield start, self.gather(ids.expand(*self.pages[0].shape[:2], -1))

    def encoded(self):
        ids = torch.arange(self.length).expand(*self.pages[0].shape[:2], -1)
        rows = self.gather(ids)
        return self.join(rows.keys, rows.values).view(torch.uint8)

    def append_encoded(self, rows):
        self.append(rows.view(self.geometry.dtype))

    def truncate(self, length):
        self.length = min(length, self.length)

    def reordered(self, batch_indices):
        return self._with(tuple(page[batch_indices] for page in self.pages))

    def expand_batch(self, count):
        return self._with(tuple(page.expand(count, -1, -1, -1) for page in self.pages))

    def emptied(self):
        return type(self)(self.geometry, self.page_tokens)

    def nbytes(self):
        return sum(page[:, :, 0].numel() for page in self.pages[:1]) * self.length * 4

    def _with(self, pages):
        duplicate = self._shallow()
        duplicate.pages = pages
        return duplicate

    def __deepcopy__(self, memo):
        return self._with(tuple(page.clone() for page in self.pages))


class AddressedPages(Pages):
    """`Pages` with `kvindex.storage.store.AddressedRows`: pages of 256 tokens, for each sequence.

    `on_host` says whether kernels should cache the rows that they have read.
    """

    def __init__(self, geometry, page_tokens=256, on_host=False):
        super().__init__(geometry, page_tokens)
        self.on_host, self.waited, self.table = on_host, 0, torch.zeros((0, 64), dtype=torch.int64)

    @property
    def head_bytes(self):
        return self.page_tokens * self.row_bytes

    def wait(self):
        self.waited += 1

    def reserve(self, rows):
        super().reserve(rows)
        if len(self.table) != len(rows):
            self.table = torch.zeros((len(rows), 64), dtype=torch.int64)
        self._name()

    def _name(self):
        for at, page in enumerate(self.pages):
            self.table[:, at] = torch.tensor([row.data_ptr() for row in page])

    def _with(self, pages):
        duplicate = super()._with(pages)
        duplicate.table = torch.zeros((len(pages[0]) if pages else 0, 64), dtype=torch.int64)
        duplicate._name()
        return duplicate

"""Gather rows (keys and values) by their token ids: the compiled version of `kvindex.ops.fetch`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.cpu import threads, views
from kvindex.cpu.kernels import rows
from kvindex.cpu.state import addresses
from kvindex.ops import fetch as reference


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Gather rows (keys and values) by their token ids.

    This is the compiled version of `ops.fetch.gather_rows`.

    Raises:
        IndexError: An id is not below the number of rows.
    """
    if not views.on_cpu(table, ids) or not views.dense_rows(table) or table.requires_grad:
        return reference.gather_rows(table, ids)
    (B, G, K), shape = ids.shape, table.shape[3:]
    wanted = views.array(ids, B * G, K)
    if wanted.size and wanted.max() >= table.shape[2]:
        raise IndexError(
            f"ids: got {wanted.max()}, allowed is below {table.shape[2]}, the number of rows"
        )
    found = torch.empty((B, G, K, *shape), dtype=table.dtype)
    if not found.numel():
        return found
    wide = found[0, 0, 0].numel() * table.element_size()
    source, step = addresses(table), table.stride(2) * table.element_size()

    def part(i: int, parts: int) -> None:
        rows.gather_rows(i, parts, source, step, wide, wanted, found.data_ptr())

    threads.run(part, views.parts(B * G * K * wide // 4, K))
    return found

"""Merging the messages of all ranks gives the attention over all rows."""

import torch

from kvindex.core.protocol import Attended
from kvindex.ops.attention import attend
from kvindex.ops.messages import merge_messages, message_parts, pack


def test_messages_of_ranks_merge_to_attention_over_all_rows():
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(2, 6, 16, generator=generator)
    keys, values = torch.randn(2, 2, 2, 40, 16, generator=generator)
    counts, made = torch.tensor([[7, 7], [7, 7]]), []
    for rows in (slice(0, 7), slice(7, 40)):
        own = attend(queries, keys[:, :, rows], values[:, :, rows], scale=0.3, return_lse=True)
        made.append(pack(Attended(*own, counts.clone()), seen=True))
    blind = Attended(torch.full_like(own[0], torch.nan), own[1], torch.zeros_like(counts))
    made.append(pack(blind, seen=False))
    total = torch.ones(2, 2, dtype=torch.int64)
    merged = merge_messages(torch.stack(made), blind, total=total)
    want, lse = attend(queries, keys, values, scale=0.3, return_lse=True)
    torch.testing.assert_close(merged.output, want)
    torch.testing.assert_close(merged.lse, lse)
    assert (merged.found == 14).all()
    assert (total == 15).all()


def test_a_message_has_its_parts_where_a_gpu_reads_them():
    for dtype, heads in ((torch.bfloat16, 3), (torch.float32, 1)):
        output = torch.arange(heads * 8.0).view(1, heads, 8).to(dtype)
        own = Attended(output, torch.arange(float(heads))[None], torch.tensor([[5]]))
        message = pack(own, seen=True, take=True)
        parts = message_parts(torch.stack([message, message]), own)
        for part, want in zip((parts.output, parts.lse), (own.output, own.lse), strict=True):
            assert torch.equal(part[1], want)
            assert part.storage_offset() * part.itemsize % 16 == 0
            assert part.stride(0) * part.itemsize % 16 == 0
        assert (parts.found == 5).all()
        assert not own.found.any()

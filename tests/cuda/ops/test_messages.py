"""Messages of ranks by kernels have the same bytes and give the same attention as the torch
reference.
"""

import pytest
import torch

from kvindex.core.protocol import Attended
from kvindex.ops import messages as reference
from kvindex_cuda.ops import messages
from tests.cuda.devices import mostly_slow_on_cpu, on, on_devices


def attended(device, dtype, group, counts, seed=0):
    """Attention of a rank over 2 sequences of 2 KV heads, with given numbers of rows found."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(2, 2 * group, 24, generator=generator).to(device, dtype)
    lse = 9 * torch.randn(2, 2 * group, generator=generator)
    lse[0, 0] = float("-inf")
    return Attended(output, lse.to(device), counts.clone().to(device))


CASES = [
    (torch.float32, 1, torch.int64),
    (torch.float16, 3, torch.int32),
    (torch.bfloat16, 8, torch.int64),
]


@mostly_slow_on_cpu("dtype, group, of", CASES, CASES[0], indirect=False, ids=str)
def test_messages_and_what_they_merge_to_are_the_references(dtype, group, of, device):
    counts = torch.tensor([[0, 3], [7, 0]], dtype=of)
    made, want = [], []
    for rank in range(3):
        own = attended(device, dtype, group, counts, rank)
        own.output[0, 0] = float("nan")  # where no row is visible, a kernel may return anything
        if rank == 1:
            own.output[0, 0] = 1
        for seen, take in ((False, False), (rank == 1, True)):
            twin = Attended(own.output, own.lse, own.found.clone())
            with on(device):
                got = messages.pack(own, seen=seen, take=take)
            expected = reference.pack(twin, seen=seen, take=take)
            for mine, theirs in zip(*(parts(each, own) for each in (got, expected)), strict=True):
                assert torch.equal(mine, theirs)
            assert torch.equal(own.found, twin.found)
            assert bool(own.found.any()) != take
        made.append(got)
        want.append(expected)
    total = torch.full((2, 2), 40, device=device)
    with on(device):
        merged = messages.merge_messages(torch.stack(made), own, total=total)
    expected = reference.merge_messages(torch.stack(want), own)
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]  # one rounding
    torch.testing.assert_close(merged.output, expected.output, rtol=bound, atol=bound)
    torch.testing.assert_close(merged.lse, expected.lse, rtol=1e-5, atol=1e-5)
    assert merged.found.tolist() == expected.found.tolist() == [[0, 9], [21, 0]]
    assert (total - 40).tolist() == merged.found.tolist()


def parts(message, like):
    found = reference.message_parts(message[None], like)
    return found.output.nan_to_num(), found.lse, found.found


@on_devices
def test_one_rank_alone_says_what_it_has(device):
    own = attended(device, torch.float32, 3, torch.ones(2, 2, dtype=torch.int32))
    own.output[0, 0] = 0
    with on(device):
        merged = messages.merge_messages(messages.pack(own, seen=True)[None], own)
    torch.testing.assert_close(merged.output, own.output)
    torch.testing.assert_close(merged.lse, own.lse)
    assert torch.equal(merged.found, own.found)


def test_what_no_kernel_takes_is_refused():
    own = attended("cpu", torch.float32, 3, torch.ones(2, 2, dtype=torch.int32))
    wrong = Attended(own.output, own.lse, own.found.float())
    with pytest.raises(ValueError, match=r"found: got torch.float32, allowed is torch.int32 or"):
        messages.pack(wrong, seen=True)
    gaps = Attended(own.output, own.lse, own.found.expand(3, 2, 2)[:, :, 0].T)
    with pytest.raises(ValueError, match="found: got strides"):
        messages.pack(gaps, seen=True, take=True)
    message = reference.empty_message(own)[None]
    with pytest.raises(ValueError, match=r"total: got torch.int32, allowed is torch.int64"):
        messages.merge_messages(message, own, total=own.found)

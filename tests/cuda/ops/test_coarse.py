"""The kernels of the coarse stage equal the torch reference bit by bit."""

import pytest
import torch

from kvindex.ops import coarse as reference
from kvindex.ops.codes import log_factors
from kvindex_cuda.ops import coarse
from tests.cuda import emulator
from tests.cuda.devices import mostly_slow_on_cpu, on, on_devices
from tests.support.helpers import far_apart, mostly_slow, slow


class Draw:
    """Random inputs for a seed, on a device."""

    def __init__(self, seed, device):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def integers(self, low, high, *shape, dtype):
        drawn = torch.randint(low, high, shape, generator=self.generator)
        return drawn.to(self.device, dtype)

    def bytes(self, *shape, largest=255):
        return self.integers(0, largest + 1, *shape, dtype=torch.uint8)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.device)

    def flags(self, *shape):
        return self.bytes(*shape, largest=3) > 0

    def skewed(self, *shape):
        """Centroids with the distribution that keys have: some are frequent."""
        return (self.normal(*shape) * 40 + 128).clamp(0, 255).to(torch.uint8)


def spread(tensor, room):
    """The same entries in a tensor with room for more rows, as an index stores them."""
    B, G, N, *rest = tensor.shape
    wide = torch.full((B, G, N + room, *rest), 77, dtype=tensor.dtype, device=tensor.device)
    wide[:, :, :N] = tensor
    return wide[:, :, :N]


SIZES = [(8, 1, 0), (8, 1, 1), (10, 3, 257), (12, 4, 255), (16, 8, 3000), (32, 4, 257)]
"""Parameters: M, query heads of a group, keys."""

KINDS = ["of the key", "of subspaces", "none"]


@mostly_slow_on_cpu("M, g, N", mostly_slow(SIZES, *SIZES[:3]), *SIZES[:2], indirect=False)
def test_tiers(M, g, N, device):
    draw = Draw(M + N, device)
    signs, queries = draw.skewed(2, 2, N, M), draw.normal(2, 2, g, 8 * M)
    valid = draw.flags(2, N) if N else None
    limits = draw.integers(0, N + 1, 2, 6, dtype=torch.int64).sort(-1).values
    with on(device):
        bins = coarse.histogram(spread(signs, 5), valid)
        table = coarse.tier_table(queries, bins, limits)
        votes = coarse.votes(spread(signs, 3), table)
    assert torch.equal(bins, reference.histogram(signs, valid))
    assert torch.equal(table, reference.tier_table(queries, bins, limits))
    assert torch.equal(votes, reference.votes(signs, table))
    assert (votes.dtype, table.dtype) == (torch.int32, torch.uint8)


@mostly_slow_on_cpu(
    "M, g, N, kind",
    [
        *((*size, KINDS[i % 3]) for i, size in enumerate(SIZES[:3])),
        *(slow(*size, KINDS[i % 3]) for i, size in enumerate(SIZES[3:])),
        *(slow(*SIZES[-2], kind) for kind in KINDS[::2]),
    ],
    *((*size, KINDS[i]) for i, size in enumerate(SIZES[:2])),
    indirect=False,
)
def test_dots(M, g, N, kind, device):
    draw, every, largest = Draw(M + N, device), 50, 127
    signs, queries = draw.skewed(2, 2, N, M), draw.normal(2, 2, g, 8 * M)
    queries[0, 1, 0] = 0
    weights = draw.bytes(2, 2, N, M if kind == "of subspaces" else 1)
    factors = None if kind == "none" else log_factors(8, device)[weights.long()]
    products = draw.normal(2, 2, g, -(-N // every) + 1) * 30
    products[0, 0, :, 0], products[1, 0, :, 0] = 1e35, -1e35
    scale = draw.normal(2, 2).abs(), 0.0701
    scale[0][1, 1] = 0
    with on(device):
        table = coarse.dot_table(queries, largest)
        offsets = coarse.dot_offsets(products, queries, largest, *scale)
        votes = coarse.votes(spread(signs, 4), table, factors, offsets, every)
    assert torch.equal(table, reference.dot_table(queries, largest))
    assert torch.equal(offsets, reference.dot_offsets(products, queries, largest, *scale))
    assert torch.equal(votes, reference.votes(signs, table, factors, offsets, every))


WIDEST = {
    "bytes in words of four": (torch.uint8, 0, 15),
    "the largest of four": (torch.uint8, 31, 31),
    "bytes in words of two": (torch.uint8, 255, 255),
    "two in a word": (torch.int16, -4095, 4095),
    "one in a word": (torch.int16, -32768, 32767),
}


@on_devices
@pytest.mark.parametrize("case", WIDEST)
def test_whatever_entries_a_table_has(case, device):
    dtype, low, high = WIDEST[case]
    draw = Draw(high, device)
    signs, table = (
        draw.bytes(1, 2, 300, 8),
        draw.integers(low, high + 1, 1, 2, 5, 8, 256, dtype=dtype),
    )
    table[0, 0, 1, :, 7], signs[0, :, 5] = high, 7  # the largest possible sum
    table[0, 0, 2, :, 9], signs[0, :, 6] = low, 9
    with on(device):
        votes = coarse.votes(signs, table)
    assert torch.equal(votes, reference.votes(signs, table))


@on_devices
def test_equal_similarities_go_by_the_id(device):
    draw = Draw(0, device)
    queries = draw.normal(1, 1, 3, 16).sign() * 0.25
    queries[0, 0, 2] = 0
    bins = draw.integers(0, 9, 1, 1, 2, 256, dtype=torch.int64)
    limits = torch.tensor([[1, 30, 100, 250, 500, 2**40]], device=device)
    with on(device):
        table = coarse.tier_table(queries, bins, limits)
    assert torch.equal(table, reference.tier_table(queries, bins, limits))


@on_devices
def test_codes_beyond_2_to_the_31_bytes_are_found(device):
    draw = Draw(5, device)
    signs, table = draw.skewed(1, 2, 500, 8), draw.bytes(1, 2, 4, 8, 256, largest=6)
    apart = far_apart(signs)
    with on(device):
        assert torch.equal(coarse.histogram(apart), coarse.histogram(signs))
        assert torch.equal(coarse.votes(apart, table), coarse.votes(signs, table))


@on_devices
def test_a_batch_equals_its_rows(device):
    draw = Draw(1, device)
    signs, queries = draw.skewed(3, 2, 500, 8), draw.normal(3, 2, 4, 64)
    limits = draw.integers(0, 500, 3, 6, dtype=torch.int64)
    with on(device):

        def steps(rows):
            bins = coarse.histogram(signs[rows])
            points = coarse.tier_table(queries[rows], bins, limits[rows])
            return bins, points, coarse.votes(signs[rows], points)

        whole, parts = steps(slice(None)), [steps(slice(b, b + 1)) for b in range(3)]
    for got, *each in zip(whole, *parts, strict=True):
        assert torch.equal(got, torch.cat(each))


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_whatever_the_order_of_threads_and_blocks():
    draw = Draw(2, "cpu")
    signs, queries = draw.skewed(1, 1, 9000, 8), draw.normal(1, 1, 4, 64)
    limits = draw.integers(0, 5000, 1, 6, dtype=torch.int64)
    bins = reference.histogram(signs)
    points = reference.tier_table(queries, bins, limits)
    want = bins, points, reference.votes(signs, points)
    for order in emulator.ORDERS:
        with emulator.emulated(order=order, seed=3):
            bins = coarse.histogram(signs)
            points = coarse.tier_table(queries, bins, limits)
            got = bins, points, coarse.votes(signs, points)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@on_devices
def test_the_comparison_can_fail(device):
    draw = Draw(3, device)
    signs, table = draw.bytes(1, 1, 300, 8), draw.bytes(1, 1, 4, 8, 256, largest=6)
    want = reference.votes(signs, table)
    table[0, 0, 3, 5, int(signs[0, 0, 299, 5])] += 1
    with on(device):
        votes = coarse.votes(signs, table)
    assert not torch.equal(votes, want)
    assert torch.equal(votes[:, :, :3], want[:, :, :3])


def test_what_the_kernels_do_not_serve_is_refused():
    draw = Draw(4, "cpu")
    signs, table = draw.bytes(1, 1, 30, 8), draw.bytes(1, 1, 4, 8, 256)
    for message, arguments in {
        "signs: got torch.int64": (signs.long(), table),
        "table: got torch.int32": (signs, table.int()),
        "table: got shape": (signs, table[..., :5, :]),
        "factors: got shape": (signs, table, torch.ones(1, 1, 30, 3, dtype=torch.int32)),
        "offsets: got 3 offsets for 7 keys": (signs, table, None, torch.ones(1, 1, 4, 3).int(), 7),
    }.items():
        with pytest.raises(ValueError, match=message):
            coarse.votes(*arguments)
    with pytest.raises(ValueError, match="allowed is a CUDA device"):
        coarse.votes(signs, table)
    with pytest.raises(ValueError, match="queries: got D = 12"):
        coarse.dot_table(draw.normal(1, 1, 1, 12), 127)

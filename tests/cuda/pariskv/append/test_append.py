"""`ParisKV.append` with a kernel that writes codes, compared with the index in plain torch."""

from itertools import product

import pytest
import torch

from kvindex.core.check import LARGEST
from kvindex.ops import codes
from kvindex.pariskv.index import ParisKV
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.runtime import launch
from tests.cuda.devices import mostly_slow_on_cpu
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    left_padding,
    mostly_slow,
    part,
    sampled,
)

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
OPTIONS = dict(preset="fast", candidates_per="group")

FLIPPED = 1e-4
"""Largest fraction of codes that may differ: coordinates next to an edge (`test_encode.py` checks
each).
"""

TIPPED = 1e-2
"""Largest fraction of center coordinates that float32 sums may round to the neighbor of the
reference's number (`test_encode.py` checks how far apart they are). Most of these occur with
float32 keys. The keys of such segments are not compared.
"""


def pair(device, case=CASE, **options):
    """The index whose kernels write codes, and the index in plain torch."""
    options = OPTIONS | dict(device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def tokens_of(case, count, device, seed=0):
    """Keys that share a component, as those of a head do, and values."""
    keys, values = case.tokens(count, seed)
    shift = 2 * case.tensor(seed + 50, 1, case.kv_heads, 1, case.head_dim)
    return (keys + shift).to(device), values.to(device)


def codes_of(index):
    """Columns of all tokens, including those of the open block, `[B, G, N, ...]`."""
    if index._executor is None:
        parts = index._parts()
        return {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    blocks = index._codes._shallow()
    blocks._length = -(-len(index) // BLOCK) * BLOCK
    return {
        name: blocks[name] if name == "centers" else blocks[name][:, :, : len(index)]
        for name in blocks
    }


def assert_same(mine, theirs):
    """Tokens are equal, and codes are too, except for some at an edge or with a center that is
    rounded differently.
    """
    assert mine._executor.encodes
    assert theirs._executor is None
    assert len(mine) == len(theirs)
    assert torch.equal(mine._learned["open_keys"], theirs._learned["open_keys"])
    if not len(mine):
        return
    held, want = codes_of(mine), codes_of(theirs)
    real = torch.ones((mine._batch, len(mine)), dtype=torch.bool, device=mine.geometry.device)
    real = (real if mine.valid is None else mine.valid)[:, None].expand(
        -1, mine.geometry.kv_heads, -1
    )
    if "centers" in want:
        real = real & ~tipped(held["centers"], want["centers"], len(mine))
    differ = 0
    for name in ("signs", "magnitudes"):
        flips = held[name] ^ want[name]
        differ += int(codes.unpack(flips)[real].sum())
    assert differ <= FLIPPED * int(real.sum()) * mine.geometry.head_dim + 4
    logs = [(some["fractions"].int() | some["weights"].int() << 8)[real] for some in (held, want)]
    assert int(((logs[0] - logs[1]).abs() > 1).sum()) <= differ  # another level
    if mine.valid is not None:
        assert not held["weights"].masked_fill(mine.valid[:, None, :, None], 0).any()


def tipped(mine, theirs, tokens):
    """Tokens, bool `[B, G, N]`, whose segment has another center, which differs by rounding errors
    only.
    """
    apart = mine != theirs
    assert int(apart.sum()) <= TIPPED * apart.numel() + 2
    size = theirs.float().abs()
    off = (mine.float() - theirs.float()).abs()
    assert (off <= 2.0**-7 * size + 2.0**-16 * size.amax())[apart].all()
    return apart.any(-1).repeat_interleave(BLOCK, dim=-1)[..., :tokens]


def assert_searches_alike(mine, theirs, queries, k=20):
    assert_same(mine, theirs)
    hits = [index.search(queries, k=k) for index in (mine, theirs)]
    same = (hits[0].ids[..., None] == hits[1].ids[..., None, :]).any(-1).float().mean()
    assert same > 0.97
    if same == 1:
        assert_same_hits(*hits, close=ROUNDED)


@pytest.mark.parametrize(
    ("pieces", "dim"),
    mostly_slow(
        product([[600], [100, 300, 7, 256, 1], [1] * 9, [256, 256]], [64, 80, 128]),
        ([600], 64),
        ([100, 300, 7, 256, 1], 64),
        ([1] * 9, 64),
    ),
    ids=str,
)
def test_appends_may_begin_and_end_anywhere(pieces, dim, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=torch.bfloat16)
    mine, theirs = pair(device, case)
    tokens, start = tokens_of(case, sum(pieces), device), 0
    for count in pieces:
        for index in (mine, theirs):
            index.append(*part(tokens, start, start + count))
        assert_same(mine, theirs)
        start += count
    assert_searches_alike(mine, theirs, case.queries().to(device), k=5)


def append(indexes, keys, values, **options):
    for index in indexes:
        index.append(keys, values, **options)


def test_blocks_are_shared_out_where_there_are_more_than_of_threads(device):
    """Run twice, because what the blocks of an append have counted must not affect the next
    append.
    """
    case, count = Case(q_heads=8, kv_heads=8, head_dim=64, dtype=torch.bfloat16), 1300
    if device == "cuda":
        count = 40_000
    mine, theirs = pair(device, case)
    keys, values = tokens_of(case, 2 * count, device)
    for start in (0, count):
        append((mine, theirs), *part((keys, values), start, start + count))
    assert_same(mine, theirs)


@mostly_slow_on_cpu("seed", mostly_slow(range(6), 0, 1), 0)
def test_any_history_encodes_the_same(seed, device):
    """Padded sequences, blocks that become full, truncated blocks, other batches."""
    case = Case(q_heads=2, kv_heads=1, head_dim=16, batch=3)
    draw = torch.Generator().manual_seed(seed)

    def below(bound):
        return int(torch.randint(bound, (), generator=draw))

    mine, theirs = both = pair(device, case)
    batch, padded = 3, True
    for step in range(8):
        count = [1, 40, 256, 300, 513][below(5)]
        tokens = tokens_of(Case(**{**case.__dict__, "batch": batch}), count, device, seed=step)
        valid = None
        if padded:
            pads = [below(count + 1) if below(2) else 0 for _ in range(batch)]
            valid = left_padding(pads, count).to(device)
        append(both, *tokens, valid=valid)
        assert_same(*both)
        match below(5):
            case 0:
                length = below(len(mine) + 1)
                for index in both:
                    index.truncate(length)
            case 1:
                order = torch.randint(batch, (1 + below(3),), generator=draw)
                for index in both:
                    index.reorder(order)
                batch = len(order)
            case 2:
                padded = not padded
        assert_same(*both)
    queries = Case(**{**case.__dict__, "batch": batch}).queries().to(device)
    if int(theirs.counts.max()):
        assert_searches_alike(*both, queries, k=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, dict(preset="precise")), (torch.float16, dict(center=0))],
    ids=str,
)
def test_other_options(options, dtype, device):
    case = Case(kv_heads=2, head_dim=96, dtype=dtype)
    both = pair(device, case, **options)
    tokens = tokens_of(case, 400, device)
    for start, stop in ((0, 130), (130, 400)):
        append(both, *part(tokens, start, stop))
    assert_searches_alike(*both, case.queries().to(device))


def test_strides_do_not_matter(device):
    """Keys as a model's projections return them: the last axes are heads, then coordinates; keys
    and values are in one tensor.
    """
    keys, values = tokens_of(CASE, 300, device)
    joined = torch.cat([keys, values], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    both = pair(device)
    both[0].append(joined[..., :64], joined[..., 64:])
    both[1].append(keys, values)
    assert_same(*both)


def test_the_stride_of_one_token_is_nobodys(device):
    keys, values = tokens_of(CASE, 1, device)
    room = keys.new_zeros(len(keys) * 2048)
    odd = room.as_strided(keys.shape, (2048, 512, 67, 1)).copy_(keys)
    both = pair(device)
    both[0].append(odd, values)
    both[1].append(keys, values)
    assert_same(*both)


def test_one_kernel_encodes_the_full_blocks_and_one_the_open_one(device, monkeypatch):
    index, names = pair(device)[0], []
    run = launch.LOADERS[device]

    def load(*which):
        names.append(which[1])
        return run(*which)

    monkeypatch.setitem(launch.LOADERS, device, load)
    for count, encoded in ((512, 1), (100, 1), (156, 1), (300, 2), (1, 1)):
        names.clear()
        index.append(*tokens_of(CASE, count, device))
        assert names.count("encode") == encoded, names


@mostly_slow_on_cpu(
    "pieces",
    mostly_slow(
        [[1] * 20, [100, 300, 300], [256, 400, 44], [700, -1, 1]], [100, 300, 300], [700, -1, 1]
    ),
    [700, -1, 1],
    ids=str,
)
def test_bytes_are_a_function_of_the_tokens(pieces, device):
    """Codes are equal bit by bit, however the tokens were appended."""
    once, parts = pair(device)[0], pair(device)[0]
    tokens = tokens_of(CASE, 700, device)
    for count in pieces:
        if count < 0:
            parts.truncate(len(parts) + count)
        else:
            parts.append(*part(tokens, len(parts), len(parts) + count))
    once.append(*part(tokens, 0, len(parts)))
    held, want = codes_of(parts), codes_of(once)
    for name in want:
        assert torch.equal(held[name], want[name]), name
    queries = CASE.queries().to(device)
    hits = [index.search(queries, k=20) for index in (parts, once)]
    assert torch.equal(hits[0].ids, hits[1].ids)
    assert torch.equal(hits[0].scores, hits[1].scores)


def test_what_was_never_written_is_never_read(device, monkeypatch):
    """Blocks contain garbage past what a kernel has written: searches return the same."""
    mine, theirs = pair(device)
    queries = CASE.queries().to(device)
    empty = torch.empty

    def garbage(*size, **how):
        return empty(*size, **how).view(torch.uint8).fill_(0xFF).view(how["dtype"])

    tokens = tokens_of(CASE, 300, device)
    theirs.append(*tokens)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", garbage)
        mine.append(*tokens)
    assert_searches_alike(mine, theirs, queries)


@mostly_slow_on_cpu(
    "place, wrong",
    sampled(
        [(0, 0, 0, 0), (1, 1, 255, 63), (0, 1, 299, 5), (1, 0, 643, 63)],
        [float("nan"), float("inf"), -float("inf"), 1e20, -3e38],
    ),
    *(((1, 1, 255, 63), float("inf")), ((1, 0, 643, 63), 1e20)),
    ids=str,
)
def test_keys_out_of_range_change_nothing(wrong, place, device):
    """A truncation in a full block, in the open block, and at the end."""
    both = pair(device, check=True)
    tokens = tokens_of(CASE, 900, device)
    append(both, *part(tokens, 0, 256))
    keys = tokens[0][:, :, 256:].clone()
    keys[place] = wrong
    for index in both:
        with pytest.raises(ValueError, match="keys: got"):
            index.append(keys, tokens[1][:, :, 256:])
    assert_same(*both)
    append(both, *part(tokens, 256, 900))
    assert_searches_alike(*both, CASE.queries().to(device))


@mostly_slow_on_cpu("dtype", [torch.float32, torch.bfloat16], torch.float32, ids=str)
def test_the_largest_keys_have_the_centers_of_the_reference(dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, dtype=dtype)
    mine, theirs = pair(device, case, check=True)
    keys, values = tokens_of(case, 512, device)
    keys[:, :, 100:140, 3] = LARGEST
    keys[:, :, 300:, 5] = -LARGEST
    append((mine, theirs), keys, values)
    assert torch.equal(codes_of(mine)["centers"], codes_of(theirs)["centers"])


def test_invalid_keys_may_be_anything_and_unchecked_ones_pass(device):
    mine, theirs = pair(device, check=True)
    keys, values = tokens_of(CASE, 300, device)
    valid = left_padding([0, 70], 300).to(device)
    spoilt = keys.masked_fill(~valid[:, None, :, None], float("nan"))
    mine.append(spoilt, values, valid=valid)
    theirs.append(keys, values, valid=valid)
    assert_same(mine, theirs)
    mine = pair(device, check=False)[0]
    keys[0, 0, 0, 0] = float("nan")
    mine.append(keys, values)
    assert len(mine) == 300


@pytest.mark.parametrize("place", [(1, 0, 5, 5), (0, 1, 230, 0)], ids=str)
def test_keys_that_are_not_finite_are_told_of_later(place, device, monkeypatch):
    """A kernel reports wrong keys, whichever it is that checks them, in a flag whose address does
    not change.
    """
    monkeypatch.setattr(ParisKV, "_defers", True)
    index = pair(device)[0]
    keys, values = tokens_of(CASE, 300, device)
    index.append(keys, values)
    index.raise_pending()
    flag = index._deferred["keys"][0]
    keys[place] = float("inf")
    index.append(keys, values)
    assert index._deferred["keys"][0] is flag
    with pytest.raises(ValueError, match=r"keys: got \(in an earlier call\)"):
        index.truncate(100)
    index.truncate(100)  # reported once


@pytest.mark.parametrize("part_of", ["_codes", "_store"])
def test_no_memory_leaves_the_index_as_it_was(part_of, device, monkeypatch):
    """An append continues a block in which one sequence has no valid token yet."""
    both = pair(device)
    tokens, valid = tokens_of(CASE, 900, device), left_padding([0, 100], 100).to(device)
    append(both, *part(tokens, 0, 100), valid=valid)

    def fail(*_):
        raise MemoryError("none left")

    for index in both:
        with monkeypatch.context() as patch:
            patch.setattr(getattr(index, part_of), "reserve", fail)
            with pytest.raises(MemoryError, match="none left"):
                index.append(*part(tokens, 300, 600))
    assert len(both[0]) == 100
    append(both, *part(tokens, 100, 400))
    assert_searches_alike(*both, CASE.queries().to(device))


def test_a_kernel_that_does_not_run_leaves_the_index_as_it_was(device, monkeypatch):
    both = pair(device)
    tokens = tokens_of(CASE, 600, device)
    append(both, *part(tokens, 0, 100))
    run = launch.LOADERS[device]

    def load(*which):
        if which[1] == "encode":
            raise RuntimeError("does not compile")
        return run(*which)

    with monkeypatch.context() as patch:
        patch.setitem(launch.LOADERS, device, load)
        with pytest.raises(RuntimeError, match="does not compile"):
            both[0].append(*part(tokens, 300, 600))
    assert_same(*both)
    append(both, *part(tokens, 100, 400))
    assert_searches_alike(*both, CASE.queries().to(device))


@mostly_slow_on_cpu("center", [256, 0], 256)
def test_a_state_goes_from_one_backend_to_the_other(center, device):
    both, others = pair(device, center=center), pair(device, center=center)
    tokens = tokens_of(CASE, 900, device)
    append(both, *part(tokens, 0, 600))
    for index, other in zip(both, reversed(others), strict=True):
        other.load_state_dict(index.state_dict())
    assert_same(*others)
    append(others, *part(tokens, 600, 900))
    assert_searches_alike(*others, CASE.queries().to(device))


def test_another_rotation_is_seen(device):
    mine, theirs = pair(device, seed=1)[0], pair(device)[1]
    tokens = tokens_of(CASE, 300, device)
    append((mine, theirs), *tokens)
    with pytest.raises(AssertionError):
        assert_same(mine, theirs)

"""`ParisKV.append` whose kernels learn and write codes, against itself in plain torch."""

import pytest
import torch

from kvindex.core.check import LARGEST
from kvindex.indexes.pariskv import ParisKV
from kvindex.ops import codes
from kvindex.ops.learn import SEEN
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.runtime import launch
from tests.cuda.devices import poisoned
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding, part, sampled

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
OPTIONS = dict(preset="fast", candidates_per="group")

FLIPPED = 1e-4
"""Share of codes that may differ: coordinates at an edge (`test_encode.py` looks at each)."""

TIPPED = 1e-2
"""Share of centers' coordinates that sums in float32 may round to the number beside the
reference's (`test_encode.py` looks at how resident they are), most of float32 keys; their segments'
keys are not compared."""


def pair(device, case=CASE, **options):
    """The index whose kernels write codes, and in plain torch."""
    options = OPTIONS | dict(device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def tokens_of(case, count, device, seed=0):
    """Keys with a common part, as a head's have, and values."""
    keys, values = case.tokens(count, seed)
    shift = 2 * case.tensor(seed + 50, 1, case.kv_heads, 1, case.head_dim)
    return (keys + shift).to(device), values.to(device)


def assert_same(mine, theirs):
    """The same tokens, learned values to the bit, and codes but for some at an edge."""
    assert mine._writer
    assert not theirs._writer
    assert len(mine) == len(theirs)
    assert mine._learned.keys() == theirs._learned.keys()
    for name, learned in theirs._learned.items():
        if name != "centers":
            assert torch.equal(mine._learned[name], learned), name
    real = torch.ones((mine._batch, len(mine)), dtype=torch.bool, device=mine.geometry.device)
    real = (real if mine.valid is None else mine.valid)[:, None].expand(
        -1, mine.geometry.kv_heads, -1
    )
    if "centers" in theirs._learned:
        real = real & ~tipped(mine._learned["centers"], theirs._learned["centers"], len(mine))
    differ = 0
    for name in ("signs", "magnitudes"):
        flips = mine._codes[name] ^ theirs._codes[name]
        differ += int(codes.unpack(flips)[real].sum())
    assert differ <= FLIPPED * int(real.sum()) * mine.geometry.head_dim + 4
    logs = [
        (index._codes["fractions"].int() | index._codes["weights"].int() << 8)[real]
        for index in (mine, theirs)
    ]
    assert int(((logs[0] - logs[1]).abs() > 1).sum()) <= differ  # a level is another
    if "centers" in theirs._learned:
        for b, held in enumerate(mine._codes._held):
            where = torch.cat([mine._codes._fields(run)["center"] for run in held])
            centers = mine._learned["centers"][b].transpose(0, 1)
            raw = centers.contiguous().view(torch.uint8).view(where[: len(centers)].shape)
            assert torch.equal(where[: len(centers)], raw)


def tipped(mine, theirs, tokens):
    """Tokens bool `[B, G, N]` whose segment's center is another, by no more than roundings."""
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


@pytest.mark.parametrize("pieces", [[600], [100, 300, 7, 256, 1], [1] * 9, [256, 256]], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128])
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


def test_segments_are_shared_out_where_there_are_more_than_blocks(device):
    """Twice: whatever the blocks of an append have counted is no matter of the next one."""
    case, count = Case(q_heads=8, kv_heads=8, head_dim=64, dtype=torch.bfloat16), 1300
    if device == "cuda":
        count = 40_000
    mine, theirs = pair(device, case)
    keys, values = tokens_of(case, 2 * count, device)
    for start in (0, count):
        append((mine, theirs), *part((keys, values), start, start + count))
    assert_same(mine, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_any_history_learns_and_encodes_the_same(seed, device):
    """Padded rows, segments that go on, truncated ones, other batches."""
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
    """Keys as a model's projections leave them: heads inside tokens, keys beside values."""
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


@pytest.mark.parametrize("count", [1, 256, 700])
def test_an_append_is_two_kernels(count, device, monkeypatch):
    index, names = pair(device)[0], []
    run = launch.LOADERS[device]

    def load(*which):
        names.append(which[1])
        return run(*which)

    monkeypatch.setitem(launch.LOADERS, device, load)
    for _ in range(2):
        index.append(*tokens_of(CASE, count, device))
    few = device == "cuda" and count <= BLOCK  # rows that a kernel writes there
    assert names == ["learn", "encode", *(["write_rows"] if few else [])] * 2


def test_what_was_never_written_is_never_read(device, monkeypatch):
    """Blocks hold garbage beyond what a kernel wrote: searches find the same."""
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


@pytest.mark.parametrize(
    ("place", "wrong"),
    sampled(
        [(0, 0, 0, 0), (1, 1, 255, 63), (0, 1, 299, 5), (1, 0, 643, 63)],
        [float("nan"), float("inf"), -float("inf"), 1e20, -3e38],
    ),
    ids=str,
)
def test_keys_out_of_range_change_nothing(wrong, place, device):
    """In a segment that is learned as it is coded, in one that another leans on, at the end."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_keys_have_the_centers_of_the_reference(dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, dtype=dtype)
    mine, theirs = pair(device, case, check=True)
    keys, values = tokens_of(case, 512, device)
    keys[:, :, 100:140, 3] = LARGEST
    keys[:, :, 300:, 5] = -LARGEST
    append((mine, theirs), keys, values)
    assert torch.equal(mine._learned["centers"], theirs._learned["centers"])


def test_a_reference_is_of_the_first_tokens(device):
    """Padding and zeros before them; longer keys behind them, seen or not."""
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=4)
    keys, values = tokens_of(case, SEEN + 1000, device)
    keys[1, 1, :700] = 0
    keys[3] = 0
    for place in (SEEN - 1, SEEN + 299, SEEN + 300, SEEN + 700):
        keys[0 if place < SEEN else 1, :, place] *= 2.0 ** (place % 7 + 5)
    keys[2, :, SEEN + 300 + 55] *= 2.0**20
    valid = left_padding([0, 300, 355, 0], SEEN + 1000).to(device)
    both = pair(device, case)
    append(both, keys, values, valid=valid)
    found = both[0]._learned["weight_scale"]
    assert torch.equal(found, both[1]._learned["weight_scale"])
    assert (found > 0).tolist() == [[True, True], [True, True], [True, True], [False, False]]
    append(both, *tokens_of(case, 100, device, seed=1))
    assert torch.equal(both[0]._learned["weight_scale"][:3], found[:3])
    assert torch.equal(both[0]._learned["weight_scale"], both[1]._learned["weight_scale"])


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
    """By a kernel, whichever looks at them, in a flag that keeps its place."""
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
    index.truncate(100)  # said once


@pytest.mark.parametrize("part_of", ["_codes", "_store"])
def test_no_memory_leaves_the_index_as_it_was(part_of, device, monkeypatch):
    """An append that goes on in a segment of which one row has no valid token yet."""
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


def test_centers_grow_where_they_lie(device):
    """So that an append late in a sequence copies none of the earlier ones."""
    index, places = pair(device)[0], []
    tokens = tokens_of(CASE, 256 * 12, device)
    for start in range(0, 256 * 12, 256):
        index.append(*part(tokens, start, start + 256))
        places.append(index._learned["centers"].data_ptr())
    assert len(set(places)) == 5  # capacities 1, 2, 4, 8, 16
    before = index._learned["centers"].clone()
    index.append(*part(tokens, 0, 100))
    assert torch.equal(index._learned["centers"][:, :, :12], before)


def test_another_rotation_is_seen(device):
    mine, theirs = pair(device, seed=1)[0], pair(device)[1]
    tokens = tokens_of(CASE, 300, device)
    append((mine, theirs), *tokens)
    with pytest.raises(AssertionError):
        assert_same(mine, theirs)


@pytest.mark.parametrize("count", [1, 256, 300])
def test_a_reference_is_right_wherever_it_lies(count, device, monkeypatch):
    """Of so few keys that one block looks at them nobody has set it to zero before."""
    both = pair(device)
    tokens = tokens_of(CASE, 2 * count, device)
    poisoned(monkeypatch)
    valid = left_padding([0, count], count).to(device)
    append(both, *part(tokens, 0, count), valid=valid)
    found = both[0]._learned["weight_scale"]
    assert torch.equal(found, both[1]._learned["weight_scale"])
    assert (found > 0).tolist() == [[True, True], [False, False]]
    append(both, *part(tokens, count, 2 * count))
    assert_same(*both)

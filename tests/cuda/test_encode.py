"""Append's fast path against `ParisKV`'s codes in a `Layout`: bytes differ only at an edge.

Longer than most files for what says that: the bound of a code's roundings, which all cases share.
"""

import pytest
import torch

from kvindex.core.check import LARGEST
from kvindex.ops import codes, learn, transform
from kvindex_cuda.memory.layout import BLOCK, Layout, places
from kvindex_cuda.pariskv.encode import Encoder, Fresh
from tests.cuda import emulator
from tests.cuda.devices import DEVICES, on
from tests.support.helpers import Case, far_apart, left_padding, sampled

ROUNDED = 2.0**-20
"""Of a coordinate of a unit vector, per (‖k‖ + ‖μ‖)/‖k − μ‖. Sums of ±x_i/√D stay below ‖x‖, so a
rounding is off by 2^-24 of it at most (2^-23 in the matrix unit, which truncates). There are some
16 here, the reference has D; they add up like their square root."""

SUMMED = 2.0**-16
"""Of a mean, per mean of |x|. A warp sums 32 keys of a coordinate in 8 products, of float32 in 3
parts each, of 4 numbers and the sum so far: 120 numbers, each cut off by 2^-23 of their sum at
most; the rest is in double."""

GARBAGE = 0xA5

WHOLE, TOLD = torch.zeros(1, 2, BLOCK, 64), torch.zeros(1, dtype=torch.int32)
SPARSE = torch.zeros(1, 2, 2, 128, dtype=torch.bfloat16)[..., ::2]


def table_of(blocks):
    """Addresses int64 `[B, S]` of blocks uint8 `[B, S, G, bytes]`."""
    sizes = blocks.shape[2] * blocks.shape[3]
    steps = torch.arange(blocks.shape[0] * blocks.shape[1], device=blocks.device) * sizes
    return (blocks.data_ptr() + steps).view(blocks.shape[:2])


def keys_of(case, count, seed=0):
    """Keys with a common part, as a head's have."""
    shift = 2 * case.tensor(seed + 50, 1, case.kv_heads, 1, case.head_dim)
    return case.tokens(count, seed)[0] + shift


def room(case, layout, tokens, device):
    """Blocks full of garbage."""
    S = -(-tokens // BLOCK)
    shape = (case.batch, S, case.kv_heads, layout.head_bytes)
    return torch.full(shape, GARBAGE, dtype=torch.uint8, device=device)


def filled(case, index, keys, *, pieces, valid=None, bits=3, device="cpu"):
    """Blocks that the kernel wrote, appended in pieces as `index` was."""
    layout = Layout(case.head_dim, bits)
    blocks = room(case, layout, keys.shape[2], device)
    encode = Encoder(layout, index._rotation, index._levels)
    learned, start = {}, 0
    for count in pieces:
        some = slice(start, start + count)
        flags = None if valid is None else valid[:, some]
        new = keys[:, :, some]
        known = new if flags is None else new.masked_fill(~flags[:, None, :, None], 0)
        norms = transform.normalize(known)[1]
        learned = learn.centers(known, flags, learned, start=start, every=BLOCK) | (
            learn.weight_scale(norms, flags, learned)
        )
        parts = new, learned["centers"], learned["weight_scale"], table_of(blocks)
        with on(device):
            encode(*parts, start=start, valid=flags)
        start += count
    return layout, blocks, learned


def compared(case, index, layout, blocks, keys, valid=None):
    """How many bytes of the fields differ from the reference's; each must lie at an edge."""
    B, G, N, _ = keys.shape
    want = layout.views(
        layout.pack({name: index._codes[name] for name in index._codes}, index._learned["centers"])
    )
    got = layout.views(blocks)
    device = keys.device

    def tokens(field):
        return field.transpose(1, 2).flatten(2, 3)[:, :, :N]

    assert torch.equal(got["center"], want["center"])
    known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
    segments = torch.arange(N, device=device) // BLOCK
    centers = index._learned["centers"][:, :, segments].double()
    whole = known.double() - centers
    norms = whole.norm(dim=-1, keepdim=True)
    directions = whole / norms.clamp_min(1e-300) @ index._rotation.double().T
    slack = ROUNDED * (known.double().norm(dim=-1) + centers.norm(dim=-1))[..., None] / norms
    levels = index._levels
    edges = ((levels[1:] + levels[:-1]) / 2).double()

    signs = codes.unpack(tokens(got["signs"]) ^ tokens(want["signs"])).flatten(-2).bool()
    assert (directions.abs() <= slack)[signs].all()
    planes = tokens(got["magnitudes"]) ^ tokens(want["magnitudes"])
    differ = codes.unpack(planes).flatten(-2).bool().any(-2)
    apart = (directions.abs()[..., None] - edges).abs().amin(-1) if len(edges) else directions
    assert (apart <= slack)[differ].all()

    logs, true = (
        tokens(part["logs"])[..., 0].int() | tokens(part["logs"])[..., 1].int() << 8
        for part in (got, want)
    )
    steps, most = (logs - true).abs(), torch.ones((), device=device)
    if len(edges):  # a flipped level changes α, about 1 and at least .8, by |u| times a gap
        jump = (edges * levels.diff().double()).max() / 0.8
        most = 1 + differ.sum(-1) * jump * 65536 / codes.OCTAVES / 0.69
    assert (steps <= most).all()
    weights = got["weights"][..., places(device), :]
    assert torch.equal(tokens(weights)[..., 0].int(), logs >> 8)
    counts = dict(signs=int(signs.sum()), planes=int(differ.sum()), logs=int((steps > 0).sum()))
    return counts, N * B * G


def checked(case, *, pieces, pads=None, bits=3, device="cpu", keys=None):
    count = sum(pieces)
    keys = (keys_of(case, count) if keys is None else keys).to(device)
    valid = None if pads is None else left_padding(pads, count).to(device)
    index = case.index("pariskv", preset="fast", magnitude_bits=bits, device=device)
    values = keys.new_zeros(*keys.shape[:3], case.value_dim)
    start = 0
    for size in pieces:
        some = slice(start, start + size)
        flags = None if valid is None else valid[:, some]
        index.append(keys[:, :, some], values[:, :, some], valid=flags)
        start += size
    layout, blocks, learned = filled(
        case, index, keys, pieces=pieces, valid=valid, bits=bits, device=device
    )
    assert torch.equal(learned["centers"], index._learned["centers"])
    counts, total = compared(case, index, layout, blocks, keys, valid)
    # of the coordinates and of the weights; few coordinates of bfloat16 are exactly 0 now and then
    assert counts["signs"] + counts["planes"] <= 1e-4 * total * case.head_dim + 4
    assert counts["logs"] <= 1e-2 * total + 2
    return layout, blocks, keys, index


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (8, 40, 72, 96, 112, 192, 248)
WIDTHS = [(dim, dtype) for dim in (64, 80, 128, 256) for dtype in DTYPES]
WIDTHS += [(dim, DTYPES[i % 3]) for i, dim in enumerate(DIMS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "dtype"), WIDTHS, ids=str)
def test_codes_are_the_references(dim, dtype, device):
    checked(Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=dtype), pieces=[300], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [0, 1, 2, 4, 5, 6, 7])
def test_any_number_of_bits(bits, device):
    case = Case(head_dim=128, dtype=torch.bfloat16)
    checked(case, pieces=[300], bits=bits, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.parametrize("pieces", [[100, 300, 7, 256, 1], [257, 255], [1] * 20, [768]], ids=str)
def test_appends_may_begin_and_end_anywhere(pieces, dim, device):
    case = Case(head_dim=dim, dtype=torch.bfloat16)
    checked(case, pieces=pieces, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pieces", [[600], [130, 200, 270]], ids=str)
def test_left_padding_counts_as_zero_keys(pieces, device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3, dtype=torch.float16)
    checked(case, pieces=pieces, pads=[0, 150, 300], device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_invalid_keys_hold_does_not_matter(device):
    case, valid = Case(head_dim=64, batch=2), left_padding([0, 150], 300).to(device)
    keys = keys_of(case, 300).to(device)
    index = case.index("pariskv", device=device)
    spoilt = keys.masked_fill(~valid[:, None, :, None], float("nan"))
    _, want, _ = filled(case, index, keys, pieces=[300], valid=valid, device=device)
    _, got, _ = filled(case, index, spoilt, pieces=[300], valid=valid, device=device)
    assert torch.equal(got, want)


def fresh_case(case, count, start, device, pads=None):
    """Keys `[B, G, N, D]` from id `start` on, flags, an `Encoder`, references."""
    keys = keys_of(case, count).to(device)
    valid = None if pads is None else left_padding(pads, count).to(device)
    index = case.index("pariskv", device=device)
    encode = Encoder(Layout(case.head_dim, 3), index._rotation, index._levels)
    references = torch.full((case.batch, case.kv_heads), 64.0, device=device)
    return keys, valid, encode, references


def made(case, encode, keys, valid, references, *, start, fresh, device, taken=None):
    """Blocks, centers, which of them are known, and whether a key is wrong."""
    S = -(-(start + keys.shape[2]) // BLOCK)
    blocks = room(case, encode.layout, S * BLOCK, device)
    shape = (case.batch, case.kv_heads, S, case.head_dim)
    centers = case.tensor(7, *shape).bfloat16().to(device)
    known = torch.zeros((case.batch, S), dtype=torch.bool, device=device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    with on(device):
        which = Fresh(*fresh, known, wrong, taken)
        where = dict(start=start, valid=valid, fresh=which)
        encode(keys, centers, references, table_of(blocks), **where)
    return blocks, centers, known, int(wrong)


def assert_means(got, keys, valid, first):
    """Each a rounding of some number no further from the mean than `SUMMED` allows."""
    count = got.shape[2]
    some = slice(first, first + count * BLOCK)
    real = torch.ones_like(keys[:, 0, :, 0]) if valid is None else valid.double()
    real = real[:, None, some, None].double().unflatten(2, (count, BLOCK))
    split = keys[:, :, some].double().unflatten(2, (count, BLOCK))
    split = torch.where(real > 0, split, 0.0)
    counts = real.sum(3).clamp_min(1)
    mean, size = split.sum(3) / counts, split.abs().sum(3) / counts
    low, high = ((mean + side * SUMMED * size).bfloat16() for side in (-1, 1))
    assert ((low <= got) & (got <= high)).all()
    return int((got != mean.bfloat16()).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "dtype"), sampled([8, 64, 80, 96, 120, 128, 192, 256], DTYPES), ids=str
)
def test_centers_of_whole_segments_are_made_on_the_way(dim, dtype, device):
    """Codes are those of the same centers given; other segments' are as they were."""
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, batch=2, dtype=dtype)
    for pads in (None, [0, 700]):
        keys, valid, encode, references = fresh_case(case, 900, 100, device, pads)
        given = encode, keys, valid, references
        where = dict(start=100, device=device)  # segments 1 to 2 are whole, 0 and 3 are not
        blocks, centers, known, wrong = made(case, *given, fresh=(1, 2), **where)
        want, old, _, _ = made(case, *given, fresh=(0, 0), **where)
        assert wrong == 0
        assert torch.equal(centers[:, :, ::3], old[:, :, ::3])
        tips = assert_means(centers[:, :, 1:3], keys, valid, BLOCK - 100)
        assert tips <= 2 + 1e-2 * centers.numel()
        with pytest.raises(AssertionError):  # a comparison that can fail
            assert_means(centers[:, :, 1:3], keys, valid, BLOCK - 99)
        assert known.tolist() == [
            [False, True, True, False],
            [False, pads is None, pads is None, False],
        ]
        with on(device):
            encode(keys, centers, references, table_of(want), start=100, valid=valid)
        assert torch.equal(blocks, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e20, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_key_out_of_range_is_told_of(wrong, dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=80, batch=2, dtype=dtype)
    keys, valid, encode, references = fresh_case(case, 512, 0, device, [0, 40])
    where = dict(start=0, fresh=(0, 2), device=device)
    for place, told in (((1, 0, 39, 3), 0), ((1, 0, 40, 3), 1), ((0, 1, 511, 79), 1)):
        spoilt = keys.clone()
        spoilt[place] = torch.tensor(wrong).to(dtype)
        assert made(case, encode, spoilt, valid, references, **where)[3] == told


@pytest.mark.parametrize("device", DEVICES)
def test_keys_that_cancel_in_their_center_are_told_of_and_the_largest_are_not(device):
    case = Case(q_heads=2, kv_heads=2, head_dim=64, batch=2)
    keys, valid, encode, references = fresh_case(case, 512, 0, device, [0, 40])
    where = dict(start=0, fresh=(0, 2), device=device)
    for number, told in ((2 * LARGEST * 64, 1), (1e30, 1), (3e38, 1), (LARGEST, 0)):
        spoilt = keys.clone()
        spoilt[1, 0, 100] = number
        spoilt[1, 0, 101] = -number
        assert made(case, encode, spoilt, valid, references, **where)[3] == told


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_no_order_of_threads_changes_a_center(monkeypatch):
    case = Case(q_heads=2, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    keys, valid, encode, references = fresh_case(case, 1024, 0, "cpu")
    given, where = (encode, keys, valid, references), dict(start=0, fresh=(0, 4), device="cpu")
    want = made(case, *given, **where)
    for order in ("backward", "random"):
        monkeypatch.setitem(globals(), "on", lambda _, order=order: emulator.emulated(order=order))
        got = made(case, *given, **where)
        assert all(map(torch.equal, got[:3], want[:3]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "dtype", "heads", "S"),
    [(8, torch.float32, 8, 13), (128, torch.bfloat16, 2, 25), (256, torch.float16, 2, 9)],
    ids=str,
)
def test_a_block_of_threads_takes_several_segments(dim, dtype, heads, S, device):
    case = Case(q_heads=heads, kv_heads=heads, head_dim=dim, dtype=dtype)
    S = S if device == "cpu" else 1000
    keys, valid, encode, references = fresh_case(case, BLOCK, 0, device)
    one = made(case, encode, keys, valid, references, start=0, fresh=(0, 1), device=device)
    many, taken = keys.repeat(1, 1, S, 1), torch.zeros(1, dtype=torch.int32, device=device)
    where = dict(start=0, fresh=(0, S), device=device)
    for count in (None, taken, taken):  # which a call leaves as it was
        got = made(case, encode, many, valid, references, **where, taken=count)
        assert torch.equal(got[0], one[0].expand_as(got[0]))
        assert torch.equal(got[1], one[1].expand_as(got[1]))
        assert taken == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [80, 128])
def test_only_the_keys_places_and_centers_are_written(dim, device):
    case = Case(head_dim=dim)
    keys, index = keys_of(case, 400).to(device), case.index("pariskv", device=device)
    layout = Layout(dim, 3)
    blocks = room(case, layout, 1024, device)
    some = slice(270, 300)  # in the second block of four
    centers = case.tensor(7, 1, 2, 4, dim).to(device).bfloat16()
    reference = torch.full((1, 2), 64.0, device=device)
    encode = Encoder(layout, index._rotation, index._levels)
    with on(device):
        encode(keys[:, :, some], centers, reference, table_of(blocks), start=270)
    assert (blocks[:, [0, 2, 3]] == GARBAGE).all()
    fields, inside = layout.views(blocks[:, 1]), torch.zeros(BLOCK, dtype=torch.bool, device=device)
    inside[14:44] = True
    fields["weights"] = fields["weights"][:, :, places(device)]
    for name in ("signs", "weights", "logs", "magnitudes"):
        assert (fields[name][:, :, ~inside] == GARBAGE).all()
        assert (fields[name][:, :, inside] != GARBAGE).any()
    raw = centers[:, :, 1].view(torch.uint8).unflatten(-1, (dim, 2))
    assert torch.equal(fields["center"], raw)
    # what fills words of signs and planes is zero
    M, width = dim // 8, layout.stride
    words = blocks[:, 1, :, : BLOCK * width].unflatten(-1, (BLOCK, width))[:, :, inside, M:]
    sizes = blocks[:, 1, :, layout.magnitudes : layout.magnitudes + BLOCK * 3 * width]
    sizes = sizes.unflatten(-1, (BLOCK, 3, width))[:, :, inside, :, M:]
    assert not words.any()
    assert not sizes.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_matter(dtype, device):
    case = Case(head_dim=64, batch=2, dtype=dtype)
    keys, index = keys_of(case, 300).to(device), case.index("pariskv", device=device)
    _, want, _ = filled(case, index, keys, pieces=[300], device=device)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = keys.new_zeros(2, 2, 300, 99)
    wide[..., 3:67] = keys  # no key begins at a multiple of 16 bytes
    for same in (turned, wide[..., 3:67]):
        assert not same.is_contiguous()
        assert torch.equal(filled(case, index, same, pieces=[300], device=device)[1], want)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_beyond_2_to_the_31_elements_are_found(device):
    case = Case(head_dim=64, dtype=torch.bfloat16)
    keys, index = keys_of(case, 40).to(device), case.index("pariskv", device=device)
    apart = far_apart(keys)
    want = filled(case, index, keys, pieces=[40], device=device)[1]
    assert torch.equal(filled(case, index, apart, pieces=[40], device=device)[1], want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_equals_its_rows(device):
    case, one = (Case(head_dim=96, batch=batch, dtype=torch.float16) for batch in (3, 1))
    keys, index = keys_of(case, 300).to(device), case.index("pariskv", device=device)
    _, blocks, _ = filled(case, index, keys, pieces=[120, 180], device=device)
    for b in range(3):
        row = keys[b : b + 1]
        _, want, _ = filled(one, index, row, pieces=[120, 180], device=device)
        assert torch.equal(blocks[b : b + 1], want)


@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_no_order_of_threads_changes_a_byte(dim, monkeypatch):
    case = Case(head_dim=dim, dtype=torch.bfloat16)
    keys, index = keys_of(case, 300), case.index("pariskv")
    _, want, _ = filled(case, index, keys, pieces=[300])
    for order in ("backward", "random"):
        monkeypatch.setitem(globals(), "on", lambda _, order=order: emulator.emulated(order=order))
        assert torch.equal(filled(case, index, keys, pieces=[300])[1], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [-100, -60, 40])
def test_keys_far_from_one_are_coded_alike(power, device):
    case = Case(head_dim=64)
    keys, index = keys_of(case, 300).to(device), case.index("pariskv", device=device)
    layout, want, _ = filled(case, index, keys, pieces=[300], device=device)
    _, got, _ = filled(case, index, keys * 2.0**power, pieces=[300], device=device)
    want, got = layout.views(want), layout.views(got)
    for name in ("signs", "magnitudes"):
        assert torch.equal(got[name][:, 0], want[name][:, 0])
    logs = [
        (part["logs"].int() * torch.tensor([1, 256], device=device)).sum(-1) for part in (got, want)
    ]
    assert ((logs[0] - logs[1]).abs()[:, 0] <= 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 80])
def test_without_centers_zero_and_sparse_keys(dim, device):
    case = Case(head_dim=dim)
    keys = torch.zeros(1, 2, 40, dim)
    keys[:, :, torch.arange(1, 40), torch.arange(1, 40)] = torch.linspace(-3, 3, 39)
    index = case.index("pariskv", preset="fast", center=0, coarse="none", device=device)
    layout, keys = Layout(dim, 3), keys.to(device)
    blocks = room(case, layout, 40, device)
    reference = torch.full((1, 2), 64.0, device=device)
    with on(device):
        encode = Encoder(layout, index._rotation, index._levels)
        encode(keys, None, reference, table_of(blocks), start=0)
    got = {name: part[:, 0] for name, part in layout.views(blocks).items()}
    assert (got["signs"][:, :, 0] == 255).all()
    for name in ("weights", "logs", "magnitudes"):
        assert not got[name][:, :, 0].any()
    assert not got["center"].any()
    directions, norms = transform.normalize(keys)
    rotated = transform.rotate(directions, index._rotation)
    want = codes.encode(rotated, norms, index._levels, block=dim)
    assert torch.equal(got["signs"][:, :, :40], want["signs"])
    logs = codes.log_codes(want["weights"], reference[:, :, None, None], 16)[..., 0]
    mine = (got["logs"].int() * torch.tensor([1, 256], device=device)).sum(-1)
    assert ((mine[:, :, :40] - logs).abs() <= 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_warp_takes_several_blocks_of_keys(device):
    case, S = Case(q_heads=8, kv_heads=8, head_dim=8), 13 if device == "cpu" else 1000
    keys, index = keys_of(case, BLOCK).to(device), case.index("pariskv", device=device)
    encode = Encoder(Layout(8, 3), index._rotation, index._levels)
    centers, reference = keys.mean(2, keepdim=True).bfloat16(), torch.full((1, 8), 64.0).to(device)
    want, got = (room(case, encode.layout, count * BLOCK, device) for count in (1, S))
    with on(device):
        encode(keys, centers, reference, table_of(want), start=0)
        repeated = keys.repeat(1, 1, S, 1), centers.repeat(1, 1, S, 1)
        encode(*repeated, reference, table_of(got), start=0)
    assert torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize("device", DEVICES)
def test_another_rotation_is_seen(device):
    case = Case(head_dim=64, dtype=torch.bfloat16)
    layout, _, keys, index = checked(case, pieces=[300], device=device)
    before, index._rotation = index._rotation, transform.rotation(64, 1, device)
    _, blocks, _ = filled(case, index, keys, pieces=[300], device=device)
    index._rotation = before
    with pytest.raises(AssertionError):
        compared(case, index, layout, blocks, keys)


def test_a_matrix_that_is_no_rotation_is_refused():
    rotation, levels = transform.rotation(96, 0), codes.levels(96, 3)
    for wrong in (rotation.T.contiguous(), torch.eye(96)):
        with pytest.raises(ValueError, match="rotation: got another matrix"):
            Encoder(Layout(96, 3), wrong, levels)
    for wrong in (torch.linspace(0, 1e-3, 8).cumsum(0) ** 4, levels * 1.001):  # no float16
        with pytest.raises(
            ValueError, match=r"levels: got \[.*, allowed are those of ops.codes.levels"
        ):
            Encoder(Layout(96, 3), rotation, wrong)

    with pytest.raises(ValueError, match="layout: got D = 264 and 3 bits"):
        Encoder(Layout(264, 3), rotation, levels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(start=480), "start: got 480 for 40 keys, allowed are ids from 0 to 511"),
        (dict(start=-1), "start: got -1"),
        (dict(keys=torch.zeros(1, 2, 40, 64).double()), "keys: got torch.float64"),
        (dict(keys=torch.zeros(1, 2, 40, 32)), "keys: got shape"),
        (dict(centers=torch.zeros(1, 2, 2, 64)), "centers: got torch.float32"),
        (dict(weight_scale=torch.zeros(1, 3)), "weight_scale: got shape"),
        (dict(table=torch.zeros(1, 2)), "table: got torch.float32"),
        (dict(valid=torch.ones(1, 39, dtype=torch.bool)), "valid: got shape"),
        (dict(fresh=Fresh(0, 1, None, torch.zeros(1))), r"fresh: got 0 to 1, allowed is in \(0, 0"),
        (
            dict(fresh=Fresh(0, 0, None, torch.zeros(1)), centers=SPARSE),
            r"centers: got strides .*, allowed are dense rows",
        ),
        (dict(start=0, keys=WHOLE, fresh=Fresh(0, 1, None, torch.zeros(1))), "wrong: got torch.fl"),
        (dict(keys=WHOLE, fresh=Fresh(0, 1, None, TOLD, TOLD.repeat(2))), "taken: got 2 elements"),
        (
            dict(keys=WHOLE, fresh=Fresh(0, 1, torch.ones(1, 0, dtype=torch.bool), TOLD)),
            r"known: got shape \(1, 0\), allowed is \(1, 1\)",
        ),
        ({}, "encode: got tensors on cpu, allowed is a CUDA device"),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_wrong_tensors_are_refused(change, message):
    encode = Encoder(Layout(64, 3), transform.rotation(64, 0), codes.levels(64, 3))
    given = dict(
        keys=torch.zeros(1, 2, 40, 64),
        centers=torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16),
        weight_scale=torch.zeros(1, 2),
        table=torch.zeros(1, 2, dtype=torch.int64),
        start=0,
    )
    with pytest.raises(ValueError, match=message):
        encode(**(given | change))

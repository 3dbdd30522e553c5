"""The kernel that encodes appended tokens, compared with the reference ops:

bytes differ only at an edge.

This file is longer than most because all cases share the bound of a code's rounding errors.
"""

import pytest
import torch

import kvindex
from kvindex.core.check import LARGEST
from kvindex.ops import codes, transform
from kvindex_cuda.memory.layout import BLOCK, Layout, places
from kvindex_cuda.pariskv.append.encode import Encoder
from tests.cuda import emulator
from tests.cuda.devices import DEVICES, mostly_slow_on_cpu, on
from tests.support.helpers import (
    Case,
    far_apart,
    left_padding,
    mostly_slow,
    sampled,
    slow,
    slow_as,
)

ROUNDED = 2.0**-20
"""Largest error of a coordinate of a unit vector, per (‖k‖ + ‖μ‖)/‖k − μ‖.

Sums of ±x_i/√D stay below ‖x‖, so a rounding is off by at most 2^-24 of it (2^-23 in the matrix
unit, which truncates). The kernel has about 16 roundings, the reference has D; their errors add up
like the square root of their number.
"""

SUMMED = 2.0**-16
"""Largest error of a mean, per mean of |x|.

A warp adds up 32 keys of a coordinate in 8 products, each with 3 parts for float32, of 4 numbers
and the sum so far: 120 numbers, each truncated by at most 2^-23 of their sum. The rest is in
double.
"""

GARBAGE = 0xA5

OCTAVE = 2**16 // codes.OCTAVES
"""Steps of a log weight's code per factor of 2."""


def keys_of(case, count, seed=0):
    """Keys that share a component, as those of a head do."""
    shift = 2 * case.tensor(seed + 50, 1, case.kv_heads, 1, case.head_dim)
    return case.tokens(count, seed)[0] + shift


def room(layout, batch, heads, tokens, device):
    """Blocks filled with garbage, uint8 `[B, S, G, head_bytes]`."""
    shape = (batch, -(-tokens // BLOCK), heads, layout.head_bytes)
    return torch.full(shape, GARBAGE, dtype=torch.uint8, device=device)


def table_of(blocks):
    """Addresses, int64 `[B, S]`, of blocks uint8 `[B, S, G, bytes]`."""
    sizes = blocks.shape[2] * blocks.shape[3]
    steps = torch.arange(blocks.shape[0] * blocks.shape[1], device=blocks.device) * sizes
    return (blocks.data_ptr() + steps).view(blocks.shape[:2])


def encoder(dim, bits=3, *, device="cpu", centered=True, seed=0):
    rotation, levels = transform.rotation(dim, seed, device), codes.levels(dim, bits, device)
    return Encoder(Layout(dim, bits), rotation, levels, centered=centered)


def written(encode, keys, valid=None, *, pieces=None, wrong=None):
    """Return blocks that the kernel wrote when keys up to each length in `pieces` were appended in
    turn.
    """
    B, G, N, _ = keys.shape
    blocks, first, device = room(encode.layout, B, G, N, keys.device), 0, keys.device.type
    for stop in pieces or [N]:
        some = slice(first * BLOCK, stop)
        flags = None if valid is None else valid[:, some]
        with on(device):
            encode(keys[:, :, some], table_of(blocks), first=first, valid=flags, wrong=wrong)
        first = stop // BLOCK  # full blocks do not change
    return blocks


def told(encode, keys, valid=None):
    """Return True if the kernel reports a wrong key."""
    wrong = torch.zeros(1, dtype=torch.int32, device=keys.device)
    written(encode, keys, valid, wrong=wrong)
    return bool(wrong)


def logs_of(fields):
    """Log weights int32 `[B, G, N]` from bytes `[B, G, N, 2]`."""
    return fields["logs"][..., 0].int() | fields["logs"][..., 1].int() << 8


def known_keys(keys, valid):
    return keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)


def assert_means(got, keys, valid=None):
    """Each center is a rounding of a number no further from the mean than `SUMMED` allows.

    Return how many differ from the rounded mean.
    """
    known, pad = known_keys(keys, valid).double(), torch.nn.functional.pad
    real = torch.ones_like(known[:, :1, :, :1]) if valid is None else valid[:, None, :, None]
    after = (0, 0, 0, -keys.shape[2] % BLOCK)
    counts = pad(real.double(), after).unflatten(2, (-1, BLOCK)).sum(3).clamp_min(1)
    parts = pad(known, after).unflatten(2, (-1, BLOCK))
    mean, size = parts.sum(3) / counts, parts.abs().sum(3) / counts
    low, high = ((mean + side * SUMMED * size).bfloat16() for side in (-1, 1))
    assert ((low <= got) & (got <= high)).all()
    return int((got != codes.centers(known, valid, BLOCK)).sum())


def compared(encode, blocks, keys, valid=None, *, seed=0):
    """Return the number of codes that differ from the reference's, each of which must be at an
    edge. Keys that nearly equal their center are excluded, because what is left of them is rounding
    error.
    """
    layout, (_, _, N, D) = encode.layout, keys.shape
    device, known = keys.device, known_keys(keys, valid)
    rotation, levels = (
        transform.rotation(D, seed, device),
        codes.levels(D, layout.magnitude_bits, device),
    )
    centers = layout.centers(blocks) if encode.centered else None
    spread = torch.zeros_like(known, dtype=torch.float64)
    if centers is not None:
        spread = centers.double().repeat_interleave(BLOCK, 2)[:, :, :N]
    directions, norms = transform.normalize(known.float() - spread.float())
    want = codes.encode(transform.rotate(directions, rotation), norms, levels, block=D)
    true = codes.log_codes(want["weights"], 16)[..., 0]
    if valid is not None:
        true = true.masked_fill(~valid[:, None], 0)
    got = layout.fields(blocks, N)

    whole = known.double() - spread
    sizes = whole.norm(dim=-1, keepdim=True)
    exact = whole / sizes.clamp_min(1e-300) @ rotation.double().T
    slack = ROUNDED * (known.double().norm(dim=-1) + spread.norm(dim=-1))[..., None] / sizes
    slack = slack.nan_to_num(0.0, posinf=torch.inf)  # a zero key without a center
    far = slack[..., 0] < 2**-12
    edges = ((levels[1:] + levels[:-1]) / 2).double()
    signs = codes.unpack(got["signs"] ^ want["signs"]).flatten(-2).bool()
    assert (exact.abs() <= slack)[signs].all()
    differ = codes.unpack(got["magnitudes"] ^ want["magnitudes"]).flatten(-2).bool().any(-2)
    apart = (exact.abs()[..., None] - edges).abs().amin(-1) if len(edges) else exact
    assert (apart <= slack)[differ].all()

    logs = logs_of(got)
    steps, flipped = (logs - true).abs(), torch.zeros((), device=device)
    if len(edges):  # a flipped level changes α, about 1 and at least 0.8, by |u| times a gap
        flipped = differ.sum(-1) * (edges * levels.diff().double()).max() / 0.8
    # ‖y‖ and α have D coordinates, each off by `slack`
    assert (steps <= 1 + (flipped + 2 * D**0.5 * slack[..., 0]) * OCTAVE / 0.69).all()
    assert torch.equal((logs == 0)[far], (true == 0)[far])
    assert valid is None or not logs.masked_fill(valid[:, None], 0).any()
    assert torch.equal(got["weights"][..., 0].int(), logs >> 8)
    return tuple(int(part[far].sum()) for part in (signs | differ, steps > 0))


def checked(case, count, valid=None, *, bits=3, device="cpu"):
    """Compare centers with the reference, and codes with those that the reference computes from the
    kernel's centers.
    """
    keys = keys_of(case, count).to(device)
    valid = None if valid is None else valid.to(device)
    encode = encoder(case.head_dim, bits, device=device)
    blocks = written(encode, keys, valid)
    centers = encode.layout.centers(blocks)
    assert assert_means(centers, keys, valid) <= 2 + 1e-2 * centers.numel()
    (flips, logs), total = compared(encode, blocks, keys, valid), keys[..., 0].numel()
    # limits for coordinates and for weights; a few bfloat16 coordinates can be exactly 0
    assert flips <= 1e-4 * total * case.head_dim + 4
    assert logs <= 1e-2 * total + 2
    return encode, keys, blocks


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (8, 40, 72, 96, 112, 192, 248)
WIDTHS = [
    pytest.param(dim, dtype, marks=() if i % 3 == j else slow_as(True))
    for i, dim in enumerate((64, 80, 128, 256))
    for j, dtype in enumerate(DTYPES)
]
OTHERS = [*((dim, DTYPES[i % 3]) for i, dim in enumerate(DIMS)), (576, torch.bfloat16)]
WIDTHS += mostly_slow(OTHERS, *OTHERS[:2])


@mostly_slow_on_cpu(
    "dim, dtype",
    WIDTHS,
    *((64, DTYPES[0]), (80, DTYPES[1]), (128, DTYPES[2]), OTHERS[0]),
    indirect=False,
    ids=str,
)
def test_centers_and_codes_are_the_references(dim, dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=dtype)
    encode, keys, blocks = checked(case, 300, device=device)
    with pytest.raises(AssertionError):  # these comparisons could fail
        assert_means(encode.layout.centers(blocks), keys[:, :, :299])
    with pytest.raises(AssertionError):
        compared(encode, blocks, keys, seed=1)


@mostly_slow_on_cpu("bits", mostly_slow([0, 1, 2, 4, 5, 6, 7], 0, 7), 0, indirect=False)
def test_any_number_of_bits(bits, device):
    checked(Case(head_dim=128, dtype=torch.bfloat16), 300, bits=bits, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "dim", "dtype"),
    sampled([1, 33, 256, 257, 511], [128, 80], (torch.bfloat16, torch.float32)),
    ids=str,
)
def test_a_block_may_lack_keys(count, dim, dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=dtype)
    checked(case, count, device=device)


@mostly_slow_on_cpu(
    "dim, dtype",
    [(64, DTYPES[1]), (96, DTYPES[0])],
    (96, DTYPES[0]),
    indirect=False,
    ids=str,
)
def test_padding_has_no_share_in_centers_and_no_weight(dim, dtype, device):
    """Padding before the tokens, a block of nothing but padding, and padding among the tokens."""
    case = Case(q_heads=4, kv_heads=2, head_dim=dim, batch=3, dtype=dtype)
    valid = left_padding([0, 150, 300], 400)
    valid[0, torch.arange(3, 400, 7)] = False
    encode, keys, blocks = checked(case, 400, valid, device=device)
    assert not encode.layout.centers(blocks)[2, :, 0].any()
    assert not logs_of(encode.layout.fields(blocks, 400))[2, :, :300].any()
    with pytest.raises(AssertionError):
        compared(encode, blocks, keys)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", mostly_slow([64, 192], 64))
def test_what_invalid_keys_hold_does_not_matter(dim, device):
    valid, encode = left_padding([0, 150], 300).to(device), encoder(dim, device=device)
    keys = keys_of(Case(q_heads=2, kv_heads=2, head_dim=dim, batch=2), 300).to(device)
    spoilt = keys.masked_fill(~valid[:, None, :, None], float("nan"))
    assert torch.equal(written(encode, spoilt, valid), written(encode, keys, valid))
    assert not told(encode, spoilt, valid)
    assert told(encode, spoilt)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "dtype"), [(128, DTYPES[2]), slow(40, DTYPES[0])], ids=str)
def test_codes_are_a_function_of_their_block(dim, dtype, device):
    """Codes do not depend on how keys are appended: all together, one by one, in blocks, or after
    other blocks.
    """
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, batch=2, dtype=dtype)
    keys, valid = keys_of(case, 523).to(device), left_padding([0, 270], 523).to(device)
    encode = encoder(dim, device=device)
    want = written(encode, keys, valid)
    for pieces in ([1, 255, 256, 257, 512, 513, 523], [300, 523], [512, 523]):
        assert torch.equal(written(encode, keys, valid, pieces=pieces), want)
    short = written(encode, keys, valid, pieces=[522])  # this comparison could fail
    assert torch.equal(short[:, :2], want[:, :2])
    assert not torch.equal(short, want)
    with on(device):
        shifted = want.clone().fill_(GARBAGE)
        encode(keys[:, :, 256:], table_of(shifted), first=0, valid=valid[:, 256:])
    assert torch.equal(shifted[:, :2], want[:, 1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e20, -3e38])
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.float16], torch.float32), ids=str
)
def test_a_key_out_of_range_is_told_of(wrong, dtype, device):
    """Wrong keys in a full block and in an incomplete one are reported, wrong padding is not."""
    case = Case(q_heads=2, kv_heads=2, head_dim=80, batch=2, dtype=dtype)
    keys, valid = keys_of(case, 300).to(device), left_padding([0, 40], 300).to(device)
    encode = encoder(80, device=device)
    for place, found in (((1, 0, 39, 3), 0), ((1, 0, 40, 3), 1), ((0, 1, 299, 79), 1)):
        spoilt = keys.clone()
        spoilt[place] = torch.tensor(wrong).to(dtype)
        assert told(encode, spoilt, valid) == found
    alone = spoilt[:, :, 299:]
    for centered in (True, False):
        assert told(encoder(80, device=device, centered=centered), alone)
        assert not told(encoder(80, device=device, centered=centered), keys[:, :, :1])


@pytest.mark.parametrize("device", DEVICES)
def test_keys_that_cancel_in_their_center_are_told_of_and_the_largest_are_not(device):
    case = Case(q_heads=2, kv_heads=2, head_dim=64, batch=2)
    keys, encode = keys_of(case, 300).to(device), encoder(64, device=device)
    for number, found in ((2 * LARGEST * 64, 1), (1e30, 1), (3e38, 1), (LARGEST, 0)):
        spoilt = keys.clone()
        spoilt[1, 0, 100] = number
        spoilt[1, 0, 101] = -number
        assert told(encode, spoilt) == found
    # blocks that have nothing but the wrong key
    for number, found in ((2 * LARGEST, 1), (LARGEST, 0)):
        assert told(encode, torch.full_like(keys, number)) == found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "dtype", "heads", "S"),
    [(8, torch.float32, 8, 13), slow(128, torch.bfloat16, 2, 25), slow(256, torch.float16, 2, 9)],
    ids=str,
)
def test_a_block_of_threads_takes_several_segments(dim, dtype, heads, S, device):
    keys = keys_of(Case(q_heads=heads, kv_heads=heads, head_dim=dim, dtype=dtype), BLOCK)
    keys, encode, S = keys.to(device), encoder(dim, device=device), S if device == "cpu" else 1000
    want, got = written(encode, keys), written(encode, keys.repeat(1, 1, S, 1))
    assert torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("centered", [True, False])
def test_only_the_keys_places_and_centers_are_written(dim, centered, device):
    keys, encode = keys_of(Case(head_dim=dim), 30), encoder(dim, device=device, centered=centered)
    layout = encode.layout
    blocks = room(layout, 1, keys.shape[1], 4 * BLOCK, device)
    with on(device):
        encode(keys.to(device), table_of(blocks), first=1)
    assert (blocks[:, [0, 2, 3]] == GARBAGE).all()
    fields = layout.views(blocks[:, 1])
    fields["weights"] = fields["weights"][:, :, places(device)]
    for name in ("signs", "weights", "logs", "magnitudes"):
        assert (fields[name][:, :, 30:] == GARBAGE).all()
        assert (fields[name][:, :, :30] != GARBAGE).any()
    assert (fields["center"] == GARBAGE).all() == (not centered)
    # bits that fill the words of signs and planes are zero
    M, width = dim // 8, layout.stride
    words = blocks[:, 1, :, : BLOCK * width].unflatten(-1, (BLOCK, width))[:, :, :30, M:]
    sizes = blocks[:, 1, :, layout.magnitudes : layout.magnitudes + BLOCK * 3 * width]
    sizes = sizes.unflatten(-1, (BLOCK, 3, width))[:, :, :30, :, M:]
    assert not words.any()
    assert not sizes.any()


@mostly_slow_on_cpu(
    "dtype", [torch.float32, torch.bfloat16], torch.float32, indirect=False, ids=str
)
def test_strides_do_not_matter(dtype, device):
    keys, encode = keys_of(Case(head_dim=64, batch=2, dtype=dtype), 300), encoder(64, device=device)
    keys, valid = keys.to(device), torch.rand(300, 2).gt(0.3).T.to(device)
    want = written(encode, keys, valid.contiguous())
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = keys.new_zeros(2, 2, 300, 99)
    wide[..., 3:67] = keys  # no key begins at a multiple of 16 bytes
    for same in (turned, wide[..., 3:67]):
        assert not same.is_contiguous()
        assert torch.equal(written(encode, same, valid), want)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_beyond_2_to_the_31_elements_are_found(device):
    keys = keys_of(Case(head_dim=64, dtype=torch.bfloat16), 40).to(device)
    encode = encoder(64, device=device)
    assert torch.equal(written(encode, far_apart(keys)), written(encode, keys))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_equals_its_rows(device):
    keys = keys_of(Case(head_dim=96, batch=3, dtype=torch.float16), 300).to(device)
    encode = encoder(96, device=device)
    blocks = written(encode, keys)
    for b in range(3):
        assert torch.equal(blocks[b : b + 1], written(encode, keys[b : b + 1]))


@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_no_order_of_threads_changes_a_byte(dim, monkeypatch):
    keys = keys_of(Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=torch.bfloat16), 600)
    encode = encoder(dim)
    want = written(encode, keys)
    for order in ("backward", "random"):
        monkeypatch.setitem(globals(), "on", lambda _, order=order: emulator.emulated(order=order))
        assert torch.equal(written(encode, keys), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [-100, -40, 10, 40])
def test_weights_are_on_an_absolute_scale(power, device):
    """Scaling keys by a power of two shifts log weights by whole octaves, up to the ends of their
    range, and changes no other bit.
    """
    keys, encode = keys_of(Case(head_dim=64), 300).to(device), encoder(64, device=device)
    want, got = (
        encode.layout.fields(written(encode, keys * scale), 300) for scale in (1, 2.0**power)
    )
    for name in ("signs", "magnitudes"):
        assert torch.equal(got[name], want[name])
    moved = (logs_of(want) + power * OCTAVE).clamp(1, 2**16 - 1)
    assert torch.equal(logs_of(got), moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 80])
def test_without_centers_zero_and_sparse_keys(dim, device):
    keys = torch.zeros(1, 2, 40, dim)
    keys[:, :, torch.arange(1, 40), torch.arange(1, 40)] = torch.linspace(-3, 3, 39)
    keys, encode = keys.to(device), encoder(dim, device=device, centered=False)
    got = encode.layout.fields(written(encode, keys), 40)
    assert (got["signs"][:, :, 0] == 255).all()
    for name in ("weights", "logs", "magnitudes"):
        assert not got[name][:, :, 0].any()
    directions, norms = transform.normalize(keys)
    rotated = transform.rotate(directions, transform.rotation(dim, 0, device))
    want = codes.encode(rotated, norms, codes.levels(dim, 3, device), block=dim)
    assert torch.equal(got["signs"], want["signs"])
    true = codes.log_codes(want["weights"], 16)[..., 0]
    assert ((logs_of(got) - true).abs() <= 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "dtype"), [(128, DTYPES[2]), slow(192, DTYPES[0])], ids=str)
def test_without_centers_codes_are_the_references(dim, dtype, device):
    case = Case(q_heads=2, kv_heads=2, head_dim=dim, batch=2, dtype=dtype)
    keys, valid = keys_of(case, 600).to(device), left_padding([0, 90], 600).to(device)
    encode = encoder(dim, device=device, centered=False)
    compared(encode, written(encode, keys, valid), keys, valid)
    with pytest.raises(AssertionError):
        compared(encoder(dim, device=device), written(encode, keys, valid), keys, valid)


def test_a_matrix_that_is_no_rotation_is_refused():
    rotation, levels = transform.rotation(96, 0), codes.levels(96, 3)
    for wrong in (rotation.T.contiguous(), torch.eye(96)):
        with pytest.raises(ValueError, match="rotation: got a matrix that"):
            Encoder(Layout(96, 3), wrong, levels)
    # out of float16's range
    for wrong in (torch.linspace(0, 1e-3, 8).cumsum(0) ** 4, levels * 1.001):
        with pytest.raises(
            ValueError, match=r"levels: got \[.*, allowed is a result of ops.codes.levels"
        ):
            Encoder(Layout(96, 3), rotation, wrong)

    with pytest.raises(ValueError, match="layout: got D = 264 and 3 bits"):
        Encoder(Layout(264, 3), rotation, levels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(first=2), "first: got 2 for 1 blocks of keys, allowed is 0 to 1"),
        (dict(first=-1), "first: got -1"),
        (dict(keys=torch.zeros(1, 2, 513, 64)), "first: got 0 for 3 blocks"),
        (dict(keys=torch.zeros(1, 2, 40, 64).double()), "keys: got torch.float64"),
        (dict(keys=torch.zeros(1, 2, 40, 32)), "keys: got shape"),
        (dict(table=torch.zeros(1, 2)), "table: got torch.float32"),
        (dict(table=torch.zeros(2, 2, dtype=torch.int64)), "table: got shape"),
        (dict(valid=torch.ones(1, 39, dtype=torch.bool)), "valid: got shape"),
        (dict(valid=torch.ones(1, 40)), "valid: got torch.float32"),
        (dict(wrong=torch.zeros(1)), "wrong: got torch.float32"),
        (dict(wrong=torch.zeros(2, dtype=torch.int32)), "wrong: got 2 elements"),
        ({}, "encode: got tensors on cpu, allowed is a CUDA device"),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_wrong_tensors_are_refused(change, message):
    given = dict(
        keys=torch.zeros(1, 2, 40, 64), table=torch.zeros(1, 2, dtype=torch.int64), first=0
    )
    with pytest.raises(ValueError, match=message):
        encoder(64)(**(given | change))


def test_layers_share_their_constants(device):
    """Otherwise the host would wait for the device when each layer makes its index."""
    made = [case_index(device) for _ in range(2)]
    encoders = [index._executor._encode for index in made]
    assert made[0].encoding.rotation is made[1].encoding.rotation
    assert encoders[0]._tables is encoders[1]._tables
    assert encoders[0]._flips is encoders[1]._flips
    other = case_index(device, seed=1)
    assert other.encoding.rotation is not made[0].encoding.rotation
    assert not torch.equal(other._executor._encode._flips, encoders[0]._flips)


def case_index(device, **options):
    return kvindex.create(
        "pariskv", q_heads=2, kv_heads=1, head_dim=64, backend="cuda", device=device, **options
    )

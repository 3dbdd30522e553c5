"""Compare compiled encoding with the reference operations: codes of whole blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from kvindex.cpu.kernels import encode, tile
from kvindex.cpu.pariskv.encoding import AT_ONCE, Encoder, factors
from kvindex.ops import codes, transform
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=6, kv_heads=3, head_dim=64, batch=2)

U = 2.0**-24
"""Largest relative error of rounding to float32."""


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stages(D):
    """Return `a` and the odd `p` with `D = p · 2^a`."""
    return (D & -D).bit_length() - 1, D // (D & -D)


def tables_of(levels):
    """Return the boundaries between levels, and the levels, in the form that the kernel takes."""
    edges = (levels[1:] + levels[:-1]) / 2
    none = -len(edges) % AT_ONCE
    return pad(edges, (0, none), value=torch.inf).numpy(), pad(levels, (0, none)).numpy()


def columns(index):
    """Return the codes of an index's full blocks, and of its open block."""
    return [dict(part.items()) for part in index._parts()]


def assert_same_bytes(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("D", [8, 24, 56, 64, 80, 128, 256, 1000])
def test_a_rotation_is_within_what_rounding_allows(D):
    """The kernel rounds `a` sums of two numbers, a product with a rounded number, and `p - 1` sums.

    The reference also rounds.
    """
    rotation, lanes = transform.rotation(D, 3), tile.TILE
    directions = transform.normalize(drawn(lanes, D))[0]
    flips, hartley = factors(rotation)
    held, out = directions.T.contiguous().numpy(), np.empty((D, lanes), np.float32)
    tile.rotate(held, flips.numpy(), hartley.numpy(), out)
    a, p = stages(D)
    wrong = torch.from_numpy(out).T.double() - directions.double() @ rotation.double().T
    assert wrong.abs().max() <= math.sqrt(2) * (a + p + 3) * U


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("D", [8, 24, 64, 80])
def test_codes_are_the_reference_ones_given_the_rotated_directions(D, bits):
    lanes, levels = tile.TILE, codes.levels(D, bits)
    rotated = transform.normalize(drawn(lanes, D))[0]
    edges = (levels[1:] + levels[:-1]) / 2
    rotated[0] = 0
    rotated[1, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    if bits:  # a coordinate equal to a boundary, in a vector of norm 1
        edge = edges[len(edges) // 2]
        rotated[2] = 0
        rotated[2, :2] = torch.tensor([float(edge), -float((1 - edge.double() ** 2).sqrt())])
    norms = drawn(lanes, seed=1).abs() * 2 ** torch.linspace(-40, 40, lanes)
    words, logs = coded(rotated, norms, levels)
    want = codes.encode(rotated, norms, levels, block=D)
    assert logs == codes.log_codes(want["weights"], 16).flatten().tolist()
    packed = np.empty(lanes // 8, np.uint64)
    for plane, bytes_of in [(7, want["signs"]), *enumerate(want["magnitudes"].unbind(1))]:
        out = np.empty((lanes, 3, D // 8), np.uint8)[:, 1]
        encode.put_plane(words, np.uint64(plane), lanes, packed, out)
        assert (out == bytes_of.numpy()).all()


def coded(rotated, norms, levels):
    """Encode a tile with the kernel: codes uint64 `[D, L / 8]`, and log weights."""
    lanes, D = rotated.shape
    words, logs = np.empty((D, lanes // 8), np.uint64), np.empty(lanes, np.int32)
    sums = np.empty(lanes)
    held = rotated.T.contiguous().numpy()
    encode.code(held, norms.numpy(), *tables_of(levels), sums, words.view(np.uint8), logs)
    return words, logs.tolist()


def test_no_sum_depends_on_its_order():
    """If products were rounded to float32, one in 10,000 of these log weights would change."""
    lanes, levels = tile.TILE, codes.levels(64, 3)
    rotated, norms = transform.normalize(drawn(1000 * lanes, 64))
    want = codes.log_codes(codes.encode(rotated, norms, levels, block=64)["weights"], 16)
    tiles = zip(rotated.split(lanes), norms.split(lanes), strict=True)
    logs = [log for one in tiles for log in coded(*one, levels)[1]]
    assert logs == want.flatten().tolist()


SIZES = [
    (dict(head_dim=64), {}),
    (dict(head_dim=64, dtype=torch.bfloat16), dict(preset="precise")),
    (dict(head_dim=80, dtype=torch.float16), dict(magnitude_bits=7)),
    (dict(head_dim=8, kv_heads=2), dict(magnitude_bits=0, center=100)),
    (dict(head_dim=24), dict(magnitude_bits=1, center=1)),
    (dict(head_dim=128), dict(center=0)),
]


@pytest.mark.parametrize(("sizes", "options"), SIZES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_codes_differ_from_the_ops_where_rounding_lets_them(sizes, options, padded):
    """Centers are equal. A bit may differ next to a boundary, and a weight of equal bits by 1."""
    case, D = replace(CASE, **sizes), sizes["head_dim"]
    mine, theirs = (case.index("pariskv", backend=name, **options) for name in ("cpu", "torch"))
    keys = case.tokens(300)[0] + 3  # around a center
    valid = left_padding([70, 300], 300) if padded else None
    if padded:
        keys = keys.masked_fill(~valid[:, None, :, None], 0)
    encoder = Encoder.of(mine.config, mine.encoding.rotation, mine.encoding.levels)
    found, want = encoder(keys, valid), theirs.encoding.encode(keys, valid)
    rotated, near = reference(theirs, keys, want), math.sqrt(2) * (D + sum(stages(D)) + 8) * U
    wrong = (codes.unpack(found["signs"]) != codes.unpack(want["signs"])).flatten(-2)
    assert (rotated.abs()[wrong] <= near).all()
    for p in range(found["magnitudes"].shape[-2]):
        one, other = (codes.unpack(made["magnitudes"][..., p, :]) for made in (found, want))
        differs = (one != other).flatten(-2)
        edges = (theirs.encoding.levels[1:] + theirs.encoding.levels[:-1]) / 2
        away = (rotated.abs()[differs][:, None] - edges).abs()
        assert (away.amin(-1) <= near).all()
        wrong = wrong | differs
    logs = [made["weights"].int() << 8 | made["fractions"].int() for made in (found, want)]
    assert ((logs[0] - logs[1]).abs()[~wrong.any(-1)] <= 1).all()
    assert wrong.float().mean() < 1e-3
    assert found.keys() == want.keys()
    assert all(found[name].shape == want[name].shape for name in want)
    assert "centers" not in want or torch.equal(found["centers"], want["centers"])
    assert valid is None or not logs[0][~valid[:, None].expand(-1, case.kv_heads, -1)].any()


def reference(index, keys, made):
    """Return the rotated directions of keys minus their centers, float32 `[B, G, N, D]`."""
    floats = keys.float()
    if "centers" in made:
        spread = made["centers"].repeat_interleave(index.config.center, dim=2)
        floats = floats - spread[:, :, : keys.shape[2]].float()
    return transform.rotate(transform.normalize(floats)[0], index.encoding.rotation)


@pytest.mark.parametrize(("sizes", "options"), SIZES, ids=str)
@pytest.mark.parametrize("cuts", [[1, 255, 256, 88], [300, 300], [599, 1], [100] * 6], ids=str)
def test_any_chunks_give_the_same_bytes(sizes, options, cuts):
    case = replace(CASE, **sizes)
    tokens, valid = case.tokens(600), left_padding([0, 130], 600)
    valid[0, 290:340] = valid[1, 599] = False
    whole, chunks = (case.index("pariskv", backend="cpu", **options) for _ in range(2))
    whole.append(*tokens, valid=valid)
    start = 0
    for count in cuts:
        some = start, start + count
        chunks.append(*part(tokens, *some), valid=valid[:, slice(*some)])
        start += count
    assert_same_bytes(columns(chunks), columns(whole))


def test_keys_that_do_not_lie_one_after_the_other_are_encoded_as_those_that_do():
    tokens = CASE.tokens(300)
    index = CASE.index("pariskv", backend="cpu")
    want = index.encode(tokens[0])
    views = [
        tokens[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([tokens[0]] * 2, dim=3)[..., :64],
        tokens[0].transpose(2, 3).contiguous().transpose(2, 3),
    ]
    for keys in views:
        assert_same_bytes([index.encode(keys)], [want])
    index.append(*tokens)
    assert torch.equal(columns(index)[0]["signs"], want["signs"][:, :, :256])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2.0**49])
@pytest.mark.parametrize("token", [0, 511, 520])
def test_a_key_that_is_not_finite_changes_nothing(token, number, dtype):
    case = replace(CASE, dtype=dtype)
    index, tokens = case.index("pariskv", backend="cpu"), case.tokens(600, seed=1)
    index.append(*case.tokens(256))
    before = columns(index)
    keys = tokens[0].clone()
    keys[1, 2, token, 63] = number
    with pytest.raises(ValueError, match="keys: got"):
        index.append(keys, tokens[1])
    assert len(index) == 256
    assert_same_bytes(columns(index), before)
    valid = torch.ones(2, 600, dtype=torch.bool)
    valid[1, token] = False
    index.append(keys, tokens[1], valid=valid)  # no search reads the index
    assert len(index) == 856


def test_the_largest_allowed_numbers_are_taken():
    index, tokens = CASE.index("pariskv", backend="cpu"), CASE.tokens(512)
    tokens[0][0, 0, 3] = 2.0**48
    tokens[0][0, 1, 300] = 1e-44
    index.append(*tokens)
    assert len(index) == 512


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same_bytes(threads):
    tokens, made = CASE.tokens(900), []
    for count in (1, 2, 5):
        threads(count)
        index = CASE.index("pariskv", backend="cpu")
        index.append(*tokens)
        made.append(columns(index))
    assert_same_bytes(made[1], made[0])
    assert_same_bytes(made[2], made[0])


def test_an_append_waits_for_its_codes():
    index = CASE.index("pariskv", backend="cpu")
    assert not index.supports_async_append
    assert "append: codes are made by one kernel" in index.explain()

"""Row codecs: rows to bytes and back, within the rounding of their scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.core.geometry import DTYPES, Geometry
from kvindex.storage.codecs import BITS, CODES, NAMES, CodecNumber, codec, rotated
from kvindex.storage.quantize import code_bytes, dequantize, groups, quantize

TINY = torch.finfo(torch.float32).tiny
SCALED = sorted(CODES)

geometries = st.builds(
    Geometry.of,
    q_heads=st.just(2),
    kv_heads=st.just(2),
    head_dim=st.sampled_from([8, 24, 64]),
    value_dim=st.sampled_from([1, 3, 8, 64]),
    dtype=st.sampled_from(DTYPES),
)


def parts(geometry, seed, scale=1.0, count=5):
    """Return keys and values whose rows differ in magnitude, with some outliers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width):
        spread = torch.randn(2, 2, count, 1, generator=generator).mul(2).exp()
        rows = torch.randn(2, 2, count, width, generator=generator) * spread * scale
        return rows.clamp(-60000, 60000).to(geometry.dtype)

    return draw(geometry.head_dim), draw(geometry.value_dim)


def both(rows):
    return [rows.keys, rows.values]


def geometry_of(dtype=torch.float32, head_dim=8, value_dim=8):
    sizes = {"q_heads": 2, "kv_heads": 2, "head_dim": head_dim, "value_dim": value_dim}
    return Geometry.of(**sizes, dtype=dtype)


@given(geometries, st.sampled_from(NAMES), st.integers(0, 5), st.integers(0, 2**20))
def test_rows_are_bytes_of_a_size_that_keeps_them_aligned(geometry, name, count, seed):
    rows = codec(name, geometry)
    encoded = rows.encode(*parts(geometry, seed, count=count))
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (2, 2, count, rows.row_bytes))
    assert encoded.is_contiguous()
    assert rows.row_bytes % 16 == 0
    widths = geometry.head_dim, geometry.value_dim
    least = sum(widths) * geometry.dtype.itemsize if name == "plain" else sum(widths) + 8
    if name in BITS:
        least = sum(code_bytes(width, BITS[name]) + 4 * groups(width)[0] for width in widths)
    assert least <= rows.row_bytes < least + 16 + 4
    decoded = rows.decode(encoded)
    assert decoded.keys.dtype == decoded.values.dtype == geometry.dtype
    assert decoded.keys.shape == (2, 2, count, geometry.head_dim)
    assert decoded.values.shape == (2, 2, count, geometry.value_dim)


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [("plain", 512), ("int8", 272), ("fp8", 272), ("int4", 160), ("int2", 96)],
)
def test_the_sizes_of_the_usual_row(name, row_bytes):
    assert codec(name, geometry_of(torch.bfloat16, 128, 128)).row_bytes == row_bytes


@given(geometries, st.data())
def test_plain_is_bit_exact_whatever_the_bits(geometry, data):
    size = geometry.dtype.itemsize
    widths = [geometry.head_dim * size, geometry.value_dim * size]
    drawn = [data.draw(st.binary(min_size=w, max_size=w)) for w in widths]
    raw = [torch.frombuffer(bytearray(b), dtype=torch.uint8)[None, None, None] for b in drawn]
    rows = codec("plain", geometry)
    decoded = rows.decode(rows.encode(*(part.view(geometry.dtype) for part in raw)))
    for part, back in zip(raw, both(decoded), strict=True):
        assert torch.equal(part, back.contiguous().view(torch.uint8))


def bound(name, part, dtype):
    """Return the largest error of a number, float64: rounding of the code, float32 and the
    dtype."""
    part = part.double()
    largest = CODES[name][1]
    scale = part.abs().amax(-1, keepdim=True) / largest
    coded = scale / 2 if name == "int8" else 2**-4 * part.abs() + 2**-10 * scale
    float32 = 4 * 2**-24 * (part.abs() + coded)  # scale, quotient, product
    kept = torch.finfo(dtype)
    own = kept.eps / 2 * (part.abs() + coded) + kept.smallest_normal * kept.eps
    return coded + float32 + own


@given(geometries, st.sampled_from(SCALED), st.integers(0, 2**20), st.sampled_from([1e-3, 1, 1e3]))
def test_a_number_is_off_by_its_codes_rounding(geometry, name, seed, scale):
    rows = codec(name, geometry)
    tokens = parts(geometry, seed, scale)
    for part, back in zip(tokens, both(rows.decode(rows.encode(*tokens))), strict=True):
        off = (part.double() - back.double()).abs()
        assert (off <= bound(name, part, geometry.dtype)).all()


def test_the_bound_can_fail():
    part = torch.tensor([[1.0, 0.3]])
    assert (torch.tensor([[0.0, 0.005]]) > bound("int8", part, torch.float32)).any()
    assert (torch.tensor([[0.0, 0.02]]) > bound("fp8", part, torch.float32)).any()


@given(st.sampled_from(SCALED), st.integers(0, 2**20), st.integers(-60, 60))
def test_scaling_by_a_power_of_two_commutes(name, seed, exponent):
    rows = codec(name, geometry_of())
    tokens = parts(rows.geometry, seed)
    decoded = rows.decode(rows.encode(*tokens))
    scaled = rows.decode(rows.encode(*(part * 2.0**exponent for part in tokens)))
    for one, other in zip(both(decoded), both(scaled), strict=True):
        assert torch.equal(one * 2.0**exponent, other)


@given(
    st.sampled_from(SCALED),
    st.sampled_from(DTYPES),
    st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    st.sampled_from(["max", "smallest_normal", "tiny"]),
)
def test_extremes_stay_finite(name, dtype, numbers, extreme):
    info = torch.finfo(dtype)
    unit = {"max": info.max, "smallest_normal": info.smallest_normal, "tiny": info.tiny * info.eps}
    part = (torch.tensor([*numbers[:7], 1.0]) * unit[extreme]).to(dtype)[None, None, None]
    rows = codec(name, geometry_of(dtype))
    for back in both(rows.decode(rows.encode(part, -part))):
        assert back.isfinite().all()
    keys = rows.decode(rows.encode(part, part)).keys
    largest = CODES[name][1]
    lost = largest * TINY  # a part below this has no normal scale: zeros
    assert ((part.double() - keys.double()).abs() <= bound(name, part, dtype) + lost).all()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("below", [0, 1, 2, 3, 5, 100])
def test_the_largest_floats_come_back_finite(name, below):
    top = torch.full((1, 1, 1, 8), torch.finfo(torch.float32).max)
    for _ in range(below):
        top = top.nextafter(torch.zeros(()))
    rows = codec(name, geometry_of())
    for sign in (1, -1):
        decoded = rows.decode(rows.encode(sign * top, sign * top))
        assert torch.allclose(decoded.keys, sign * top, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_zero_bytes_and_zero_bytes_are_zeros(name):
    rows = codec(name, geometry_of(torch.float16, 8, 3))
    zeros = torch.zeros(1, 2, 4, 8, dtype=torch.float16)
    encoded = rows.encode(zeros, zeros[..., :3])
    assert not encoded.any()
    assert not any(part.any() for part in both(rows.decode(encoded)))


@pytest.mark.parametrize("name", SCALED)
def test_a_part_too_small_for_a_scale_is_zeros(name):
    rows = codec(name, geometry_of())
    least = CODES[name][1] * TINY
    held = rows.encode(torch.full((1, 1, 1, 8), least), torch.full((1, 1, 1, 8), least * 0.99))
    assert held[..., :8].all()
    assert not held[..., 8:16].any()
    assert held[..., 16:24].view(torch.float32).tolist() == [[[[TINY, 0.0]]]]


@pytest.mark.parametrize("name", SCALED)
def test_a_zero_part_leaves_the_other_alone(name):
    rows = codec(name, geometry_of())
    ones = torch.ones(1, 2, 4, 8)
    decoded = rows.decode(rows.encode(ones * 0, ones))
    assert not decoded.keys.any()
    assert torch.equal(decoded.values, ones)


def test_the_layout_of_a_row():
    rows = codec("int8", geometry_of(head_dim=8, value_dim=3))
    keys = torch.tensor([254.0, 3.0, 5.0, -254.0, 0, 0, 0, 1.0])  # scale 2: 1.5 and 2.5 are ties
    values = torch.tensor([127.0, -1.0, 63.0])
    row = rows.encode(keys[None, None, None], values[None, None, None])[0, 0, 0]
    assert row[:11].view(torch.int8).tolist() == [127, 2, 2, -127, 0, 0, 0, 0, 127, -1, 63]
    assert rows.scales_at == 12
    assert row[12:20].view(torch.float32).tolist() == [2.0, 1.0]
    assert rows.row_bytes == 32
    assert not row[20:].any()


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"row_codec: got 'x', allowed is one of"):
        codec("x", geometry_of())


@pytest.mark.parametrize("name", NAMES)
def test_rows_encode_alike_however_they_lie_in_memory(name):
    rows = codec(name, geometry_of(torch.bfloat16, 8, 24))
    tokens = parts(rows.geometry, 0, count=6)
    want = rows.encode(*tokens)
    turned = [part.mT.contiguous().mT for part in tokens]
    spread = [part.repeat_interleave(2, dim=-1)[..., ::2] for part in tokens]
    assert torch.equal(rows.encode(*turned), want)
    assert torch.equal(rows.encode(*spread), want)


@pytest.mark.parametrize("name", [*SCALED, *BITS])
def test_pieces_are_the_whole(name, monkeypatch):
    coding = codec(name, geometry_of())
    tokens = parts(coding.geometry, 0, count=20)
    want = coding.encode(*tokens)
    monkeypatch.setattr("kvindex.storage.codecs.PIECE", 7)
    assert torch.equal(coding.encode(*tokens), want)


# Groups of few bits


def bound_of_groups(bits, part):
    """Return the largest error of a vector, float64 `[..., 1]`: half a step of each number."""
    number, size = groups(part.shape[-1])
    last = part[..., -1:].expand(*part.shape[:-1], number * size - part.shape[-1])
    grouped = torch.cat([part, last], -1).double().unflatten(-1, (number, size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    steps = (high - low + low.abs() / 128) / (2**bits - 1) * (1 + 2**-7)
    return (size * (steps / 2).square()).sum(-1, keepdim=True).sqrt()


@given(geometries, st.sampled_from(sorted(BITS)), st.integers(0, 2**20), st.sampled_from([1e-3, 1]))
def test_a_vector_is_off_by_half_a_step_of_its_groups(geometry, name, seed, scale):
    rows, tokens = codec(name, geometry), parts(geometry, seed, scale)
    quantized = rotated(tokens[0].float()), tokens[1]
    decoded = both(rows.decode(rows.encode(*tokens)))
    for part, before, back in zip(tokens, quantized, decoded, strict=True):
        off = (part.double() - back.double()).norm(dim=-1, keepdim=True)
        own = torch.finfo(geometry.dtype).eps * part.double().norm(dim=-1, keepdim=True) * 2
        small = torch.finfo(geometry.dtype).smallest_normal * part.shape[-1]
        assert (off <= bound_of_groups(BITS[name], before) * (1 + 1e-4) + own + small).all()


def test_the_bound_of_groups_can_fail():
    part = torch.linspace(0, 15, 16)
    assert bound_of_groups(4, part) < 0.6 * 4


@given(st.sampled_from([8, 24, 40, 64, 80, 96, 128]), st.integers(0, 2**20))
def test_a_rotation_keeps_products_and_is_its_own_inverse(width, seed):
    vectors = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    turned = rotated(vectors)
    torch.testing.assert_close(turned @ turned.T, vectors @ vectors.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotated(turned), vectors, rtol=1e-5, atol=1e-5)
    assert torch.equal(rotated(vectors[1:2]), turned[1:2])


def with_outliers(geometry):
    """Return keys with two channels ten times as large as the others, as in models, and values."""
    keys, values = (torch.randn(2, 2, 200, width) for width in (geometry.head_dim,) * 2)
    keys[..., [3, 40]] = keys[..., [3, 40]] * 3 + 10
    return keys, values


def test_rotation_spreads_outliers():
    torch.manual_seed(0)
    keys, values = with_outliers(geometry_of(head_dim=64, value_dim=64))
    rows = codec("int4", geometry_of(head_dim=64, value_dim=64))
    as_they_are = dequantize(*quantize(keys, 4), 64, 4)
    back = rows.decode(rows.encode(keys, values)).keys
    assert (back - keys).norm() < 0.75 * (as_they_are - keys).norm()


def test_the_error_of_the_output_grows_as_bits_go():
    torch.manual_seed(0)
    geometry = geometry_of(head_dim=64, value_dim=64)
    keys, values = with_outliers(geometry)
    queries, off = torch.randn(2, 2, 1, 64), []
    attend = torch.nn.functional.scaled_dot_product_attention
    for name in ("int8", "int4", "int2"):
        rows = codec(name, geometry)
        output = attend(queries, *both(rows.decode(rows.encode(keys, values))))
        off.append(((output - attend(queries, keys, values)).norm() / output.norm()).item())
    assert 2 * off[0] < off[1] < off[2] / 2


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_keys_and_values_come_back_finite(name, dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, 0.5, largest / 3]).to(dtype)[None, None, None]
    most = min(largest, 2.0**48)
    keys = values.repeat(1, 1, 1, 2).clamp(-most, most)
    rows = codec(name, geometry_of(dtype, 8, 4))
    assert all(back.isfinite().all() for back in both(rows.decode(rows.encode(keys, values))))


@pytest.mark.parametrize("name", BITS)
def test_rows_of_groups_stand_by_themselves(name):
    rows = codec(name, geometry_of(torch.bfloat16, 24, 3))
    tokens = parts(rows.geometry, 0, count=20)
    whole = rows.encode(*tokens)
    one = rows.encode(*(part[:, :, 7:8] for part in tokens))
    assert torch.equal(one, whole[:, :, 7:8])
    for got, want in zip(both(rows.decode(one)), both(rows.decode(whole)), strict=True):
        assert torch.equal(got, want[:, :, 7:8])


def test_each_codec_has_a_number_that_kernels_compare_with():
    assert set(NAMES) == {"plain", *CODES, *BITS}
    numbers = {name: int(CodecNumber[name.upper()]) for name in NAMES}
    assert numbers == dict(plain=0, int8=1, fp8=2, int4=3, int2=4)

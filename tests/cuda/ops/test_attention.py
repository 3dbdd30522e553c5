"""Attention by a kernel, compared with float64 within the bound of its rounding errors."""

import math
from itertools import product

import pytest
import torch

from kvindex.ops import attention as reference
from kvindex_cuda.ops import attention
from tests.cuda import emulator
from tests.cuda.devices import mostly_slow_on_cpu, on, on_devices
from tests.support.helpers import far_apart, mostly_slow

ROUNDING = 2.0**-24
"""Relative rounding error of one operation in float32."""

OUTPUT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative rounding error of the output's type."""

NEVER = float("-inf")


def drawn(seed, H, G, R, D, Dv=None, *, batch=2, dtype=torch.float32, device="cpu"):
    """Queries, keys and values; the latter two are views of rows."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, H, D, generator=generator)
    rows = torch.randn(batch, G, R + 3, D + (Dv or D), generator=generator)
    queries, rows = (part.to(device, dtype) for part in (queries, rows))
    return queries, rows[:, :, :R, :D], rows[:, :, :R, D:]


def exactly(queries, keys, values, *, scale, softcap=None, bias=None):
    """Return attention in float64, and the largest error that float32 can have.

    A logit has D + 3 roundings of Σ |q k| and a few of its own; an attention weight has the same
    error, relative to itself. A lane adds up at most R / 8 rows with 3 roundings each, then come
    warps and thread blocks.
    """
    (G, R), H = keys.shape[1:3], queries.shape[1]
    logits, off = exact_logits(queries, keys, scale=scale, softcap=softcap, bias=bias)
    values = values.double().repeat_interleave(H // G, dim=1)
    weights = logits.softmax(-1).nan_to_num(0.0)
    output = torch.einsum("bhr,bhrd->bhd", weights, values)
    steps = 2 * off + 2 * (3 * R / 8 + 150)
    bound = steps * ROUNDING * values.abs().amax((-1, -2))
    return output, bound[..., None] + OUTPUT[queries.dtype] * output.abs() + 2.0**-25


def exact_logits(queries, keys, *, scale, softcap=None, bias=None):
    """Return logits in float64 `[B, H, R]`, and the number of roundings that float32 may be off by,
    `[B, H]`.
    """
    (B, H, D), (G, R) = queries.shape, keys.shape[1:3]
    asked, keys = queries.double(), keys.double().repeat_interleave(H // G, dim=1)
    logits = torch.einsum("bhd,bhrd->bhr", asked, keys) * scale
    size = torch.einsum("bhd,bhrd->bhr", asked.abs(), keys.abs()).amax(-1) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    tallest = logits.abs().amax(-1)
    if bias is not None:
        logits = logits + bias.double()
        tallest = tallest + bias.double().masked_fill(bias == NEVER, 0).abs().expand(B, H, R).amax(
            -1
        )
    return logits, (D + 3) * size + 4 * (softcap or 0) + 6 * tallest + 8


def assert_log_sums(got, case, **options):
    """The lse equals `torch.logsumexp` in float64 except for roundings of logits, sum and
    logarithm.
    """
    queries, keys, _ = case
    logits, off = exact_logits(queries, keys, **options)
    want, R = logits.logsumexp(-1), keys.shape[2]
    bound = ROUNDING * (off + 3 * R / 8 + 150 + 2 * math.log(R) + want.abs())
    assert (got.shape, got.dtype) == (want.shape, torch.float32)
    assert ((got == want) | ((got.double() - want).abs() <= bound)).all()  # −inf equals −inf


def close(got, case, **options):
    output, bound = exactly(*case, **options)
    assert (got.shape, got.dtype) == (output.shape, case[0].dtype)
    return bool(((got.double() - output).abs() <= bound).all())


CASES = [
    *((2, 2, 1, 64, 64, torch.float32), (3, 1, 255, 96, 96, torch.bfloat16)),
    *((8, 2, 257, 128, 128, torch.float16), (8, 1, 3000, 128, 128, torch.bfloat16)),
    *((4, 1, 700, 256, 256, torch.float32), (9, 1, 40, 80, 48, torch.float32)),
    (16, 1, 100, 64, 64, torch.bfloat16),
]
"""Parameters: H, G, R, D, Dv, dtype."""


@mostly_slow_on_cpu(
    "shape, softcap",
    mostly_slow(product(CASES, [None, 5.0]), *zip(CASES[:4], [None, 5.0] * 2, strict=True)),
    *zip(CASES[:2], [None, 5.0], strict=True),
    indirect=False,
)
def test_attention(shape, softcap, device):
    H, G, R, D, Dv, dtype = shape
    case, options = drawn(R, H, G, R, D, Dv, dtype=dtype, device=device), dict(scale=D**-0.5)
    with on(device):
        got, lse = attention.attend(*case, softcap=softcap, return_lse=True, **options)
        alone = attention.attend(*case, softcap=softcap, **options)
    assert torch.equal(got, alone)
    assert close(got, case, softcap=softcap, **options)
    assert_log_sums(lse, case, softcap=softcap, **options)
    assert close(
        reference.attend(*case, softcap=softcap, **options), case, softcap=softcap, **options
    )


@on_devices
def test_weights_of_rows_and_hidden_rows(device):
    case = drawn(1, 8, 2, 300, 64, device=device)
    bias = torch.randn(2, 8, 300, generator=torch.Generator().manual_seed(2)).to(device)
    bias[:, :, 50:250:3] = NEVER
    bias[0, 3], bias[1, 4:], bias[1, 5, 299] = NEVER, NEVER, 0.5
    for some in (bias, bias[:, :1], bias[:1, 3:4], bias[1, 7]):
        with on(device):
            got, lse = attention.attend(*case, scale=0.125, bias=some, return_lse=True)
        assert close(got, case, scale=0.125, bias=some)
        assert_log_sums(lse, case, scale=0.125, bias=some)
        hidden = (some == NEVER).all(-1).expand(2, 8)
        assert (got[hidden] == 0).all()
        assert (got[~hidden] != 0).any(-1).all()


@on_devices
def test_a_hidden_row_may_hold_anything(device):
    queries, keys, values = drawn(2, 4, 1, 100, 64, device=device)
    bias = torch.zeros(2, 4, 100, device=device)
    bias[..., 30:50] = NEVER
    with on(device):
        want = attention.attend(queries, keys, values, scale=0.125, bias=bias)
        keys[:, :, 30:50], values[:, :, 40:45] = float("nan"), float("inf")
        got = attention.attend(queries, keys, values, scale=0.125, bias=bias)
    assert torch.equal(got, want)


@on_devices
def test_logits_far_apart(device):
    case = drawn(3, 4, 2, 500, 64, device=device)
    with on(device):
        got = attention.attend(*case, scale=20.0)
    assert close(got, case, scale=20.0)


@on_devices
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float16)]
)
def test_queries_of_another_type_than_rows(dtypes, device):
    queries, keys, values = drawn(4, 4, 2, 60, 64, device=device)
    asked, keys, values = queries.to(dtypes[0]), keys.to(dtypes[1]), values.to(dtypes[1])
    with on(device):
        got = attention.attend(asked, keys, values, scale=0.125)
    assert got.dtype == dtypes[0]
    want, bound = exactly(asked.float(), keys, values, scale=0.125)
    assert ((got.double() - want).abs() <= bound + OUTPUT.get(dtypes[0], 0) * want.abs()).all()


@mostly_slow_on_cpu("gap", [1, 2, 4], 1, indirect=False)
def test_rows_that_start_anywhere(gap, device):
    """Strides allow only loads of 2, 4 and 8 bytes."""
    generator = torch.Generator().manual_seed(gap)
    rows = torch.randn(1, 2, 90, 160 + gap, generator=generator).to(device, torch.bfloat16)
    queries = torch.randn(1, 6, 80, generator=generator).to(device, torch.bfloat16)
    case = queries, rows[..., gap : 80 + gap], rows[..., 80 + gap :]
    with on(device):
        got = attention.attend(*case, scale=0.1)
    assert close(got, case, scale=0.1)


@on_devices
def test_rows_beyond_2_to_the_31_elements_are_found(device):
    queries, keys, _ = drawn(10, 8, 2, 40, 128, batch=1, dtype=torch.float16, device=device)
    apart = far_apart(keys)
    with on(device):
        want = attention.attend(queries, keys, keys, scale=0.1)
        assert torch.equal(attention.attend(queries, apart, apart, scale=0.1), want)


@on_devices
def test_a_batch_equals_its_rows(device):
    queries, keys, values = drawn(5, 4, 1, 20, 64, batch=3, device=device)
    with on(device):
        whole = attention.attend(queries, keys, values, scale=0.125)
        for b in range(3):
            row = slice(b, b + 1)
            alone = attention.attend(queries[row], keys[row], values[row], scale=0.125)
            # another number of splits
            torch.testing.assert_close(alone, whole[row], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_whatever_the_order_of_threads_and_blocks():
    case, found = drawn(6, 4, 1, 1000, 64), []
    for order in emulator.ORDERS:
        with emulator.emulated(order=order, seed=2):
            found.append(attention.attend(*case, scale=0.125))
    assert all(torch.equal(found[0], other) for other in found[1:])


@on_devices
def test_the_comparison_can_fail(device):
    case = drawn(7, 8, 2, 257, 64, device=device)
    bias = torch.zeros(2, 8, 257, device=device)
    with on(device):
        got = attention.attend(*case, scale=0.125, bias=bias)
    assert close(got, case, scale=0.125)
    logits = case[1][1, 1] @ case[0][1, 6] * 0.125
    row = (logits.softmax(0) - 1 / 257).abs().argmin()
    bias[1, 6, row] = NEVER  # hide a row of average weight from one head
    assert not close(got, case, scale=0.125, bias=bias)


@on_devices
def test_prefill_is_the_reference(device):
    queries, keys, values = drawn(8, 4, 2, 50, 64, device=device)
    several = torch.stack([queries, queries + 1], dim=2)
    blocks = [
        (keys[:, :, :20], values[:, :, :20], None),
        (keys[:, :, 20:], values[:, :, 20:], None),
    ]
    got = attention.attend_blocks(several, blocks, scale=0.125)
    assert torch.equal(got, reference.attend_blocks(several, blocks, scale=0.125))
    got = attention.attend_causal(several, keys, values, scale=0.125)
    assert torch.equal(got, reference.attend_causal(several, keys, values, scale=0.125))
    assert attention.cap is reference.cap


def test_what_the_kernel_does_not_serve_is_refused():
    queries, keys, values = drawn(9, 4, 2, 50, 64)
    with pytest.raises(ValueError, match="keys: got no rows"):
        attention.attend(queries, keys[:, :, :0], values[:, :, :0], scale=1.0)
    with pytest.raises(ValueError, match="values: got shape"):
        attention.attend(queries, keys, values[:, :, 1:], scale=1.0)
    with pytest.raises(ValueError, match="got 3 heads, allowed is a multiple of the 2 KV heads"):
        attention.attend(queries[:, :3], keys, values, scale=1.0)
    with pytest.raises(ValueError, match="allowed is a CUDA device"):
        attention.attend(queries, keys, values, scale=1.0)

"""Estimates by kernels, compared with the torch reference within the bound of their rounding
errors.
"""

from types import SimpleNamespace

import pytest
import torch

from kvindex import ops
from kvindex.ops import codes
from kvindex.ops import rerank as reference
from kvindex_cuda.ops import attention, coarse, fetch, rerank, select
from tests.cuda import emulator
from tests.cuda.devices import mostly_slow_on_cpu, on, on_devices, on_devices_slowly
from tests.support.helpers import Case, left_padding, mostly_slow

ROUNDING = 2.0**-24
"""Relative rounding error of one operation in float32."""


def drawn(seed, D, block, bits, g, C, *, batch=2, dtype=torch.float32, device="cpu"):
    """Queries, and codes of keys from `codes.encode`: the arguments of `estimate`."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 2, max(C, 1), D, generator=generator)
    queries = 3 * torch.randn(batch, 2, g, D, generator=generator)
    levels = codes.levels(block, bits)
    norms = keys.norm(dim=-1)
    made = codes.encode(keys / norms[..., None], norms, levels, block=block)
    weights = made["weights"].to(dtype)
    weights[:, :, 1::7] = 0
    each = (part[:, :, :C] for part in (made["signs"], made["magnitudes"], weights))
    parts = queries, *each, levels
    return tuple(part.to(device) for part in parts)


def exactly(queries, signs, magnitudes, weights, levels):
    """Return the estimate in float64, and the largest error that float32 sums can have."""
    block = queries.shape[-1] // weights.shape[-1]
    directions = codes.decode(signs, magnitudes, levels).double()
    keys = directions * weights.double().repeat_interleave(block, dim=-1)
    bound = (queries.double().abs() @ keys.mT.abs()) * (queries.shape[-1] + 3) * ROUNDING
    return queries.double() @ keys.mT, bound


def variance(queries, signs, magnitudes, weights, levels, tangent):
    """Return the square of `errors` in float64, and the largest error of float32 sums.

    With n coordinates of a block, ⟨v, q⟩² / ‖v‖² is off by at most 3n + 4 roundings of ‖q‖² (Cauchy
    and Schwarz), ‖q‖² by n + 1, ‖k‖² by n + 5, and the sum by one for each block.
    """
    W, D = weights.shape[-1], queries.shape[-1]
    parts = codes.decode(signs, magnitudes, levels).double().unflatten(-1, (W, -1))
    asked, n = queries.double().unflatten(-1, (W, -1)), D // W
    sizes = parts.square().sum(-1)
    along = torch.einsum("bgqwd,bgcwd->bgqcw", asked, parts).square() / sizes[:, :, None]
    squares = asked.square().sum(-1)[:, :, :, None]
    keys = (weights.double().square() * sizes / (1 + tangent))[:, :, None] * tangent / (n - 1)
    bound = (keys * squares).sum(-1) * (5 * n + W + 20) * ROUNDING
    return (keys * (squares - along).clamp_min(0)).sum(-1), bound


CASES = [
    *((64, 64, 3, 4, 257), (64, 8, 3, 1, 0), (64, 8, 3, 1, 1), (80, 80, 0, 3, 255)),
    *((96, 24, 5, 8, 300), (128, 8, 1, 4, 3000), (128, 128, 7, 9, 40), (256, 8, 3, 4, 257)),
]
"""Parameters: D, coordinates that share a weight, magnitude bits, query heads of a group, keys."""


@mostly_slow_on_cpu("D, block, bits, g, C", CASES, *CASES[:3], indirect=False)
def test_estimates(D, block, bits, g, C, device):
    case = drawn(C, D, block, bits, g, C, device=device)
    with on(device):
        got = rerank.estimate(*case)
    want, bound = exactly(*case)
    assert (got.dtype, got.shape) == (torch.float32, want.shape)
    assert ((got - want).abs() <= bound).all()
    assert ((reference.estimate(*case) - want).abs() <= bound).all()
    assert not got[..., 1::7].any()


@on_devices
@pytest.mark.parametrize(("D", "block", "bits", "g", "C"), mostly_slow(CASES, CASES[0]))
def test_errors(D, block, bits, g, C, device):
    case = *drawn(C, D, block, bits, g, C, device=device), codes.tangent(block, bits)
    with on(device):
        got = rerank.errors(*case)
    want, bound = variance(*case)
    assert (got.dtype, got.shape) == (torch.float32, want.shape)
    assert ((got.double().square() - want).abs() <= bound).all()
    assert ((reference.errors(*case).double().square() - want).abs() <= bound).all()


@mostly_slow_on_cpu(
    "dtype", [torch.float16, torch.bfloat16, torch.float64], torch.bfloat16, indirect=False
)
def test_weights_of_any_float_type(dtype, device):
    case = drawn(1, 80, 8, 2, 3, 100, dtype=dtype, device=device)
    with on(device):
        got = rerank.estimate(*case)
    want, bound = exactly(*case)
    assert ((got - want).abs() <= bound).all()


@on_devices_slowly
def test_a_batch_equals_its_rows(device):
    queries, signs, magnitudes, weights, levels = drawn(2, 64, 8, 3, 4, 300, device=device)
    tangent = codes.tangent(8, 3)
    with on(device):
        whole = rerank.estimate(queries, signs, magnitudes, weights, levels)
        deviations = rerank.errors(queries, signs, magnitudes, weights, levels, tangent)
        for b in range(2):
            row = slice(b, b + 1)
            some = queries[row], signs[row], magnitudes[row], weights[row], levels
            assert torch.equal(rerank.estimate(*some), whole[row])
            assert torch.equal(rerank.errors(*some, tangent), deviations[row])


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_whatever_the_order_of_threads_and_blocks():
    case, found = drawn(3, 64, 8, 3, 4, 700), []
    for order in emulator.ORDERS:
        with emulator.emulated(order=order, seed=2):
            found.append((rerank.estimate(*case), rerank.errors(*case, codes.tangent(8, 3))))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@on_devices
def test_the_comparison_can_fail(device):
    case = drawn(4, 64, 8, 3, 4, 300, device=device)
    with on(device):
        got = rerank.estimate(*case)
        deviations = rerank.errors(*case, codes.tangent(8, 3))
    case[2][0, 0, 17, 0, 5] ^= 8  # one bit of one magnitude
    for found, (want, bound) in (
        (got, exactly(*case)),
        (deviations.double().square(), variance(*case, codes.tangent(8, 3))),
    ):
        wrong = (found - want).abs() > bound
        assert wrong[0, 0, :, 17].all()
        assert wrong.sum() == 4


def test_what_the_kernels_do_not_serve_is_refused():
    queries, signs, magnitudes, weights, levels = drawn(5, 64, 8, 3, 4, 30)
    for message, arguments in {
        "signs: got shape": (queries, signs[..., :7], magnitudes, weights, levels),
        "levels: got shape": (queries, signs, magnitudes, weights, levels[:4]),
        "queries: got torch.float64": (queries.double(), signs, magnitudes, weights, levels),
        "weights: got 7 weights per key, allowed is a divisor of D = 64": (
            queries,
            signs,
            magnitudes,
            weights[..., :7],
            levels,
        ),
        "allowed is a CUDA device": (queries, signs, magnitudes, weights, levels),
    }.items():
        with pytest.raises(ValueError, match=message):
            rerank.estimate(*arguments)


KERNELS = SimpleNamespace(
    **{name: getattr(ops, name) for name in ("codes", "group", "transform")},
    **dict(attention=attention, coarse=coarse, fetch=fetch, rerank=rerank, select=select),
)
"""Kernels run the stages after encoding; the reference encodes, so both have the same codes."""


@on_devices
@pytest.mark.parametrize("lists", ["head", "group"])
@pytest.mark.parametrize("preset", ["paper", "fast", "accurate", "precise", "scan"])
def test_an_index_on_kernels_finds_what_the_reference_finds(preset, lists, device):
    case = Case(q_heads=8, kv_heads=2, head_dim=64, value_dim=64, batch=2)
    count, k = 700, 20
    keys, values = (part.to(device) for part in case.tokens(count))
    valid = left_padding([0, 130], count, device)
    found = []
    for kernels in (True, False):
        index = case.index("pariskv", preset=preset, candidates_per=lists, device=device)
        if kernels:
            index.ops = KERNELS
        with on(device):
            index.append(keys[:, :, :500], values[:, :, :500], valid=valid[:, :500])
            index.append(keys[:, :, 500:], values[:, :, 500:], valid=valid[:, 500:])
            index.truncate(690)
            hits = index.search(case.queries().to(device), k=k)
            found.append((hits, index.fetch(hits), index.search(case.queries().to(device), k=k)))
    (got, rows, again), (want, wanted, _) = found
    assert torch.equal(got.ids, again.ids)
    assert torch.equal(got.scores, again.scores)
    # the derived bound of the error of estimates is below 1e-4 here; only ids within it may differ
    torch.testing.assert_close(got.scores, want.scores, rtol=0, atol=1e-4)
    same = got.ids == want.ids
    assert same.float().mean() > 0.95
    assert torch.equal(rows.keys[same], wanted.keys[same])
    assert torch.equal(rows.values[same], wanted.values[same])

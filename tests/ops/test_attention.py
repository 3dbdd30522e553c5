from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.core.protocol import Attended
from kvindex.ops import attention
from kvindex.ops.attention import (
    attend,
    attend_blocks,
    attend_causal,
    cap,
    merge,
    with_sink_logits,
)

NEVER = float("-inf")
seeds = st.integers(0, 2**31)
groups = st.sampled_from([1, 3, 4])
caps = st.sampled_from([None, 0.5, 30.0])


def reference(queries, keys, values, bias=None, scale=0.3, softcap=None):
    """Compute softmax attention in float64, in one call; a query that sees no row gives 0."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    logits = scale * (queries.double() @ keys.mT)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if bias is not None:
        logits = logits + bias.double()
    return logits.softmax(-1).nan_to_num(0) @ values


def problem(seed, group=3, T=4, N=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, 2 * group, T, 8, generator=generator).to(dtype)
    keys = torch.randn(2, 2, N, 8, generator=generator).to(dtype)
    values = torch.randn(2, 2, N, 5, generator=generator).to(dtype)
    hidden = torch.rand(2, 2 * group, T, N, generator=generator) < 0.4
    bias = torch.randn(hidden.shape, generator=generator).masked_fill(hidden, NEVER)
    return queries, keys, values, bias


def cut(keys, values, bias, cuts):
    cuts = [0, *sorted(cuts), keys.shape[2]]
    for start, stop in pairwise(cuts):
        some = slice(start, stop)
        yield keys[:, :, some], values[:, :, some], None if bias is None else bias[..., some]


def assert_close(got, want, dtype=torch.float32):
    # values are about 1 and weights sum to 1; errors come from rounding the logits and the output
    slack = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack)


@given(seeds, groups, caps, st.lists(st.integers(0, 12), max_size=5), st.booleans())
def test_blocks_equal_one_block_for_any_split(seed, group, softcap, cuts, masked):
    queries, keys, values, bias = problem(seed, group)
    bias = bias if masked else None
    blocks = cut(keys, values, bias, cuts)
    got = attend_blocks(queries, blocks, scale=0.3, softcap=softcap)
    assert_close(got, reference(queries, keys, values, bias, softcap=softcap))


@given(seeds, st.lists(st.integers(0, 12), max_size=5), st.integers(0, 12))
def test_a_mask_that_hides_whole_blocks_or_every_row(seed, cuts, hidden):
    queries, keys, values, bias = problem(seed)
    bias[..., :hidden] = NEVER
    bias[1, 2] = NEVER
    got = attend_blocks(queries, cut(keys, values, bias, cuts), scale=0.3)
    assert not got.isnan().any()
    assert not got[1, 2].any()
    assert_close(got, reference(queries, keys, values, bias))


@given(seeds, st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_accumulated_in_float32(seed, dtype):
    queries, keys, values, _ = problem(seed, dtype=dtype)
    got = attend_blocks(queries, cut(keys, values, None, [5]), scale=0.3)
    assert_close(got, reference(queries, keys, values), dtype)


@given(seeds, groups, caps)
def test_attend_is_the_case_of_one_query(seed, group, softcap):
    queries, keys, values, bias = problem(seed, group, T=1)
    got = attend(queries[:, :, 0], keys, values, scale=0.3, softcap=softcap, bias=bias[:, :, 0])
    assert_close(got, reference(queries, keys, values, bias, softcap=softcap)[:, :, 0])


def test_a_bias_broadcasts_over_heads():
    queries, keys, values, bias = problem(0, T=1)
    bias = bias[:, :1, 0]
    got = attend(queries[:, :, 0], keys, values, scale=0.3, bias=bias)
    assert_close(got, reference(queries, keys, values, bias[:, :, None])[:, :, 0])


def test_huge_logits_do_not_overflow():
    queries, keys, values, _ = problem(0)
    got = attend_blocks(queries * 1e18, cut(keys, values, None, [3, 7]), scale=1.0)
    assert_close(got, reference(queries * 1e18, keys, values, scale=1.0))


def test_no_block_at_all_is_refused():
    queries, keys, values, _ = problem(0)
    with pytest.raises(ValueError, match="blocks: got no rows"):
        attend_blocks(queries, cut(keys[:, :, :0], values[:, :, :0], None, []), scale=1.0)


@given(seeds, groups, st.integers(1, 12), st.booleans())
def test_causal_attention_of_the_newest_tokens(seed, group, T, padded):
    queries, keys, values, _ = problem(seed, group, T=T)
    pads = torch.tensor([5, 0]) if padded else torch.tensor([0, 0])
    valid = torch.arange(12) >= pads[:, None]
    rows, positions = torch.arange(12), torch.arange(12 - T, 12)
    seen = (rows <= positions[:, None])[None] & valid[:, None]  # [2, T, 12]
    bias = torch.zeros(2, 1, T, 12).masked_fill(~seen[:, None], NEVER)
    got = attend_causal(queries, keys, values, scale=0.3, valid=valid if padded else None)
    assert not got.isnan().any()
    real = valid[:, 12 - T :][:, None, :, None].expand_as(got)
    want = reference(queries, keys, values, bias)
    assert_close(got[real], want[real])


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def causal_reference(queries, keys, values, scale=0.3):
    T, N = queries.shape[2], keys.shape[2]
    seen = torch.arange(N) <= torch.arange(N - T, N)[:, None]
    return reference(queries, keys, values, torch.zeros(T, N).masked_fill(~seen, NEVER), scale)


@given(seeds, groups, st.integers(1, 12), dtypes, st.sampled_from(["dense", "by token", "by row"]))
def test_queries_that_follow_others_attend_as_in_one_call(seed, group, T, dtype, layout):
    queries, keys, _, _ = problem(seed, group, T=T, dtype=dtype)
    values = keys.flip(-1)  # equal widths: torch's kernel returns lse
    if layout == "by token":
        queries, keys = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (queries, keys))
    if layout == "by row":
        queries, keys = (t.mT.contiguous().mT for t in (queries, keys))
    got = attend_causal(queries, keys, values, scale=0.3)
    assert got.shape == queries.shape
    assert_close(got, causal_reference(queries, keys, values), dtype)


def test_attention_to_the_past_has_gradients():
    queries, keys, _, _ = problem(0)
    parts = [part.clone().requires_grad_() for part in (queries, keys, keys.flip(-1))]
    weights = torch.linspace(-1, 1, queries.numel()).view_as(queries)
    (attend_causal(*parts, scale=0.3) * weights).sum().backward()
    got = [part.grad.clone() for part in parts]
    doubles = [part.detach().double().requires_grad_() for part in parts]
    (causal_reference(*doubles) * weights).sum().backward()
    for one, other in zip(got, doubles, strict=True):
        assert_close(one, other.grad)


@given(st.floats(-1e6, 1e6), st.floats(0.01, 10), st.floats(0.1, 100))
def test_cap_bounds_the_logits(logit, scale, softcap):
    got = cap(torch.tensor([logit, 0.0]), scale, softcap)
    assert (got.abs() <= softcap * (1 + 1e-6)).all()
    assert got[1] == 0
    assert cap(torch.tensor([logit]), scale, None) == torch.tensor([logit]) * scale


def test_the_comparison_with_float64_can_fail():
    queries, keys, values, bias = problem(0)
    want = reference(queries, keys, values, bias)
    for wrong in (
        attend_blocks(queries, cut(keys, values, bias, [3]), scale=0.301),
        attend_blocks(queries, cut(keys, values, None, [3]), scale=0.3),
        attend_blocks(queries, cut(keys, values.roll(1, 2), bias, [3]), scale=0.3),
    ):
        with pytest.raises(AssertionError):
            assert_close(wrong, want)


@given(seeds, groups, caps, st.lists(st.integers(0, 12), max_size=5), st.booleans())
def test_any_split_of_the_rows_merges_to_attention_over_all(seed, group, softcap, cuts, masked):
    queries, keys, values, bias = problem(seed, group, T=1)
    queries, bias = queries[:, :, 0], bias[:, :, 0] if masked else None
    options, found = dict(scale=0.3, softcap=softcap), torch.ones((2, 2), dtype=torch.int32)
    parts = []
    for some, rows, term in cut(keys, values, bias, cuts):
        if some.shape[2]:
            parts.append(attend(queries, some, rows, bias=term, return_lse=True, **options))
    hidden = torch.full((*queries.shape[:2], 3), NEVER)
    nothing = torch.full_like(keys[:, :, :3], 7.0), torch.full_like(values[:, :, :3], 7.0)
    parts.insert(seed % 3, attend(queries, *nothing, bias=hidden, return_lse=True, **options))
    merged = merge([Attended(*part, found) for part in parts])
    whole, lse = attend(queries, keys, values, bias=bias, return_lse=True, **options)
    torch.testing.assert_close(merged.output, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-5, atol=1e-5)
    assert (merged.found == len(parts)).all()
    assert merged.found.dtype == torch.int32
    assert torch.equal(whole, attend(queries, keys, values, bias=bias, **options))


@given(seeds, caps, st.lists(st.integers(0, 12), max_size=3))
def test_the_log_sum_exp_is_that_of_the_logits(seed, softcap, cuts):
    queries, keys, values, bias = problem(seed)
    bias[:, :, 0] = NEVER  # these queries see no row
    blocks = cut(keys, values, bias, cuts)
    got = attend_blocks(queries, blocks, scale=0.3, softcap=softcap, return_lse=True)[1]
    logits = cap(queries.double() @ keys.double().repeat_interleave(3, dim=1).mT, 0.3, softcap)
    want = (logits + bias.double()).logsumexp(-1)
    assert (got.dtype, bool((got[:, :, 0] == NEVER).all())) == (torch.float32, True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_parts_that_see_nothing_merge_to_nothing():
    none = Attended(torch.zeros(1, 2, 4), torch.full((1, 2), NEVER), torch.zeros(1, 1).int())
    merged = merge([none, none])
    assert (merged.output == 0).all()
    assert (merged.lse == NEVER).all()
    with pytest.raises(ValueError, match="parts: got an empty list, allowed is at least one"):
        merge([])


def test_a_sinks_logit_is_that_of_a_row_whose_value_is_0():
    generator = torch.Generator().manual_seed(3)
    queries, keys, values = (torch.randn(2, 2, n, 8, generator=generator) for n in (1, 9, 9))
    keys[:, :, 0], values[:, :, 0] = 0, 0
    sinks = torch.tensor([-1.0, 2.5])
    bias = torch.zeros(2, 2, 9)
    bias[:, :, 0] = sinks  # the logit of the first row is that of the sink
    queries, rest = queries[:, :, 0], (keys[:, :, 1:], values[:, :, 1:])
    output, lse = attend(queries, *rest, scale=0.5, return_lse=True)
    want = attend(queries, keys, values, scale=0.5, bias=bias)
    torch.testing.assert_close(with_sink_logits(output, lse, sinks), want)


@pytest.mark.parametrize("sink", [0.0, float("-inf"), 300.0])
def test_a_sink_without_any_row_gives_0(sink):
    output, lse = torch.zeros(1, 2, 8), torch.full((1, 2), float("-inf"))
    assert torch.equal(with_sink_logits(output, lse, torch.full((2,), sink)), output)


def exact(queries, keys, values, scale, *, causal=False):
    """Compute what the kernels of torch for GPUs do, and the log-sum-exp."""
    keys, values = (part.repeat_interleave(queries.shape[1] // 2, 1) for part in (keys, values))
    logits = scale * queries @ keys.mT
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, float("-inf"))
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@pytest.mark.parametrize("past", [1, 1023, 1024, 2500, 7168])
def test_pieces_of_the_past_are_merged(past, monkeypatch):
    torch.manual_seed(0)
    sizes = []

    def kernel(queries, keys, values, scale, *, causal=False):
        sizes.append(keys.shape[2])
        return exact(queries, keys, values, scale, causal=causal)

    monkeypatch.setattr(attention, "_cudnn", kernel)
    monkeypatch.setattr(attention, "_flash", kernel)
    queries = torch.randn(2, 4, 60, 16)
    keys, values = torch.randn(2, 2, 2, past + 60, 16).unbind(0)
    want = attend_causal(queries, keys, values, scale=0.3)
    found = attention._by_pieces(queries, keys, values, 0.3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    own, *pieces = sizes[: len(sizes) // 2]
    assert (own, sum(pieces)) == (60, past)
    assert all(size.bit_count() == 1 or size < attention.PIECE for size in pieces)
    assert sum(size < attention.PIECE for size in pieces) <= 1


def test_strides_of_a_token_major_tensor_depend_on_its_shape_alone():
    buffer = torch.randn(1, 100, 2, 16)
    part = buffer.transpose(1, 2)[:, :, 10:30]
    found = attention._token_major(part)
    assert torch.equal(found, part)
    assert (found.stride(), found.data_ptr()) == ((640, 16, 32, 1), part.data_ptr())
    other = part.contiguous()  # the heads are apart: copied
    assert attention._token_major(other).stride() == found.stride()
    assert torch.equal(attention._token_major(other), part)

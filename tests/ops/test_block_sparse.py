import pytest
import torch

from kvindex.ops import block_sparse
from kvindex.ops.attention import attend_causal
from kvindex.ops.block_sparse import attend_chosen, attend_chosen_fast
from tests.support.selecting import prompt


def naive(queries, keys, values, chosen, scale):
    """Compute the output and the log-sum-exp in float64, one query at a time."""
    (B, H, T, _), (G, N) = queries.shape, keys.shape[1:3]
    output = torch.zeros(B, H, T, values.shape[3], dtype=torch.float64)
    sums = torch.full((B, H, T), -float("inf"), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                position = N - T + t
                blocks = chosen[b, h, t // 128].nonzero()[:, 0].tolist()
                rows = [i for j in blocks for i in range(128 * j, 128 * j + 128) if i <= position]
                if rows:
                    logits = (
                        scale * keys[b, h // (H // G), rows].double() @ queries[b, h, t].double()
                    )
                    output[b, h, t] = logits.softmax(0) @ values[b, h // (H // G), rows].double()
                    sums[b, h, t] = logits.logsumexp(0)
    return output, sums


def random_choice(queries, keys, seed=0, odds=0.5):
    (B, H, T, _), N = queries.shape, keys.shape[2]
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(B, H, -(-T // 128), -(-N // 128), generator=generator) < odds


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (128, 0), (300, 0), (300, 256), (390, 128)])
@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
def test_attention_to_chosen_blocks(tokens, first, D):
    queries, keys, values = prompt(tokens, D=D)
    queries, values = queries[:, :, first:], values[..., :24]
    chosen = random_choice(queries, keys)
    got, lse = attend_chosen(queries, keys, values, chosen, scale=D**-0.5, return_lse=True)
    want, want_lse = naive(queries, keys, values, chosen, D**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    assert torch.equal(attend_chosen(queries, keys, values, chosen, scale=D**-0.5), got)


def test_with_all_blocks_it_is_full_attention():
    queries, keys, values = prompt(128 * 3 + 50)
    queries = queries[:, :, 128:]
    chosen = torch.ones(2, 4, 3, 4, dtype=torch.bool)  # blocks after the own one have no effect
    got = attend_chosen(queries, keys, values, chosen, scale=0.25)
    want = attend_causal(queries, keys, values, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_query_without_any_chosen_key_gets_0():
    queries, keys, values = prompt(256)
    chosen = torch.zeros(2, 4, 2, 2, dtype=torch.bool)
    chosen[:, :, 0] = True
    chosen[:, 1:, 1, 0] = True
    got, lse = attend_chosen(queries, keys, values, chosen, scale=0.25, return_lse=True)
    assert not got[:, 0, 128:].any()
    assert (lse[:, 0, 128:] == -float("inf")).all()
    assert lse[:, 1:].isfinite().all()
    assert lse[:, 0, :128].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_in_float32(dtype):
    queries, keys, values = (part.to(dtype) for part in prompt(300))
    chosen = random_choice(queries, keys)
    got, lse = attend_chosen(queries, keys, values, chosen, scale=0.25, return_lse=True)
    want, want_lse = naive(queries, keys, values, chosen, 0.25)
    assert (got.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_arguments_that_do_not_fit_raise():
    queries, keys, values = prompt(300)
    chosen = random_choice(queries, keys)
    some = queries[:, :, 1:]
    with pytest.raises(ValueError, match="queries: got 299 tokens for 300 keys, allowed is"):
        attend_chosen(some, keys, values, chosen, scale=0.25)
    with pytest.raises(ValueError, match="queries: got 0 tokens"):
        attend_chosen(queries[:, :, :0], keys, values, chosen, scale=0.25)
    with pytest.raises(ValueError, match=r"chosen: got shape \[2, 4, 2, 3\]"):
        attend_chosen(queries, keys, values, chosen[:, :, 1:], scale=0.25)
    with pytest.raises(ValueError, match=r"chosen: got dtype torch.int32"):
        attend_chosen(queries, keys, values, chosen.int(), scale=0.25)
    with pytest.raises(ValueError, match="keys: got 2 KV heads, allowed is a divisor of 3"):
        attend_chosen(queries[:, :3], keys, values, chosen, scale=0.25)
    with pytest.raises(ValueError, match="values: got shape"):
        attend_chosen(queries, keys, values[:, :, 1:], chosen, scale=0.25)


@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (128, 0), (300, 0), (300, 256), (640, 128)])
@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("odds", [0.0, 0.5, 1.0])
def test_the_fast_version_equals_the_reference(tokens, first, D, odds):
    queries, keys, values = prompt(tokens, D=D)
    queries = queries[:, :, first:]
    chosen = random_choice(queries, keys, odds=odds)
    got = attend_chosen_fast(queries, keys, values, chosen, scale=D**-0.5)
    want = attend_chosen(queries, keys, values, chosen, scale=D**-0.5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert odds > 0 or not got.any()


def test_the_fast_version_reads_any_strides():
    queries, keys, values = (part.transpose(1, 2).contiguous() for part in prompt(300))
    parts = [part.transpose(1, 2) for part in (queries, keys, values)]
    chosen = random_choice(*parts[:2])
    want = attend_chosen(*parts, chosen, scale=0.25)
    got = attend_chosen_fast(*parts, chosen, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fast_version_in_half_precision(dtype):
    queries, keys, values = (part.to(dtype) for part in prompt(300))
    chosen = random_choice(queries, keys)
    got = attend_chosen_fast(queries, keys, values, chosen, scale=0.25)
    want = attend_chosen(queries, keys, values, chosen, scale=0.25)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_the_fast_version_computes_no_logits_of_other_blocks(monkeypatch):
    queries, keys, values = prompt(128 * 5 + 9, B=1, H=2, G=1)
    chosen = torch.eye(6, dtype=torch.bool).repeat(1, 2, 1, 1)
    chosen[0, 0, 5, 2:4] = True
    chosen[0, 1, 2, 2] = False
    read, attention = [], block_sparse.scaled_dot_product_attention

    def counted(query, key, *rest, **options):
        read.append((query.shape[2], key.shape[2]))
        return attention(query, key, *rest, **options)

    monkeypatch.setattr(block_sparse, "scaled_dot_product_attention", counted)
    attend_chosen_fast(queries, keys, values, chosen, scale=0.25)
    assert read == [*[(128, 128)] * 5, (9, 2 * 128 + 9), *[(128, 128)] * 4, (9, 9)]


def test_the_fast_version_reads_values_of_another_size_and_has_gradients():
    queries, keys, values = prompt(300)
    chosen = random_choice(queries, keys)
    values = values[..., :8]
    want = attend_chosen(queries, keys, values, chosen, scale=0.25)
    got = attend_chosen_fast(queries, keys, values, chosen, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    grads = []
    for attend in (attend_chosen, attend_chosen_fast):
        leaf = queries.clone().requires_grad_()
        attend(leaf, keys, values, chosen, scale=0.25).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_arguments_of_the_fast_version_that_do_not_fit_raise():
    queries, keys, values = prompt(300)
    chosen = random_choice(queries, keys)
    with pytest.raises(ValueError, match="queries: got 299 tokens for 300 keys"):
        attend_chosen_fast(queries[:, :, 1:], keys, values, chosen, scale=0.25)

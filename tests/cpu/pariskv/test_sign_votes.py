"""Compare each kernel of a step with sign votes with its reference in `kvindex.ops`.

Integers must be equal.
"""

import numpy as np
import pytest
import torch

from kvindex.cpu.kernels import lookup, numbers, query, rerank, scan, select, sign_votes, vectors
from kvindex.ops import coarse, codes, group, transform
from kvindex.ops import rerank as reranking
from kvindex.ops import select as selecting


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", numbers.KINDS, ids=str)
def test_every_number_of_16_bits_is_read_as_torch_reads_it(dtype):
    if dtype == torch.float32:
        values = torch.cat([drawn(99), torch.tensor([0.0, -0.0, 1e-40, float("inf")])])
    else:
        values = torch.arange(-(2**15), 2**15).short().view(dtype)
    out = np.empty(len(values), np.float32)
    numbers.read(values.data_ptr(), len(values), numbers.KINDS[dtype], out)
    assert torch.equal(torch.from_numpy(out).nan_to_num(7), values.float().nan_to_num(7))


@pytest.mark.parametrize("D", [3, 8, 24, 64, 80, 128])
def test_four_rows_are_multiplied_and_added_where_they_lie(D):
    rows, query, weights = drawn(9, D), drawn(D, seed=1).numpy(), drawn(4, seed=2).numpy()
    chosen = [7, 0, 7, 3]
    places = np.array([rows[r].data_ptr() for r in chosen])
    dots, sums = np.full(6, 5, np.float32), np.full(D + 2, 5, np.float32)
    vectors.four_dots(query.ctypes.data, places.ctypes.data, D, dots.ctypes.data)
    vectors.add_four(weights.ctypes.data, places.ctypes.data, D, sums.ctypes.data)
    own = rows[chosen].double().numpy()
    np.testing.assert_allclose(dots, [*(own @ query), 5, 5], atol=1e-5)
    np.testing.assert_allclose(sums, [*(5 + weights @ own), 5, 5], atol=1e-5)


def test_the_exponential_is_numpys_within_rounding():
    for x in np.linspace(-86, 0, 1000, dtype=np.float32):
        assert numbers.exp(x) == pytest.approx(np.exp(np.float64(x)), rel=4e-7)
    assert numbers.exp(np.float32(-np.inf)) == 0 == numbers.exp(np.float32(-88))
    assert numbers.exp(np.float32(0)) == 1


def test_the_logarithm_is_numpys_within_rounding():
    for x in np.geomspace(1e-37, 1e37, 1000, dtype=np.float32):
        assert numbers.log(x) == pytest.approx(np.log(np.float64(x)), rel=3e-7)
    assert numbers.log(np.float32(1)) == 0


def test_the_largest_is_found_by_integers():
    for some in (drawn(99), -drawn(33).abs(), torch.tensor([-0.0, -float("inf")])):
        assert numbers.largest(some.numpy()) == some.max()


@pytest.mark.parametrize("D", [8, 64, 80, 128])
@pytest.mark.parametrize("query_max", [1, 21, 31, 32, 127])
def test_dots_of_signs_are_sums_of_table_entries(D, query_max):
    rotated, signs = drawn(1, 1, 1, D), torch.randint(0, 256, (300, D // 8), dtype=torch.uint8)
    integers = np.empty(D, np.int64)
    query.round_query(rotated[0, 0, 0].numpy(), query_max, integers)
    assert integers.tolist() == coarse.rounded(rotated, query_max).flatten().tolist()
    digits = 1 if query_max < 32 else 2
    planes = np.empty((digits * query.GROUP, -(-D // 64)), np.uint64)
    query.put_planes(integers, planes)
    words = np.full((planes.shape[1], sign_votes.CHUNK), 2**64 - 1, np.uint64)
    dots = np.empty(sign_votes.CHUNK, np.int32)
    sign_votes.put_words(signs.data_ptr(), sign_votes.CHUNK, D // 8, words)
    sign_votes.put_dots(words, planes, integers.sum(), dots)
    table = coarse.dot_table(rotated, query_max)
    want = coarse.votes(signs[None, None, : sign_votes.CHUNK], table)
    assert dots.tolist() == want.flatten().tolist()


@pytest.mark.parametrize("D", [8, 64, 80, 128])
@pytest.mark.parametrize("query_max", [1, 21, 31])
@pytest.mark.skipif(not lookup.SERVED, reason="needs AVX2")
def test_votes_by_tables_in_registers_are_those_by_planes(D, query_max):
    rng, heads, W, n = np.random.default_rng(D), 3, -(-D // 64), 128
    integers = rng.integers(-query_max, query_max + 1, (heads, D))
    signs = rng.integers(0, 256, (n, D // 8), np.uint8)
    tables, planes = np.empty((heads, W, 16, 16), np.uint8), np.empty((heads, 6, W), np.uint64)
    totals = np.array([lookup.put_tables(integers[h], tables[h]) for h in range(heads)], np.int32)
    for h in range(heads):
        query.put_planes(integers[h], planes[h])
    words, factors = np.empty((W, n), np.uint64), rng.integers(0, 2**15, n, np.int32)
    offsets, out = rng.integers(-(2**30), 2**30, heads, np.int32), np.full((2, n), -(2**31))
    out, nibbles = out.astype(np.int32), np.empty((W, 16, 64), np.uint8)
    sign_votes.put_words(signs.ctypes.data, n, D // 8, words)
    lookup.raise_votes(words, tables, totals, factors, offsets, nibbles, out[0])
    sums, dots = integers.sum(1).astype(np.int32), np.empty(n, np.int32)
    sign_votes.raise_by_planes(words, planes, sums, factors, offsets, dots, out[1])
    assert (out[0] == out[1]).all()


def test_offsets_are_rounded_and_bounded():
    products = torch.tensor([0.0, 0.5, 1.5, -2.5, 3e30, -3e30])
    queries, scale = drawn(1, 1, 1, 64), torch.ones(1, 1)
    want = coarse.dot_offsets(products[None, None, None], queries, 21, scale, 0.1)
    unit = query.vote_unit(queries[0, 0, 0].numpy(), 1.0, 0.1, 21)
    assert [int(scan.offset_of(p, unit)) for p in products.numpy()] == want.flatten().tolist()
    assert scan.offset_of(5.0, 0.0) == 0


@pytest.mark.parametrize("n", [1, 255, 256, 9000])
@pytest.mark.parametrize("spread", [1, 40, 2**30])
def test_candidates_are_the_reference_ones(n, spread):
    generator = torch.Generator().manual_seed(n)
    votes = torch.randint(-spread, spread, (n,), generator=generator, dtype=torch.int32)
    valid = torch.rand(n, generator=generator) > 0.3
    valid[0] = True
    held = votes.masked_fill(~valid, int(select.INVALID)).numpy()
    listed, room = (np.empty(n + 2 * select.SAMPLED, np.int32) for _ in range(2))
    for limit in {1, int(valid.sum()) // 2 or 1, int(valid.sum())}:
        out = np.full(limit + 2, -7, np.int32)
        select.candidates(held, limit, listed, room, out[:-1])
        want = selecting.candidates(votes[None, None, None], torch.tensor([limit]), valid[None])
        assert out[:limit].tolist() == want.flatten().tolist()
        assert out[-1] == -7


def test_a_sample_that_misleads_costs_nothing_but_time():
    votes = np.zeros(4 * select.SAMPLED, np.int32)
    votes[::4] = 1000  # the votes that the threshold is estimated from
    listed, room = (np.empty(len(votes) + 2 * select.SAMPLED, np.int32) for _ in range(2))
    limit = 2 * select.SAMPLED
    out = np.empty(limit + 1, np.int32)
    select.candidates(votes, limit, listed, room, out)
    want = selecting.candidates(torch.from_numpy(votes)[None, None, None], torch.tensor([limit]))
    assert out[:limit].tolist() == want.flatten().tolist()


def test_a_weight_is_the_reference_one_to_the_bit():
    logs = torch.arange(2**16)
    fine = codes.log_weights(2**15 + torch.arange(rerank.STEPS), 16).numpy()
    own = [rerank.weight_of(code >> 8, code & 255, fine) for code in logs.tolist()]
    assert torch.equal(torch.tensor(own), codes.log_weights(logs, 16))


@pytest.mark.parametrize("bits", [0, 3, 5, 7])
@pytest.mark.parametrize("D", [8, 64, 80, 136])
def test_estimates_are_the_reference_ones(bits, D):
    levels, keys, queries = codes.levels(D, bits), drawn(1, 1, 60, D), drawn(1, 1, 3, D, seed=1)
    directions, norms = transform.normalize(keys)
    made = codes.encode(directions, norms, levels, block=D)
    logs = codes.log_codes(made["weights"], 16)
    want = reranking.estimate(
        queries, made["signs"], made["magnitudes"], codes.log_weights(logs, 16), levels
    )
    parts = [made["signs"], made["magnitudes"], (logs >> 8).byte(), (logs & 255).byte()]
    full = [part[:, :, :40].contiguous() for part in parts]
    rest = [part[:, :, 40:].contiguous() for part in parts]
    at = [np.array([a.data_ptr(), b.data_ptr()]) for a, b in zip(full, rest, strict=True)]
    ids, out = np.array([59, 0, 39, 40, 7], np.int32), np.empty((3, 5), np.float32)
    products = drawn(6, 3, seed=2)
    rerank.estimate(
        ids,
        *at,
        bits,
        40,
        10,
        queries[0, 0].numpy(),
        products.numpy(),
        torch.nn.functional.pad(levels, (0, max(0, 16 - len(levels)))).numpy(),
        codes.log_weights(2**15 + torch.arange(rerank.STEPS), 16).numpy(),
        out,
    )
    picked = torch.from_numpy(ids).long()
    want = want[0, 0][:, picked] + products[picked // 10].mT
    torch.testing.assert_close(torch.from_numpy(out), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["mean_share", "max_share"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_agree_as_the_reference_says(policy, softcap, heads):
    estimates, out = drawn(1, 1, heads, 500) * 400, np.empty(500, np.float32)
    want = group.agree(estimates, policy, scale=0.125, softcap=softcap)
    own = estimates[0, 0].clone().numpy()
    weights = np.empty(500, np.float32)
    rerank.agree(own, 0.125, softcap or 0.0, policy == "max_share", weights, out)
    torch.testing.assert_close(torch.from_numpy(out), want[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 200, 300])
def test_top_k_takes_the_lower_ids_of_equal_scores(k):
    scores = (drawn(300) * 3).round()
    scores[3] = -0.0
    ids, (orders, places) = np.arange(300, dtype=np.int32), np.empty((2, 301), np.int32)
    room, entries = np.empty((2, 300), np.int64)
    select.top_k(scores.numpy(), ids, k, orders, places, room, entries)
    want, positions = selecting.top_k(scores, k)
    assert [int(select.position_of(entry)) for entry in entries[:k]] == positions.tolist()
    assert [float(select.score_of(entry)) for entry in entries[:k]] == want.tolist()

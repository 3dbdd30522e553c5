"""ShadowKV: factors of its keys, chunks by their mean key, outliers that are always attended to."""

import pytest
import torch

from tests.contract import CHECKS
from tests.support.helpers import Case, all_rows, assert_well_formed, left_padding, part

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
GROUPS = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
FREQUENCIES = 100.0 ** -(torch.arange(8) / 8)


def prompt_ended(tokens, *, case=CASE, outliers=0, rope=None, valid=None, **options):
    index = case.index("shadowkv", outliers=outliers, rope=rope, **options)
    index.append(*tokens, valid=valid)
    index.end_prompt()
    return index


def side_by_side(keys):
    """Return keys `[B, G, N, D]` as matrices float64 `[B, N, G D]`."""
    return keys.double().transpose(1, 2).flatten(2)


def rotate(keys, start=0):
    """Compute the rotary embedding of keys `[..., N, 16]` at positions from `start` on, by complex
    numbers."""
    pairs = torch.complex(keys[..., :8].double(), keys[..., 8:].double())
    angles = torch.arange(start, start + keys.shape[-2])[:, None] * FREQUENCIES.double()
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1).float()


def of_rank(rank, count):
    """Return keys whose matrix has this rank, and values."""
    keys = CASE.tensor(5, 2, count, rank) @ CASE.tensor(6, 2, rank, 2 * 16)
    keys = keys.unflatten(2, (2, 16)).transpose(1, 2).contiguous()
    return keys, keys[..., :8].contiguous()


def worst(index, keys):
    """Return the largest error of a fetched key."""
    return float((all_rows(index, len(keys)).keys - keys).abs().max())


# Theory: keys from factors


@pytest.mark.parametrize("rope", [None, FREQUENCIES, FREQUENCIES[:3]], ids=["none", "all", "part"])
@pytest.mark.parametrize("rank", [32, 160])
def test_at_full_rank_keys_are_rebuilt_to_rounding(rank, rope):
    tokens = CASE.tokens(200)
    index = prompt_ended(tokens, rank=rank, rope=rope)
    assert index._prompt.tokens.shape == (2, 200, 32)
    assert 0 < worst(index, tokens[0]) < 1e-5
    assert torch.equal(all_rows(index, 2).values, tokens[1])


def test_below_full_rank_they_are_not():
    tokens = CASE.tokens(200)
    assert worst(prompt_ended(tokens, rank=31), tokens[0]) > 0.1


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_no_factors_of_that_rank_would_err_less(rank):
    """The squared error is the sum of the squared singular values that are left out."""
    tokens = CASE.tokens(200)
    rebuilt = all_rows(prompt_ended(tokens, rank=rank), 2).keys
    got = side_by_side(rebuilt - tokens[0]).square().sum((1, 2))
    values = torch.linalg.svdvals(side_by_side(tokens[0]))
    torch.testing.assert_close(got, values[:, rank:].square().sum(1), rtol=1e-5, atol=0)


def test_keys_of_low_rank_before_their_rotary_embedding_are_rebuilt():
    keys, values = of_rank(6, 120)
    keys = rotate(keys)
    assert worst(prompt_ended((keys, values), rank=6, rope=FREQUENCIES), keys) < 1e-4
    assert worst(prompt_ended((keys, values), rank=6), keys) > 0.1


def test_padding_only_moves_the_places_of_keys():
    keys, values = rotate(of_rank(20, 120)[0]), of_rank(20, 120)[1]
    valid = left_padding([30, 0], 120)
    index = prompt_ended((keys, values), rank=9, rope=FREQUENCIES, valid=valid)
    alone = prompt_ended((keys[:1, :, 30:], values[:1, :, 30:]), rank=9, rope=FREQUENCIES)
    got, want = all_rows(index, 2).keys[:1, :, 30:], all_rows(alone, 1).keys
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_outliers_and_later_tokens_keep_their_keys():
    tokens, later = CASE.tokens(200), CASE.tokens(30, seed=1)
    index = prompt_ended(tokens, rank=4, outliers=3)
    index.append(*later)
    index.end_prompt()  # the prompt is what was prompt_ended first
    rows = all_rows(index, 2).keys
    assert torch.equal(rows[:, :, 200:], later[0])
    same = (rows[:, :, :200] == tokens[0]).all(-1).unflatten(2, (25, 8))
    assert (same.all(-1) == same.any(-1)).all()
    assert (same.all(-1).sum(-1) == 3).all()
    parts = torch.nn.functional.normalize(tokens[0].unflatten(2, (25, 8)), dim=-1)
    means = torch.nn.functional.normalize(tokens[0].unflatten(2, (25, 8)).mean(3), dim=-1)
    cosines = (parts * means[:, :, :, None]).sum(-1).amin(-1)
    want = cosines.topk(3, largest=False).indices.sort().values
    assert torch.equal(same.all(-1).nonzero()[:, 2].view(2, 2, 3), want)


@pytest.mark.parametrize("options", [dict(rank=None), dict(rank=200)], ids=str)
def test_keys_stay_where_there_is_nothing_to_factorise(options):
    tokens = CASE.tokens(200)
    assert worst(prompt_ended(tokens, **options), tokens[0]) == 0
    unsealed = CASE.index("shadowkv", rank=4)
    unsealed.append(*tokens)
    assert worst(unsealed, tokens[0]) == 0


def test_factors_follow_truncate_reorder_and_reset():
    tokens = CASE.tokens(200)
    index = prompt_ended(tokens, rank=4, outliers=2)
    rows = all_rows(index, 2).keys
    index.reorder(torch.tensor([1, 0, 1]))
    assert torch.equal(all_rows(index, 3).keys, rows[[1, 0, 1]])
    index.truncate(77)
    assert torch.equal(all_rows(index, 3).keys, rows[[1, 0, 1], :, :77])
    more = CASE.tokens(9, seed=1, batch=3)
    index.append(*more)
    assert torch.equal(all_rows(index, 3).keys[:, :, 77:], more[0])
    index.reset()
    assert index.nbytes() == CASE.index("shadowkv").nbytes()
    index.append(*tokens)
    assert worst(index, tokens[0]) == 0


def test_one_row_read_by_many_gives_each_its_keys():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    index = prompt_ended(case.tokens(200), case=case, rank=4, outliers=2, rope=FREQUENCIES)
    queries = torch.cat([case.queries(seed) for seed in range(3)])
    many = index.expand_batch(3)
    together = many.search(queries, k=20)
    rows = many.fetch(together)
    for row in range(3):
        alone = index.search(queries[row : row + 1], k=20)
        assert torch.equal(together.ids[row], alone.ids[0])
        torch.testing.assert_close(rows.keys[row], index.fetch(alone).keys[0])


def test_factorising_in_blocks_changes_nothing(monkeypatch):
    tokens = CASE.tokens(100)
    rows = all_rows(prompt_ended(tokens, rank=7, rope=FREQUENCIES), 2).keys
    monkeypatch.setattr("kvindex.indexes.shadowkv.BLOCK", 13)
    again = all_rows(prompt_ended(tokens, rank=7, rope=FREQUENCIES), 2).keys
    torch.testing.assert_close(again, rows, atol=1e-4, rtol=1e-4)


# Search


def test_chunks_are_ranked_by_their_mean_key():
    keys, values = CASE.tokens(80)
    index = CASE.index("shadowkv", outliers=0)
    for piece in (slice(0, 13), slice(13, 80)):
        index.append(keys[:, :, piece], values[:, :, piece])
    means = keys.unflatten(2, (10, 8)).mean(3)
    products = (means @ CASE.queries()[..., None])[..., 0]  # [B, G, 10]
    order = products.argsort(dim=-1, descending=True)[..., :3]
    want = (order[..., None] * 8 + torch.arange(8)).flatten(2)
    hits = index.search(CASE.queries(), k=24)
    assert torch.equal(hits.ids, want)
    best = products.gather(-1, order).repeat_interleave(8, dim=-1)
    torch.testing.assert_close(hits.scores, best)


def test_outliers_have_no_part_in_the_ranking_of_other_chunks():
    """Heads have softmax weights over the chunks without the outliers, of which the largest counts.

    The outlier attracts one head. If it were in the softmax of this head, the head's weights of all
    other chunks would be tiny, and the other head would choose alone.
    """
    case = Case(q_heads=2, kv_heads=1, head_dim=16, value_dim=8, batch=1)
    keys, values = case.tokens(64)
    keys[:, :, 40:48] = 0.0
    keys[:, :, 40:48:2, 0] = 200.0  # chunk 5: opposite keys, whose mean is long
    keys[:, :, 41:48:2, 0] = -20.0
    index = case.index("shadowkv", outliers=1)
    index.append(keys, values)
    queries = case.queries()
    queries[:, 0, 0] = 5.0
    keys = keys.unflatten(2, (8, 8)).mean(3)
    others = torch.tensor([0, 1, 2, 3, 4, 6, 7])
    logits = (queries @ keys[0, 0, others].mT) * index.geometry.scale  # [B, H, chunks]
    best = others[logits.softmax(-1).amax(1)[0].topk(3).indices]
    hits = index.search(queries, k=32)
    assert set((hits.ids[0, 0] // 8).tolist()) == {5, *best.tolist()}
    alone = logits[0, 1].topk(3).indices  # what the other head would choose alone
    assert set(best.tolist()) != set(others[alone].tolist())


@pytest.mark.parametrize("padding", [None, [0, 11]])
def test_outliers_are_returned_whatever_the_query_and_take_half_at_most(padding):
    keys, values = GROUPS.tokens(80)
    keys = keys + 4 * GROUPS.tensor(9, 2, 2, 1, 16)  # only the keys of chunk 5 differ
    valid = None if padding is None else left_padding(padding, 80)
    odd = torch.arange(40, 48)[None] + torch.tensor(padding or [0, 0])[:, None]
    keys.scatter_(2, odd[:, None, ::2, None].expand(2, 2, 4, 16), -9.0)
    index = GROUPS.index("shadowkv", outliers=1)
    index.append(keys, values, valid=valid)
    for query in (GROUPS.queries(), -GROUPS.queries(), torch.full((2, 6, 16), 9.0)):
        hits = index.search(query, k=16)
        assert_well_formed(hits, index, 2, 16)
        for b in range(2):
            assert all(set(odd[b].tolist()) <= set(row) for row in hits.ids[b].tolist())
    assert not (index.search(query, k=15).ids[0, 0][:, None] == odd[0]).any()


def test_a_stale_index_keeps_to_whole_chunks_of_the_prompt():
    tokens, later = CASE.tokens(45), CASE.tokens(30, seed=1)
    index = prompt_ended(tokens, stale=True)
    before = index.search(CASE.queries(), k=80)
    index.append(*later)
    after = index.search(CASE.queries(), k=80)
    assert torch.equal(after.ids, before.ids)
    assert torch.equal(after.scores, before.scores)
    assert (after.ids[..., :40].sort().values == torch.arange(40)).all()
    assert (after.ids[..., 40:] == -1).all()
    index.truncate(20)
    index.append(*later)
    assert index.search(CASE.queries(), k=80).ids.max() == 15
    fresh = prompt_ended(tokens)
    fresh.append(*part(later, 0, 30))
    assert fresh.search(CASE.queries(), k=80).ids.max() == 74


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_small_chunks_with_outliers_keep_the_contract(check):
    check(lambda **options: GROUPS.index("shadowkv", page=2, outliers=2, **options), GROUPS)


# Bytes and options


def test_bytes_per_key():
    case = Case(q_heads=2, kv_heads=2, head_dim=128, value_dim=8, dtype=torch.bfloat16)
    index = case.index("shadowkv")
    index.append(*case.tokens(800))
    assert index.bytes_per_key() == {"stored": 32.5, "scanned": 32.5}
    index.end_prompt()
    factors = 2 * 160 / 2 + 2 * 160 * 128 / 800 + 1  # bytes of a token, of the basis, of a flag
    assert index.bytes_per_key() == {"stored": 32.5 + factors, "scanned": 32.5}
    assert index.nbytes()["codes"] == 2 * 800 * (32.5 + factors)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(page=0), "page: got 0"),
        (dict(outliers=-1), "outliers: got -1"),
        (dict(rank=0), "rank: got 0"),
        (dict(stale=None), "stale: got None, allowed is True or False"),
        (dict(rope=torch.ones(9)), "rope: got 9 numbers of torch.float32"),
        (dict(rope=torch.ones(8, dtype=torch.int64)), "rope: got 8 numbers of torch.int64"),
        (dict(rope=torch.ones(2, 2)), r"rope: got shape \[2, 2\]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("shadowkv", **options)

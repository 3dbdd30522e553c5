"""MagicPIG: the probability of being a candidate, and sums that are right on average over seeds."""

import math
from functools import lru_cache

import pytest
import torch

from kvindex.indexes.magicpig import log_chance
from tests.contract import CHECKS
from tests.support.helpers import (
    Case,
    assert_well_formed,
    join,
    left_padding,
    part,
    slow,
)

CASE = Case(q_heads=3, kv_heads=1, head_dim=8, value_dim=8)
FEW = dict(bits=2, tables=8)  # most keys are candidates of some seeds and not of others
SEEDS, N = 400, 24
SIGMAS = 4.5  # standard errors of a mean over seeds: 7 in a million per compared number
SIZES = [(k, c) for k in (1, 2, 5, 10, 15) for c in (2, 3, 9, 150)]


@lru_cache
def searched(k, *, seeds=SEEDS, case=CASE, count=N, sure=4):
    """Return ids `[S, K]` and log weights `[S, H, K]` of the same tokens and queries, over
    seeds."""
    tokens, queries = case.tokens(count), case.queries()
    found = []
    for seed in range(seeds):
        index = case.index("magicpig", seed=seed, sure=sure, **FEW)
        index.append(*tokens)
        found.append(index.search(queries, k=k))
    return torch.cat([h.ids[:, 0] for h in found]), torch.cat([h.log_weight for h in found])


def sums(ids, log_weight, case=CASE, count=N):
    """Return numerator and denominator of each head's softmax, `[S, H, Dv + 1]`, and the true `[H,
    …]`."""
    (keys, values), queries = case.tokens(count), case.queries()
    logits = (queries[0] @ keys[0, 0].T * case.head_dim**-0.5).double()  # [H, N]
    ones = torch.cat([values[0, 0].double(), torch.ones(count, 1).double()], dim=1)  # [N, Dv + 1]
    rows = ids.clamp_min(0)
    terms = (logits[:, rows].transpose(0, 1) + log_weight).exp()  # [S, H, K]
    return terms @ ones[rows], logits.exp() @ ones


def deviations(samples, truth):
    """Return by how many standard errors the mean over seeds `[S, …]` is off."""
    return (samples.mean(0) - truth).abs() / (samples.std(0) / len(samples) ** 0.5)


def cosines(case=CASE, count=N):
    """Return cosines between queries and keys without their mean, float64 `[H, N]`."""
    keys, queries = case.tokens(count)[0][0, 0].double(), case.queries()[0].double()
    keys = keys - keys.mean(0)
    return torch.nn.functional.cosine_similarity(queries[:, None], keys[None], dim=-1)


# Theory


@pytest.mark.parametrize("k", [slow(40), 10], ids=["all candidates", "some of them drawn"])
def test_numerator_and_denominator_are_right_on_average(k):
    ids, log_weight = searched(k)
    got, truth = sums(ids, log_weight)
    assert deviations(got, truth).max() < SIGMAS
    crowded = (ids >= 0).all(1).float().mean()
    assert crowded == 0 if k == 40 else crowded > 0.9


@pytest.mark.parametrize("k", [slow(40), 10])
def test_without_the_correction_they_are_not(k):
    ids, log_weight = searched(k)
    got, truth = sums(ids, log_weight.clamp_max(0))
    assert deviations(got, truth).max() > 3 * SIGMAS


@pytest.mark.slow
def test_cutting_by_score_would_break_it():
    ids, log_weight = searched(40)
    got, truth = sums(ids[:, :10], log_weight[:, :, :10])
    assert deviations(got, truth).max() > SIGMAS


def test_a_key_is_a_candidate_as_often_as_the_formula_says():
    ids, log_weight = searched(40, sure=0)
    seen = torch.zeros(SEEDS, 3, N + 1)
    seen.scatter_(
        2, ids.clamp_min(-1)[:, None].expand(-1, 3, -1) % (N + 1), log_weight.isfinite().float()
    )
    often = seen[..., :N].double().mean(0)
    chance = log_chance(cosines(), FEW["bits"], FEW["tables"]).exp()
    error = (chance * (1 - chance) / SEEDS).sqrt()
    assert ((often - chance).abs() / error).max() < SIGMAS
    assert chance.min() < 0.2
    assert chance.max() > 0.9
    wrong = log_chance(cosines(), FEW["bits"] + 1, FEW["tables"]).exp()
    assert ((often - wrong).abs() / error).max() > 3 * SIGMAS


def test_log_weights_are_those_of_the_formula():
    ids, log_weight = searched(40, seeds=5)
    want = -log_chance(cosines(), FEW["bits"], FEW["tables"])
    for row, weights in zip(ids, log_weight.double(), strict=True):
        for slot, token in enumerate(row.tolist()):
            heads = weights[:, slot]
            if token < 0:
                assert (heads == -math.inf).all()
            elif token < 4:
                assert (heads == 0).all()
            else:
                shown = heads.isfinite()
                assert shown.any()
                assert (heads - want[:, token])[shown].abs().max() < 1e-4


@pytest.mark.parametrize(("bits", "tables"), SIZES, ids=str)
def test_the_chance_is_the_binomial_tail(bits, tables):
    cosines = torch.tensor([-1 + 1e-6, -0.9, -0.5, -0.1, 0.0, 0.3, 0.8, 0.99, 1.0]).double()
    got = log_chance(cosines, bits, tables).tolist()
    for cosine, log in zip(cosines.tolist(), got, strict=True):
        meet = (1 - math.acos(cosine) / math.pi) ** bits
        terms = [
            math.comb(tables, j) * meet**j * (1 - meet) ** (tables - j)
            for j in range(2, tables + 1)
        ]
        assert log == pytest.approx(math.log(math.fsum(terms)), rel=1e-7, abs=1e-7)


def test_the_draw_takes_each_candidate_as_often():
    """Over queries with too many candidates, no token is preferred or left out."""
    case = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=8)
    index = case.index("magicpig", bits=1, tables=150, sure=0)  # all are candidates
    index.append(*case.tokens(N))
    found = torch.cat([index.search(case.queries(seed), k=6).ids for seed in range(SEEDS)])
    often = torch.bincount(found.flatten(), minlength=N) / SEEDS
    error = (6 / N * (1 - 6 / N) / SEEDS) ** 0.5
    assert (often - 6 / N).abs().max() < SIGMAS * error


# What a search returns


def test_each_head_sees_its_own_candidates():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    index = case.index("magicpig", bits=3, tables=20)
    index.append(*case.tokens(60), valid=left_padding([0, 9], 60))
    hits = index.search(case.queries(), k=64)
    assert_well_formed(hits, index, 2, 64)
    center = index._learned["center"]
    asked = index._hashes(case.queries().reshape(2, 2, 3, 16))
    drawn = (asked[:, :, :, None] == index._codes["hashes"][:, :, None]).sum(-1) >= 2
    assert center.shape == (2, 2, 16)
    for b, first in enumerate([0, 9]):
        for h in range(6):
            ids = hits.ids[b, h // 3]
            seen = ids[hits.log_weight[b, h].isfinite()].tolist()
            want = set(drawn[b, h // 3, h % 3].nonzero()[:, 0].tolist())
            sure = set(range(first, first + 4))
            assert set(seen) == {i for i in want if i >= first} | sure


def test_hashes_are_signs():
    index = CASE.index("magicpig", bits=3, tables=5)
    index.append(*CASE.tokens(N))
    keys = CASE.tokens(N)[0] - index._learned["center"][:, :, None]
    positive = (keys @ index._directions >= 0).unflatten(-1, (5, 3)).int()
    want = positive[..., 0] + 2 * positive[..., 1] + 4 * positive[..., 2]
    assert torch.equal(index._codes["hashes"].int(), want)


def test_hashing_in_blocks_changes_nothing(monkeypatch):
    index, tokens = CASE.index("magicpig", **FEW), CASE.tokens(N)
    index.append(*tokens)
    before = index.search(CASE.queries(), k=40)
    monkeypatch.setattr("kvindex.indexes.magicpig.BLOCK", 100)
    again = CASE.index("magicpig", **FEW)
    again.append(*tokens)
    assert torch.equal(again._codes["hashes"], index._codes["hashes"])
    assert torch.equal(again.search(CASE.queries(), k=40).ids, before.ids)


def test_later_tokens_are_hashed_around_the_first_center():
    index = CASE.index("magicpig", **FEW)
    index.append(*CASE.tokens(N))
    center = index._learned["center"].clone()
    index.append(*CASE.tokens(N, seed=1))
    assert torch.equal(index._learned["center"], center)
    assert (index.search(CASE.queries(), k=80).ids >= N).any()


def test_a_stale_index_never_returns_what_follows_the_prompt():
    prompt, later = CASE.tokens(N), CASE.tokens(N, seed=1)
    stale, frozen = CASE.index("magicpig", stale=True, **FEW), CASE.index("magicpig", **FEW)
    stale.append(*part(prompt, 0, 10))
    stale.append(*part(prompt, 10, N))
    stale.end_prompt()
    stale.append(*later)
    stale.end_prompt()
    frozen.append(*part(prompt, 0, 10))
    frozen.append(*part(prompt, 10, N))
    got, want = (index.search(CASE.queries(), k=15) for index in (stale, frozen))
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.log_weight, want.log_weight)
    stale.truncate(5)
    stale.append(*later)
    assert stale.search(CASE.queries(), k=15).ids.max() < 5
    stale.reset()
    stale.append(*join(prompt, later))
    assert stale.search(CASE.queries(), k=80).ids.max() >= N


def test_one_row_read_by_many_draws_as_it_does_alone():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    index = case.index("magicpig", bits=3, tables=20)
    index.append(*case.tokens(60))
    queries = torch.cat([case.queries(seed) for seed in range(4)])
    together = index.expand_batch(4).search(queries, k=20)
    for row in range(4):
        alone = index.search(queries[row : row + 1], k=20)
        assert torch.equal(together.ids[row], alone.ids[0])
        torch.testing.assert_close(together.log_weight[row], alone.log_weight[0])


def test_a_stale_index_without_a_prompt_finds_nothing():
    index = CASE.index("magicpig", stale=True)
    index.end_prompt()
    index.append(*CASE.tokens(N))
    hits = index.search(CASE.queries(), k=3)
    assert_well_formed(hits, index, 1, 3)
    assert (hits.ids == -1).all()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_too_many_candidates_keep_the_contract(check):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    if "ties" in check.__name__ or "needle" in check.__name__:
        pytest.skip("which of too many candidates is drawn is left to chance")
    check(lambda **options: case.index("magicpig", **{"bits": 4, **options}), case)


# Bytes and options


def test_bytes_per_key():
    case = Case(q_heads=2, kv_heads=2, head_dim=128, value_dim=8)
    index = case.index("magicpig")
    index.append(*case.tokens(10))
    learned = 2 * 128 * 4 + 1
    assert index.nbytes()["codes"] == 2 * 10 * 300 + learned + 128 * 1500 * 4
    assert index.bytes_per_key()["scanned"] == 300


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(bits=0), "bits: got 0"),
        (dict(bits=16), "bits: got 16, allowed is 1 to 15"),
        (dict(tables=1), "tables: got 1, allowed is an integer of at least 2"),
        (dict(sure=-1), "sure: got -1"),
        (dict(seed=2**63), "seed: got 9223372036854775808"),
        (dict(stale=1), "stale: got 1, allowed is True or False"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("magicpig", **options)

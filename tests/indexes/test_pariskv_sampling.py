"""Rows that ParisKV samples: their weights, when a sample changes, and which options raise."""

import math
from dataclasses import replace

import pytest
import torch

from kvindex.ops import priority
from kvindex.pariskv import sampling
from tests.support.helpers import Case, left_padding, slow

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=16)
TOKENS, K = 700, 24


@pytest.fixture(scope="module")
def index():
    index = CASE.index("pariskv:sampling=priority:refine_factor=4:least_candidates=1")
    index.append(*CASE.tokens(TOKENS))
    return index


def seeds_of(index):
    return sampling.seeds(index.inputs(CASE.queries())[0])


def logits(queries):
    """Return the logits of all keys, float64 `[H, N]`."""
    keys = CASE.tokens(TOKENS)[0][0].double().repeat_interleave(3, 0)
    return (keys @ queries[0].double()[:, :, None])[..., 0] * CASE.index("exact").geometry.scale


@pytest.mark.parametrize("count", [300, slow(1500)])
def test_sums_over_sampled_rows_are_those_of_all_keys_on_average(index, count, monkeypatch):
    """Numerator and denominator of each head are within 6 standard errors of those of all keys.

    Each of the 12 means fails with probability 2e-9 for a new seed.
    """
    queries, found = 2 * CASE.queries(), []
    weights, values = logits(queries).softmax(-1), CASE.tokens(TOKENS)[1][0, :, :, 0].double()
    values = values.repeat_interleave(3, 0)
    for seed in range(count):
        seeds = priority.hashed(torch.arange(2) + 2 * seed)[None, :, None]
        monkeypatch.setattr(sampling, "seeds", lambda tokens, seeds=seeds: seeds)
        hits = index.search(queries, k=K)
        ids = hits.ids[0].repeat_interleave(3, 0)
        weighted = weights.gather(1, ids) * hits.log_weight[0].double().exp()
        found.append(torch.stack([weighted.sum(1), (weighted * values.gather(1, ids)).sum(1)]))
    found = torch.stack(found)
    off = found.mean(0) - torch.stack([weights.sum(1), (weights * values).sum(1)])
    assert (off.abs() <= 6 * found.std(0) / math.sqrt(count)).all()


def test_tempered_weights_are_a_power_of_these(index):
    tempered = CASE.index("pariskv:refine_factor=4:least_candidates=1")
    tempered.append(*CASE.tokens(TOKENS))
    hits, own = (some.search(CASE.queries(), k=K) for some in (index, tempered))
    assert torch.equal(own.ids, hits.ids)
    assert (hits.log_weight > 0).any()
    torch.testing.assert_close(own.log_weight, hits.log_weight * (1 - K**-0.5))


def test_the_coverage_of_candidates_is_estimated(index):
    """The estimate uses logits from codes of few bits, whose error is about 0.1 nat here."""
    queries = 2 * CASE.queries()
    told = index.candidate_coverage(queries, k=K)
    with torch.autocast("cpu"):
        assert torch.equal(index.candidate_coverage(queries, k=K), told)
    ids = sampling.find(*index.inputs(queries), K)[0][0].repeat_interleave(3, 0)
    weights = logits(queries).softmax(-1).gather(1, ids.clamp_min(0)) * (ids >= 0)
    torch.testing.assert_close(told[0].double(), weights.sum(1), atol=0.1, rtol=0)
    assert (told < 0.95).any()
    assert (index.candidate_coverage(queries, k=TOKENS) == 1).all()
    with pytest.raises(
        ValueError, match="sampling: got 'none', allowed is 'priority' or 'tempered'"
    ):
        CASE.index("pariskv:preset=fast").candidate_coverage(queries, k=K)
    with pytest.raises(
        ValueError, match=r"len\(index\): got 0, allowed is an integer of at least 1"
    ):
        CASE.index("pariskv:preset=sampled").candidate_coverage(queries, k=K)


def test_candidates_hold_everything_where_there_is_no_valid_token():
    case = replace(CASE, batch=2)
    index = case.index("pariskv:preset=sampled")
    index.append(*case.tokens(30), valid=left_padding([30, 5], 30))
    assert (index.candidate_coverage(case.queries(), k=K)[0] == 1).all()
    assert (index.candidate_coverage(case.queries(), k=K)[1] <= 1).all()


def test_with_as_many_rows_as_keys_all_are_sure(index):
    hits = index.search(CASE.queries(), k=TOKENS)
    assert torch.equal(hits.ids.sort(-1).values[0, 0], torch.arange(TOKENS))
    assert (hits.log_weight == 0).all()


def test_a_step_samples_as_the_one_before_until_tokens_come(index):
    first, again = (index.search(CASE.queries(), k=K) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    near = CASE.queries() + 0.01 * CASE.queries(1)
    same = (index.search(near, k=K).ids[..., None] == first.ids[..., None, :]).any(-1)
    assert same.float().mean() > 0.9
    before = seeds_of(index)
    index.append(*CASE.tokens(1, seed=3))
    assert (seeds_of(index) != before).all()
    index.truncate(TOKENS)
    assert torch.equal(seeds_of(index), before)


@pytest.mark.slow
def test_rows_stay_over_the_steps_of_a_block_and_errors_are_alike_only_there(index, monkeypatch):
    """Adjacent queries have a cosine of .95, and the random numbers change every 4 steps."""
    steps = torch.arange(160)
    best = CASE.index("pariskv:preset=fast")
    best.append(*CASE.tokens(TOKENS))
    kept, errors = follow(index, monkeypatch, steps // 4)
    anew, _ = follow(index, monkeypatch, steps)
    chosen = torch.stack([best.search(queries, k=K).ids[0] for queries in stream(len(steps))])
    within = steps[1:] % 4 > 0
    assert again(kept)[within].mean() > again(chosen).mean() > 2 * again(anew).mean()
    pairs = torch.stack([errors[:-1], errors[1:]])
    assert torch.corrcoef(pairs[:, within].flatten(1))[0, 1] > 0.5
    # 4 standard errors, of 39 pairs times 2 KV heads; the heads of a group share a sample
    assert abs(torch.corrcoef(pairs[:, ~within].flatten(1))[0, 1]) < 4 / math.sqrt(78)


def stream(steps):
    """Yield queries `[1, H, D]` for each step."""
    queries = CASE.queries()
    for step in range(steps):
        queries = 0.95 * queries + math.sqrt(1 - 0.95**2) * CASE.queries(step + 1)
        yield 2 * queries


def follow(index, monkeypatch, blocks):
    """Return ids `[T, G, K]` for a stream of queries, and the denominators' errors `[T, H]`.

    `blocks`, int64 `[T]`, selects the random numbers of each step.
    """
    found, errors = [], []
    for block, queries in zip(blocks.tolist(), stream(len(blocks)), strict=True):
        seeds = priority.hashed(torch.arange(2) + 2 * block)[None, :, None]
        monkeypatch.setattr(sampling, "seeds", lambda tokens, seeds=seeds: seeds)
        hits = index.search(queries, k=K)
        weights = logits(queries).softmax(-1).gather(1, hits.ids[0].repeat_interleave(3, 0))
        found.append(hits.ids[0])
        errors.append((weights * hits.log_weight[0].double().exp()).sum(1) - 1)
    return torch.stack(found), torch.stack(errors)


def again(ids):
    """Return the fraction of each step's rows that the previous step also read, `[T - 1]`."""
    return (ids[1:, ..., None] == ids[:-1, :, None]).any(-1).float().mean((1, 2))


def test_heads_and_layers_sample_by_themselves(index):
    other = CASE.index("pariskv:preset=sampled")
    other.append(*CASE.tokens(TOKENS, seed=5))
    seeds = torch.cat([seeds_of(index), seeds_of(other)]).flatten()
    assert len(set(seeds.tolist())) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sampling=some", "sampling: got 'some', allowed is"),
        ("preset=scan:sampling=priority", "coarse: got 'none' with sampling='priority'"),
        ("preset=paper:sampling=priority", "coarse: got 'tiered_votes' with sampling='priority'"),
        ("sampling=priority:group=union", "allowed is 'mean_share' or 'max_share'"),
        (
            "sampling=priority:candidates_per=head",
            "candidates_per: got 'head' with sampling='priority'",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(line, words):
    with pytest.raises(ValueError, match=words):
        CASE.index(f"pariskv:{line}")


def test_the_best_rows_are_taken_where_a_coverage_is_asked_for(index):
    """Candidates are also the best by votes: the rows are those of an index that does not
    sample."""
    plain = CASE.index("pariskv:preset=fast:sign_decoder=regression:beta=.005")
    plain.append(*CASE.tokens(TOKENS))
    mine, want = (one.search(CASE.queries(), k=400, coverage=0.5) for one in (index, plain))
    assert torch.equal(mine.ids, want.ids)
    assert torch.equal(mine.coverage, want.coverage)
    assert mine.log_weight is None
    assert ((mine.ids >= 0).sum(-1) < 400).all()


def test_sampled_rows_are_not_sampled_again():
    with pytest.raises(ValueError, match="whose rows have weights already"):
        CASE.index("pariskv:preset=sampled+sample")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["tempered", "priority"])
def test_the_attention_that_tempered_rows_represent_is_too_little_and_no_less_than_the_bound(
    sampling,
):
    """Estimate a softmax sum from 16 sampled rows of 300 random keys, with one head.

    Means over 400 sequences are within 6 of their standard errors.
    """
    case = Case(q_heads=1, kv_heads=1, head_dim=64, value_dim=64, batch=400)
    index = case.index("pariskv", sampling=sampling)
    index.append(*case.tokens(300))
    queries = case.queries()
    hits = index.search(queries, k=16)
    logits = (case.tokens(300)[0] @ queries[:, 0, :, None])[:, 0, :, 0] * case.head_dim**-0.5
    weights = logits.softmax(-1).gather(-1, hits.ids[:, 0].clamp_min(0))
    lacks = 1 - (weights * hits.log_weight[:, 0].exp()).sum(-1).double()
    error = float(lacks.std()) / math.sqrt(len(lacks))
    if sampling == "priority":
        assert abs(float(lacks.mean())) <= 6 * error
    else:
        assert 6 * error <= float(lacks.mean()) <= 1 - (15.5 / 300) ** 0.25 + 6 * error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # rows, and candidates of 130,000 keys
        ({}, {1: 1024, 100: 1600, 128: 2048, 129: 2056, 256: 3072, 1024: 9216, 90_000: 130_000}),
        ({"refine_factor": 1}, {128: 1024, 1025: 1025, 2000: 2000}),
        ({"beta": 0.1}, {128: 13_000, 1497: 13_000, 1498: 13_008}),
        ({"preset": "fast"}, {128: 2600, 1024: 4096}),  # rows are not sampled
    ],
)
def test_numbers_of_candidates(options, expected):
    config = CASE.index("pariskv", **options).config
    assert {k: config.candidates(130_000, k) for k in expected} == expected
    assert config.candidates(300, 200) == 300
    assert config.most_candidates(130_000, 1025) == config.candidates(130_000, 1025)

"""Sampled rows: `k` of them, with known probabilities, and unbiased sums."""

import dataclasses

import pytest
import torch

from kvindex.indexes.exact import Exact
from kvindex.ops.sampling import inclusion, systematic
from kvindex.wrappers import Sample, Wrapper
from tests.support.helpers import Case, assert_well_formed, mostly_slow

CASE = Case(q_heads=6, kv_heads=2, head_dim=32, value_dim=32, batch=2)
COUNT = 400


def sampled(case=CASE, name="exact", count=COUNT, strength=2.0, **options):
    keys, values = case.tokens(count)
    index = Sample(case.index(name), **options)
    index.append(keys * strength, values)
    return index


@pytest.mark.parametrize("name", ["exact", "pariskv:preset=fast", "pariskv:preset=paper"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_k_rows_of_which_the_best_are_sure(name, share):
    index = sampled(name=name, share=share)
    hits = index.search(CASE.queries(), k=40)
    assert_well_formed(hits, index, 2, 40)
    assert ((hits.ids >= 0).sum(-1) >= 39).all()  # float32 probabilities may sum to just below 40
    best = index.inner.search(CASE.queries(), k=8 * 40).ids[..., : 40 - int(40 * share)]
    assert (best[..., None] == hits.ids[:, :, None]).any(-1).all()
    sure = hits.log_weight[..., : best.shape[-1]]
    assert (sure == 0).all()
    assert (hits.log_weight[hits.log_weight > float("-inf")] >= 0).all()
    again = index.search(CASE.queries(), k=40)
    assert torch.equal(hits.ids, again.ids)
    assert torch.equal(hits.log_weight, again.log_weight)


def test_fewer_tokens_than_rows_are_all_taken():
    index = sampled(count=30, share=0.5)
    hits = index.search(CASE.queries(), k=40)
    assert (hits.ids[..., :30].sort(-1).values == torch.arange(30)).all()
    assert (hits.log_weight[..., :30] == 0).all()
    assert (hits.ids[..., 30:] == -1).all()


@pytest.mark.parametrize("softcap", [None, 1.0, 30.0])
def test_slots_without_a_row_have_no_weight(softcap):
    """With one head per group, scores are plain products, and a softcap makes `-inf` finite."""
    case = Case(q_heads=2, kv_heads=2, softcap=softcap, batch=2)
    index = Sample(case.index("exact"), share=0.5)
    index.append(*case.tokens(50))
    hits = index.search(case.queries(), k=80)
    assert_well_formed(hits, index, 2, 80)
    assert (hits.ids[..., :50].sort(-1).values == torch.arange(50)).all()
    assert (hits.log_weight[..., :50] == 0).all()


def test_an_empty_index_gives_nothing():
    hits = Sample(CASE.index("exact")).search(CASE.queries(), k=5)
    assert (hits.ids == -1).all()
    assert (hits.log_weight == float("-inf")).all()


@pytest.mark.parametrize("drawn", [1, 7, 30])
@pytest.mark.parametrize("strength", [0.1, 1.0, 6.0])
def test_chances_sum_to_the_sample_size_and_none_exceeds_1(drawn, strength):
    generator = torch.Generator().manual_seed(0)
    logits = (strength * torch.randn(2, 3, 100, generator=generator)).sort(-1, True).values
    logits[0, 0, 60:] = float("-inf")
    chances = inclusion(logits, 20, drawn)
    assert (chances[..., :20] == 1).all()
    assert (chances[0, 0, 60:] == 0).all()
    rest = chances[..., 20:]
    assert (rest <= 1).all()
    torch.testing.assert_close(rest.sum(-1), torch.full((2, 3), float(drawn)))
    inside = (rest > 0) & (rest < 1)
    ratio = (rest.log() - logits[..., 20:])[1, 1][inside[1, 1]]
    assert ratio.numel() == 0 or (ratio.max() - ratio.min()) < 1e-3, "in proportion to exp"


def test_sampling_follows_the_chances():
    """Over 400 shifted orders, the frequency of each row equals its probability within 1/400."""
    chances = torch.tensor([[[0.5, 0.25, 0.75, 0.1, 0.9, 0.5]]]).repeat(1, 1, 1)
    seen = torch.zeros(6)
    for step in range(400):
        # the probability of an additional first row shifts the points at which rows are sampled
        shifted = torch.cat([torch.full((1, 1, 1), step / 400), chances], -1)
        ids = torch.tensor([[[0, 5, 3, 4, 1, 6, 2]]])
        got = systematic(ids, shifted)
        assert int(got[..., 1:].sum()) in (2, 3, 4)
        seen += got[0, 0, 1:]
    torch.testing.assert_close(seen / 400, chances[0, 0], rtol=0, atol=0.006)


@pytest.mark.parametrize("name", mostly_slow(["exact", "pariskv:preset=fast"], "exact"))
def test_weighted_rows_give_the_softmax_of_all_rows_on_average(name):
    """Over 300 token orders, the sums of exp(logit) and of exp(logit) · value are those of all
    rows."""
    case = Case(q_heads=3, kv_heads=1, head_dim=32, value_dim=4)
    keys, values = case.tokens(120)
    keys, queries = keys * 1.5, case.queries()
    g = case.index("exact").geometry
    weights = (g.scale * queries @ keys[:, 0].mT).double().exp()[0]  # [H, N]
    want = torch.cat([weights @ values[0, 0].double(), weights.sum(-1, keepdim=True)], -1)
    got, generator = [], torch.Generator().manual_seed(0)
    for _ in range(300):
        order = torch.randperm(120, generator=generator)
        index = Sample(case.index(name), share=0.7, pool=12)
        index.append(keys[:, :, order], values[:, :, order])
        hits = index.search(queries, k=10)
        rows = index.fetch(hits)
        some = (g.scale * queries @ rows.keys[:, 0].mT).double() + hits.log_weight
        some = some.exp()[0]
        parts = [some @ rows.values[0, 0].double(), some.sum(-1, keepdim=True)]
        got.append(torch.cat(parts, -1))
    mean, spread = torch.stack(got).mean(0), torch.stack(got).std(0)
    # 4.5 standard errors: the 15 means fail with probability 1e-4 together for a new seed
    assert ((mean - want).abs() <= 4.5 * spread / 300**0.5).all()
    best = case.index(name)
    best.append(keys, values)
    unweighted = weights.gather(-1, best.search(queries, k=10).ids[0].expand(3, -1)).sum(-1)
    assert (unweighted < 0.6 * want[:, -1]).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"share": 0}, "share: got 0"),
        ({"share": 1.5}, "share: got 1.5"),
        ({"pool": 1}, "pool: got 1"),
    ],
)
def test_sizes_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Sample(CASE.index("exact"), **options)


@pytest.mark.parametrize("group", ["union", "mean_query"])
def test_scores_that_are_no_weights_are_refused(group):
    with pytest.raises(ValueError, match=f"inner: got an index with group='{group}'"):
        Sample(CASE.index("exact", group=group))
    alone = dataclasses.replace(CASE, q_heads=2)
    Sample(alone.index("exact", group=group))  # groups of one head need no policy


def test_an_index_without_a_policy_for_groups_is_refused():
    with pytest.raises(ValueError, match="inner: got an index with group=None, allowed group"):
        Sample(CASE.index("dsa"))


def test_a_mass_is_refused():
    with pytest.raises(
        ValueError, match=r"coverage: got 0\.9, allowed is None, because rows are sampled"
    ):
        sampled().search(CASE.queries(), k=5, coverage=0.9)


@pytest.mark.parametrize("name", ["magicpig", "retroinfer"])
def test_rows_that_have_weights_already_are_refused(name):
    for spec in (f"{name}+sample", f"{name}+reuse+sample"):
        with pytest.raises(ValueError, match=r"inner: got .*, whose rows have weights already"):
            Case(head_dim=64).index(spec)


def test_rows_of_an_index_of_others_that_have_weights_are_refused(monkeypatch):
    index = sampled()
    search = type(index.inner)._search
    monkeypatch.setattr(
        type(index.inner),
        "_search",
        lambda self, q, k: dataclasses.replace(search(self, q, k), log_weight=torch.zeros(2, 6, k)),
    )
    with pytest.raises(ValueError, match=r"inner: got .*, whose rows have weights already"):
        index.search(CASE.queries(), k=5)


class Attending(Exact):
    """Records the arguments of `warm_up` and of attention."""

    def warm_up(self, *, k, tokens):
        self.warmed = k

    def attend(self, queries, resident, *, k):
        raise AssertionError("the rows that were drawn are attended to, and no others")

    def attend_hits(self, queries, hits, resident):
        self.attended = queries.shape, hits.ids.shape


@pytest.mark.parametrize("between", [lambda index: index, Wrapper], ids=["bare", "wrapped"])
def test_warming_up_samples_rows_once_whatever_is_between(between):
    inner = Attending(q_heads=6, kv_heads=2, head_dim=32)
    index = Sample(between(inner), pool=4)
    index.append(*CASE.tokens(50))
    index.warm_up(k=5, tokens=100)
    assert (inner.warmed, inner.attended) == (20, ((2, 6, 32), (2, 2, 5)))

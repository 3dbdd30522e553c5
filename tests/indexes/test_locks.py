"""LOCKS: factors of a page, their quantization, and the attention weight that ranks pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.indexes import locks
from kvindex.indexes.locks import factors
from tests.support.helpers import Case

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def masses(keys, queries, page, scale):
    """Return the logarithm of the mean `exp(scale q·k)` of each page, float64 `[B, G, pages]`."""
    logits = scale * (keys.double() @ queries.double()[..., None])[..., 0]
    pages = logits.split(page, dim=-1)
    return torch.stack([x.logsumexp(-1) - torch.tensor(x.shape[-1]).log() for x in pages], -1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), rank=st.integers(1, 8), count=st.integers(1, 8))
def test_factors_are_the_best_of_their_rank(seed, rank, count):
    """Their error is that of a truncated singular value decomposition around the mean."""
    keys = torch.randn(1, 1, 1, 8, 16, generator=torch.Generator().manual_seed(seed))
    present = (torch.arange(8) < count).reshape(1, 1, 1, 8, 1)
    found = factors(keys, present, rank)
    rebuilt = found["center"][..., None, :] + found["coefficients"].mT @ found["basis"]
    off = (rebuilt - keys).masked_fill(~present, 0).square().sum()
    real = keys[0, 0, 0, :count].double()
    lengths = torch.linalg.svdvals(real - real.mean(0))
    torch.testing.assert_close(off, lengths[rank:].square().sum(), rtol=1e-6, atol=1e-9)
    gram = found["basis"] @ found["basis"].mT
    assert (gram - torch.eye(gram.shape[-1])).tril(-1).abs().max() < 1e-6


def test_equal_keys_have_no_direction():
    keys = torch.randn(1, 1, 2, 1, 16).expand(1, 1, 2, 8, 16)
    present = torch.ones(1, 1, 2, 8, 1, dtype=torch.bool)
    found = factors(keys, present, 4)
    assert not found["basis"].any()
    assert not found["coefficients"].any()


@pytest.mark.parametrize("pages", [1, 12])
def test_few_pages_of_all_heads_are_factorized_at_a_time(monkeypatch, pages):
    def codes():
        index = CASE.index("locks", page=4)
        index.append(*CASE.tokens(50))
        return index.search(CASE.queries(), k=24).scores

    want, seen = codes(), []
    monkeypatch.setattr(locks, "FACTORIZED", pages)
    whole = locks.factors
    monkeypatch.setattr(
        locks,
        "factors",
        lambda keys, *rest: seen.append(keys[..., 0, 0].numel()) or whole(keys, *rest),
    )
    torch.testing.assert_close(codes(), want)
    assert max(seen) <= max(pages, 4)  # at least one page of each of two heads in two sequences


def page_scores(index, queries, count):
    hits = index.search(queries, k=count)
    scores = torch.empty(hits.scores.shape).scatter_(-1, hits.ids, hits.scores)
    return scores[..., :: index.unit]


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_a_page_scores_what_its_keys_receive(scale):
    """At full rank, except for quantization: the coarser the codes, the larger the error."""
    keys, values = CASE.tokens(60)
    index = CASE.index("locks", page=8, rank=8, scale=scale)
    index.append(keys, values)
    got = scale * page_scores(index, CASE.queries(), 60)
    want = masses(keys, CASE.queries(), 8, scale).float()
    norms = CASE.queries().norm(dim=-1).amax()
    assert (got - want).abs().max() < scale * norms * 0.6  # 0.6: a key's error in its direction
    assert (got - want).abs().mean() < scale * norms * 0.06
    center = masses(keys.unfold(2, 8, 8).mean(-1), CASE.queries(), 1, scale).float()
    assert (got - want).abs().mean() < (center - want[..., : center.shape[-1]]).abs().mean() / 2


def test_error_falls_with_rank():
    case = Case(q_heads=2, kv_heads=2, head_dim=64, value_dim=8)
    tokens, queries = case.tokens(640), case.queries()
    want = masses(tokens[0], queries, 16, 1.0).float()
    off = []
    for rank in (1, 4, 8, 15):
        index = case.index("locks", rank=rank, scale=1.0)
        index.append(*tokens)
        off.append((page_scores(index, queries, 640) - want).square().mean())
    assert off == sorted(off, reverse=True)


def test_one_outstanding_key_makes_its_page_the_best():
    """The mean key of the page would hide such a key."""
    keys, values = CASE.tokens(80)
    queries = CASE.queries()
    keys = keys / 16
    keys[:, :, 37] = queries
    index = CASE.index("locks", page=8)
    index.append(keys, values)
    hits = index.search(queries, k=8)
    assert torch.equal(hits.ids, torch.arange(32, 40).expand_as(hits.ids))


def test_pages_of_one_token_are_exact_to_rounding():
    """A page's center, in 8 bits, is its key."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    for group in ("mean_share", "max_share", "mean_query"):
        index, exact = case.index("locks", page=1, group=group), case.index("exact", group=group)
        for each in (index, exact):
            each.append(*case.tokens(40))
        got, want = (each.search(case.queries(), k=40) for each in (index, exact))
        got, want = (torch.empty(2, 2, 40).scatter_(-1, h.ids, h.scores) for h in (got, want))
        torch.testing.assert_close(got, want, atol=0.06, rtol=0.02)


def test_bytes_of_a_page():
    case = Case(q_heads=2, kv_heads=2, head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = case.index("locks")
    index.append(*case.tokens(64))
    basis, coefficients, center = 8 * (64 + 16), 8 * (16 + 4), 128 + 16
    assert index.bytes_per_key()["scanned"] == (basis + coefficients + center) / 16


@pytest.mark.parametrize("options", [dict(page=0), dict(rank=0), dict(group="x")])
def test_options_out_of_range_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}: got {value!r}"):
        CASE.index("locks", **options)

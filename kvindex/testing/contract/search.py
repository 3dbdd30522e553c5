"""Checks of the method `search` of an index."""

from __future__ import annotations

import torch

from kvindex.testing.cases import Case
from kvindex.testing.compare import (
    assert_none,
    assert_same_hits,
    assert_same_rows,
    assert_well_formed,
)
from kvindex.testing.contract.common import K, Make, N, filled, searched


def check_slots_are_exactly_k(make: Make, case: Case) -> None:
    """A search returns `k` ids per KV head for every `k`, and not all of them are -1 (unused)."""
    index = filled(make, case.tokens(N))
    for k in (1, K, N, N + 7):
        hits = searched(index, case, k=k)
        assert (hits.ids[..., 0] >= 0).all(), "a search finds something"
        assert ((hits.ids >= 0).sum(-1) <= N).all()


def check_a_needle_is_found(make: Make, case: Case) -> None:
    """A search finds a key that equals the query, if all other keys have much smaller norms."""
    unit = make().unit  # number of tokens that a search selects together
    count, k = (N, K) if unit == 1 else ((17 // unit + 3) * unit, unit)
    keys, values = case.tokens(count)
    queries = case.queries().reshape(case.batch, case.kv_heads, -1, case.head_dim)
    keys = keys / 16
    keys[:, :, 17] = queries[:, :, 0]
    if unit > 1:
        keys[:, :, -unit:] -= queries[:, :, :1] / 2  # the opposite of the query prefers this unit
    index = filled(make, case.of_keys(keys, values))
    same = queries[:, :, :1].expand_as(queries).flatten(1, 2)
    hits = index.search(same, k=k)
    sampled = hits.log_weight is not None and bool((hits.log_weight > 0).any())
    if sampled and case.softcap is not None:
        return  # softcap makes logits similar, so a sample may omit the key
    missing = (hits.ids != 17).all(-1)
    assert not missing.any(), (
        f"row 17, whose key equals the query, is among k = {k} of {count} rows, "
        f"got rows {hits.ids[missing][0].tolist()}"
    )
    if not index.scattered:
        hits = index.search(-same, k=k)
        assert_none("the opposite of the key does not find row 17", hits.ids == 17, hits)


def check_ties_go_to_the_lower_id(make: Make, case: Case) -> None:
    """Among tokens with equal scores, a search returns those with the lowest ids.

    Equal keys have equal scores, unless the index samples tokens.
    """
    keys, values = case.tokens(N)
    index = filled(make, case.of_keys(keys[:, :, :1].expand_as(keys), values))
    searched(index, case)
    zeros = filled(make, case.of_keys(torch.zeros_like(keys), values))
    hits = zeros.search(case.queries(), k=K)
    used = hits.ids >= 0
    sampled = hits.log_weight is not None and bool((hits.log_weight > 0).any())
    if not sampled:
        other = hits.scores != hits.scores[..., :1]
        assert_none("equal keys have equal scores", used & other, hits)
        rows = torch.arange(K, device=used.device)
        assert_none(f"rows 0 to {K - 1} are found in this order", used & (hits.ids != rows), hits)


def check_searches_are_deterministic(make: Make, case: Case) -> None:
    """Searches with equal tokens and queries return equal hits, bit by bit."""
    tokens = case.tokens(N)
    keys = torch.cat([tokens[0][:, :, : N // 2]] * 2, dim=2)  # every key occurs twice
    tokens = case.of_keys(keys, tokens[1])
    first, second = filled(make, tokens), filled(make, tokens)
    hits = searched(first, case)
    assert_same_hits(searched(first, case), hits)
    assert_same_hits(searched(second, case), hits)


def check_zero_keys_and_queries_give_no_nan(make: Make, case: Case) -> None:
    """Keys or queries of zeros give finite scores."""
    keys, values = case.tokens(N)
    keys[:, :, ::3] = 0
    keys[:, :, 1::3, :8] = 0
    index = filled(make, case.of_keys(keys, values))
    searched(index, case)
    hits = index.search(torch.zeros_like(case.queries()), k=K)
    assert_well_formed(hits, index, case.batch, K)
    used = hits.scores[hits.ids >= 0]
    assert used.isfinite().all()


def check_empty_index(make: Make, case: Case) -> None:
    """A search in an empty index finds nothing, and every other call works."""
    index = make()
    assert len(index) == 0
    hits = searched(index, case, k=3)
    assert (hits.ids == -1).all()
    rows = index.fetch(hits)
    assert rows.keys.shape == (case.batch, case.kv_heads, 3, case.head_dim)
    assert rows.values.shape == (case.batch, case.kv_heads, 3, case.value_dim)
    assert not rows.keys.any()
    assert not rows.values.any()
    index.truncate(0)
    index.reset()
    keys, values = case.tokens(0)
    index.append(keys, values)
    assert len(index) == 0


def check_one_token(make: Make, case: Case) -> None:
    """A search in an index of one token finds this token. All other ids in the result are -1."""
    tokens = case.tokens(1)
    index = filled(make, tokens)
    hits = searched(index, case, k=3)
    assert (hits.ids == torch.tensor([0, -1, -1], device=hits.ids.device)).all()
    rows = index.fetch(hits)
    assert_same_rows("fetched keys", rows.keys[:, :, :1], tokens[0])
    assert not rows.keys[:, :, 1:].any()

"""The attention weight that tokens get from queries, against a loop over the queries."""

import pytest
import torch

from kvindex.bases import eviction
from kvindex.bases.eviction import attention_received
from tests.support.helpers import Case

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_only_known_queries_and_visible_tokens_count(monkeypatch, at_once):
    """Some queries are padding, one comes before all tokens, and some ids are padding."""
    monkeypatch.setattr(eviction, "LOGITS", at_once)
    geometry, generator = CASE.index("h2o").geometry, torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 6, 16, generator=generator)
    keys = torch.randn(2, 2, 7, 16, generator=generator)
    ids = torch.tensor([2, 3, 5, 6, 8, 9, -1]).expand(2, 2, 7)
    positions = torch.tensor([0, 2, 4, 6, 8, 9])  # token 0 is not among the ids
    known = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]], dtype=torch.bool)
    want = torch.zeros(2, 2, 7)
    for b, h, r in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(6)).tolist():
        seen = (ids[b, h // 2] >= 0) & (ids[b, h // 2] <= positions[r])
        if known[b, r] and seen.any():
            logits = geometry.scale * (keys[b, h // 2, seen] @ queries[b, h, r])
            want[b, h // 2, seen] += logits.softmax(0)
    found = attention_received(geometry, queries, positions, known, keys, ids)
    torch.testing.assert_close(found, want)

"""The compiled search with a limit of the error finds the rows of the one in plain torch."""

import pytest
import torch

import kvindex
from kvindex.core.protocol import ErrorLimit


def pair(batch, length, head_dim=32, **options):
    """Return two indexes with the same keys, compiled and in plain torch, and queries."""
    torch.manual_seed(length)
    sizes = dict(q_heads=6, kv_heads=2, head_dim=head_dim)
    made = [kvindex.create("pariskv", **sizes, **options, backend=name) for name in BACKENDS]
    keys, values = torch.randn(2, batch, 2, length, head_dim)
    for index in made:
        index.append(keys, values)
    return *made, torch.randn(batch, 6, head_dim) * 2


BACKENDS = "cpu", "torch"


@pytest.mark.parametrize("sampling", ["tempered", "priority"])
@pytest.mark.parametrize("variance", [10.0, 0.3, 0.03, 0.003, 0.0])
@pytest.mark.parametrize("length", [40, 700, 3000])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_rows_and_weights(batch, length, variance, sampling):
    compiled, plain, queries = pair(batch, length, sampling=sampling)
    resident = torch.randn(batch, 6) + 3
    for lse in (None, resident):
        limit = ErrorLimit(torch.full((batch, 2), variance), lse)
        found, expected = (
            each.search_within(queries, k=300, limit=limit) for each in (compiled, plain)
        )
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.log_weight, expected.log_weight, atol=1e-4, rtol=1e-4)


def test_limits_of_several_sequences():
    compiled, plain, queries = pair(3, 900)
    limit = ErrorLimit(torch.tensor([[0.01, 1.0], [0.1, 0.0], [5.0, 0.05]]))
    found, expected = (
        each.search_within(queries, k=200, limit=limit) for each in (compiled, plain)
    )
    assert torch.equal(found.ids, expected.ids)
    assert len({*(found.ids >= 0).sum(-1).flatten().tolist()}) > 2


def test_a_search_for_a_fixed_number_follows():
    """The arrays for a limit do not stay in the arguments of the next search."""
    compiled, plain, queries = pair(1, 900)
    compiled.search_within(queries, k=200, limit=ErrorLimit(torch.ones(1, 2)))
    assert torch.equal(compiled.search(queries, k=90).ids, plain.search(queries, k=90).ids)

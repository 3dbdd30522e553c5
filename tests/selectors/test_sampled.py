"""`SampledSelector` against its formula, written with loops."""

import pytest
import torch

from kvindex.selectors import BLOCK, OracleSelector, SampledSelector
from kvindex.selectors.base import kept_always, smallest_set


def test_the_formula():
    torch.manual_seed(0)
    queries, keys = 3 * torch.randn(1, 4, 300, 16), torch.randn(1, 2, 640, 16)
    first, selector = 3 * BLOCK, SampledSelector(0.7, queries=4)
    found = selector.choose(queries, selector.summarize(keys), first, scale=0.3)
    want = kept_always(3, 6, 3).expand(1, 4, -1, -1).clone()
    for head in range(4):
        for block in range(3):
            own, weights = 3 + block, torch.zeros(3 + block)
            for place in (31, 63, 95, 127):
                query = queries[0, head, min(block * BLOCK + place, 299)]
                softmax = (0.3 * keys[0, head // 2, : own * BLOCK] @ query).softmax(0)
                weights += softmax.view(own, BLOCK).sum(1) / 4
            want[0, head, block, :own] |= smallest_set(weights, 0.7)
    assert torch.equal(found, want)


def test_all_queries_are_the_exact_weights():
    torch.manual_seed(0)
    queries, keys = 3 * torch.randn(2, 4, 256, 16), torch.randn(2, 2, 768, 16)
    exact, sampled = OracleSelector(0.8), SampledSelector(0.8, queries=128)
    summaries = exact.summarize(keys)
    want = exact.choose(queries, summaries, 512, scale=0.3)
    assert torch.equal(sampled.choose(queries, summaries, 512, scale=0.3), want)


@pytest.mark.parametrize("queries", [0, 3, 256])
def test_the_number_of_queries_divides_a_block(queries):
    with pytest.raises(ValueError, match=f"queries: got {queries}"):
        SampledSelector(queries=queries)

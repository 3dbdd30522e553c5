"""An append that was begun ends on an unchanged index, or raises an error."""

import pytest
import torch

import kvindex
from tests.support.helpers import Case, hits_of

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64, batch=2)


@pytest.mark.parametrize("codec", ["plain", "int4"])
@pytest.mark.parametrize("spec", kvindex.names())
def test_an_append_does_not_end_on_as_many_other_tokens(spec, codec):
    """Codes made with the center of the first tokens would be decoded with another center."""
    index, fresh = (CASE.index(spec, row_codec=codec) for _ in range(2))
    others = CASE.tokens(40, seed=2)
    index.append(*CASE.tokens(40))
    end = index.start_append(*CASE.tokens(20, seed=1))
    index.truncate(0)
    for one in (index, fresh):
        one.append(*others)
    with pytest.raises(ValueError, match="append: the index was changed after start_append"):
        end()
    hits = hits_of(torch.arange(40).expand(2, 2, -1))
    assert len(index) == 40
    assert torch.equal(index.fetch(hits).keys, fresh.fetch(hits).keys)

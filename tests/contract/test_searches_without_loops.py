"""No index loops over heads or sequences in a search, except FAISS, which has no batch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvindex
from tests.support.helpers import Case, part

NAMES = kvindex.names()
PROMPT, LATER = 400, 80
SMALL = {
    **dict(retroinfer=dict(block=32), clusterkv=dict(block=32, per_cluster=8)),
    **dict(squeezed=dict(block=32), ctkvr=dict(rho=32), magicpig=dict(bits=4, tables=16)),
    **{name: dict(budget=64) for name in ("h2o", "snapkv", "streaming", "triattention")},
    **{name: dict(page=8) for name in ("quest", "arkvale", "infllm", "icecache")},
}
"""Options with which a few tokens use the same operations as many tokens."""
MANY = 9
"""Number of heads or sequences instead of one: a loop would call at least 8 more operations."""
COPIES = 3
"""Allowed additional copies: a view for one head may be a copy for several heads."""


class Counted(TorchDispatchMode):
    """Count torch's operations."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operations(name, kv_heads, batch):
    """Count the operations of one search after a prompt and further tokens."""
    case = Case(q_heads=2 * kv_heads, kv_heads=kv_heads, head_dim=16, value_dim=8, batch=batch)
    index, tokens = case.index(name, **SMALL.get(name, {})), case.tokens(PROMPT + LATER)
    queries = case.tensor(9, batch, 2 * kv_heads, PROMPT + LATER, 16)
    index.observe_queries(queries[:, :, :PROMPT], torch.arange(PROMPT))
    index.append(*part(tokens, 0, PROMPT))
    index.end_prompt()
    index.observe_queries(queries[:, :, PROMPT:], torch.arange(PROMPT, PROMPT + LATER))
    index.append(*part(tokens, PROMPT, PROMPT + LATER))
    index.search(queries[:, :, -1], k=16)
    with Counted() as counted:
        index.search(queries[:, :, -1], k=16)
    return counted.calls


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("faiss-")])
@pytest.mark.parametrize("heads_and_rows", [(MANY, 1), (1, MANY)])
def test_a_search_asks_for_as_many_operations_whatever_the_heads_and_rows(name, heads_and_rows):
    assert operations(name, *heads_and_rows) <= operations(name, 1, 1) + COPIES


def test_a_loop_over_heads_is_noticed():
    pytest.importorskip("faiss")
    assert operations("faiss-flat", MANY, 1) >= operations("faiss-flat", 1, 1) + MANY - 1

"""Every index accepts padding at any position: hits are those of the same tokens without padding.

Learned parameters and statistics are also the same: padded keys and queries count in none.
"""

import pytest
import torch

from kvindex.core.capability import capability
from kvindex.core.protocol import Hits, ObservesQueries
from kvindex.testing.cases import Case, left_padding
from kvindex.testing.compare import ROUNDED, assert_same_hits
from kvindex.testing.contract.common import K, N, searched
from tests.contract.test_contract import SPECS

CASE = Case(q_heads=6, kv_heads=2, batch=3)
WINDOW, PROMPT = 22, 30
"""PROMPT is the number of tokens of the prompt. Those from `WINDOW` on come after `end_prompt`."""
BY_POSITION = {"pariskv", "pariskv:preset=sampled"}
"""These indexes sample rows with noise that depends on the position of a row."""
TIERED = "pariskv:preset=fast:coarse=tiered_votes:center=0"
"""This index counts keys per centroid, although it encodes whole blocks."""
FEW = (
    *("h2o:budget=12", "infllm:page=4:representatives=1"),
    *("doublesparsity:channels=2", "squeezed:sparsity=.7", "ctkvr"),
)
"""Indexes that choose a few rows, representatives or coordinates by the queries."""


def real_tokens(right: int = 0):
    """Return flags bool `[B, N]`: the prompt has padding on the left, in between, and on the
    right."""
    real = left_padding([0, 4, 8], N)
    for row in range(3):
        real[row, 12 + row : 15 + row] = real[row, 33 : 35 + row] = False
        real[row, PROMPT - row * right : PROMPT] = False
    return real


def found_alone(name, tokens, queries, places, k):
    """Search one sequence without its padding; return hits with the padded sequence's ids."""
    alone, ends = CASE.index(name), [int((places < end).sum()) for end in (WINDOW, PROMPT)]
    fed(alone, tokens, queries, None, *ends)
    hits = alone.search(CASE.queries()[:1], k=k)
    ids = torch.where(hits.ids >= 0, places[hits.ids.clamp_min(0)], hits.ids)
    return Hits(ids, hits.scores)


def fed(index, tokens, queries, real, window=WINDOW, prompt=PROMPT):
    """Append a prompt with its queries; the tokens of its window are appended after the prompt."""
    flags = (None, None) if real is None else (real[:, :window], real[:, window:])
    keys, values = tokens
    if queries is not None and capability(index, ObservesQueries) is not None:
        index.observe_queries(queries[:, :, :prompt], torch.arange(prompt))
    index.append(keys[:, :, :window], values[:, :, :window], valid=flags[0])
    if queries is not None:
        index.end_prompt()
    index.append(keys[:, :, window:], values[:, :, window:], valid=flags[1])


@pytest.mark.parametrize(
    ("name", "observed"),
    [(name, False) for name in [*SPECS, TIERED] if name not in BY_POSITION]
    + [(name, True) for name in FEW],
)
def test_a_row_with_padding_is_as_without(name, observed):
    real = real_tokens(right=int(observed))
    keys, values = CASE.tokens(N)
    queries = CASE.tensor(5, 3, 6, N, 16).masked_fill(~real[:, None, :, None], 0)
    asked = CASE.queries()[:1].expand(3, -1, -1)
    index = CASE.index(name)
    padded = keys.masked_fill(~real[:, None, :, None], float("nan")), values
    fed(index, padded, queries if observed else None, real)
    for k in (K, N):
        hits = index.search(asked, k=k)
        assert not index.fetch(hits).keys.isnan().any()
        for row in range(3):
            places = real[row].nonzero()[:, 0]
            own = keys[row : row + 1, :, places], values[row : row + 1, :, places]
            seen = queries[row : row + 1, :, places] if observed else None
            want = found_alone(name, own, seen, places, k)
            assert_same_hits(
                Hits(hits.ids[row : row + 1], hits.scores[row : row + 1]), want, close=ROUNDED
            )


def test_the_comparison_can_fail():
    real = real_tokens()
    tokens = CASE.tokens(N)
    index = CASE.index("exact")
    fed(index, tokens, None, None)
    places = real[1].nonzero()[:, 0]
    own = tokens[0][1:2, :, places], tokens[1][1:2, :, places]
    want = found_alone("exact", own, None, places, N)
    hits = searched(index, CASE, k=N)
    with pytest.raises(AssertionError):
        assert_same_hits(Hits(hits.ids[1:2], hits.scores[1:2]), want, close=ROUNDED)

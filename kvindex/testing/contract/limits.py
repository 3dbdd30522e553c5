"""Checks of an index with very large numbers in keys and queries, and with a very large `k`.

Up to a limit, a search must give valid results. Above the limit, a call must raise an error.
"""

from __future__ import annotations

from typing import Any

import torch

from kvindex.core.check import LARGEST, LIMITS, MOST_ROWS
from kvindex.testing.cases import Case
from kvindex.testing.compare import assert_well_formed, raises
from kvindex.testing.contract.common import K, Make, N, filled

BEYOND = (2 * LARGEST, 1e20, 3e38, float("inf"), float("nan"))


def check_the_largest_numbers_give_scores(make: Make, case: Case) -> None:
    """Keys and queries with numbers as large as 2^48 give finite scores."""
    largest = min(LARGEST, LIMITS.get(case.dtype, LARGEST))
    keys, values = case.tokens(N)
    signs, queries = keys.sign() * largest, case.queries().sign() * largest
    signs[:, :, ::3] = keys[:, :, ::3]
    index = filled(make, case.of_keys(signs, values))
    index.observe_queries(queries[:, :, None], torch.tensor([N - 1], device=case.device))
    index.end_prompt()
    index.append(*case.tokens(5, seed=1))
    hits = index.search(queries, k=K)
    assert_well_formed(hits, index, case.batch, K)
    assert hits.scores[hits.ids >= 0].isfinite().all(), "scores are finite"


def check_numbers_beyond_are_refused_by_name(make: Make, case: Case) -> None:
    """NaN, infinity and numbers above 2^48 raise ValueError with the name of the argument."""
    keys, values = case.tokens(N)
    index = filled(make, (keys, values), check=True)
    allowed = "allowed is a finite number of at most 2^48"
    for number in BEYOND:
        wrong, queries = keys.clone(), case.queries()
        wrong[-1, 0, 7, 3], queries[-1, -1, 5] = -number, number
        with raises(ValueError, says=("keys: got", allowed)):
            index.append(wrong, values)
        with raises(ValueError, says=("queries: got", allowed)):
            index.search(queries, k=3)
    assert len(index) == N, "a refused append adds nothing"


def check_a_k_out_of_range_is_refused(make: Make, case: Case) -> None:
    """`search` raises ValueError unless `k` is an integer from 1 to 2^24."""
    index, wrong = filled(make, case.tokens(4)), (0, -1, 2.0, True, MOST_ROWS + 1)
    for k in wrong:
        given: Any = k
        with raises(ValueError, says=("k: got", "allowed")):
            index.search(case.queries(), k=given)

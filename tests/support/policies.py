"""Helpers of the tests of policies."""

import pytest
import torch

from tests.contract import CHECKS

STILL = {
    "check_truncate_then_append_equals_fresh",
    "check_reorder_moves_rows",
    "check_append_in_chunks_equals_one_call",
    "check_searches_are_deterministic",
    "check_zero_keys_and_queries_give_no_nan",
    "check_reset_forgets_everything",
    "check_encode_is_deterministic_and_changes_nothing",
}

STILL_HOLD = [check for check in CHECKS if check.__name__ in STILL]
"""Checks of the contract that also hold for an index that has evicted rows."""


def kept(index, case, b, h):
    """Return the ids that a search finds with as many slots as it may use, ascending."""
    ids = index.search(case.queries(batch=index._batch), k=99).ids[b, h]
    return sorted(i for i in ids.tolist() if i >= 0)


def assert_bad_signals_are_refused(index, queries):
    """Check errors for wrong signals. `queries` `[B, H, N, D]` would be right ones."""
    positions = torch.arange(queries.shape[2])
    with pytest.raises(ValueError, match="queries: got shape"):
        index.observe_queries(queries[:1], positions)
    with pytest.raises(ValueError, match="positions: got shape"):
        index.observe_queries(queries, positions[:-1])

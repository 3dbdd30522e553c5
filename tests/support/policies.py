"""What the tests of policies share."""

import pytest
import torch

from tests.contract import CHECKS

STILL = {
    "check_truncate_then_append_equals_fresh",
    "check_reorder_moves_rows",
    "check_append_in_chunks_equals_one_piece",
    "check_searches_are_deterministic",
    "check_zero_keys_and_queries_give_no_nan",
    "check_reset_forgets_everything",
    "check_encode_is_deterministic_and_changes_nothing",
}

STILL_HOLD = [check for check in CHECKS if check.__name__ in STILL]
"""Of the contract, what holds too once a policy has chosen rows and lets go of others."""


def kept(index, case, b, h):
    """The ids that a search finds with all the slots it may want, ascending."""
    ids = index.search(case.queries(batch=index._batch), k=99).ids[b, h]
    return sorted(i for i in ids.tolist() if i >= 0)


def assert_bad_signals_are_refused(index, queries):
    """queries: `[B, H, N, D]` that the index could be told of."""
    positions = torch.arange(queries.shape[2])
    with pytest.raises(ValueError, match="queries: got shape"):
        index.observe_queries(queries[:1], positions)
    with pytest.raises(ValueError, match="positions: got shape"):
        index.observe_queries(queries, positions[:-1])

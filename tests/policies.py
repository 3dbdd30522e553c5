"""What the tests of policies share."""

import pytest
import torch

from kvindex.layer import AttentionLayer
from tests.contract import CHECKS
from tests.helpers import Case

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


def assert_follows_exact_in_a_layer(case: Case, name, **options):
    """Prompt, steps, updates of the window: with these options the outputs are those of `exact`."""
    outputs = []
    queries = 2 * case.tensor(500, case.batch, case.q_heads, 60, case.head_dim)
    tokens = case.tokens(60)
    for index in (case.index("exact"), case.index(name, **options)):
        layer = AttentionLayer(index, k=60, sink=3, local=4, update_every=5, full_threshold=0)
        cuts = [slice(0, 30), *(slice(i, i + 1) for i in range(30, 60))]
        steps = [layer.step(*(t[:, :, cut] for t in (queries, *tokens))) for cut in cuts]
        outputs.append(torch.cat(steps, dim=2))
    torch.testing.assert_close(outputs[1], outputs[0])


def assert_bad_signals_are_refused(index, queries):
    """queries: `[B, H, N, D]` that the index could be told of."""
    positions = torch.arange(queries.shape[2])
    with pytest.raises(ValueError, match="queries: got shape"):
        index.observe(queries[:1], positions)
    with pytest.raises(ValueError, match="positions: got shape"):
        index.observe(queries, positions[:-1])

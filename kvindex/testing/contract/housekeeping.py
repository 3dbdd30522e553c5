"""Checks of methods of an index such as `truncate`, `reorder`, `reset` and `end_prompt`."""

from __future__ import annotations

import torch

from kvindex.core.protocol import Hits
from kvindex.testing.cases import Case, join, left_padding, part
from kvindex.testing.compare import (
    ROUNDED,
    all_rows,
    assert_none,
    assert_same_hits,
    assert_same_rows,
)
from kvindex.testing.contract.common import K, Make, N, filled, searched


def check_truncated_ids_never_return(make: Make, case: Case) -> None:
    """Tokens that `truncate` has removed are never found again, and take no memory."""
    tokens = case.tokens(N)
    index = filled(make, tokens)
    index.truncate(N + 5)
    assert len(index) == N
    index.truncate(13)
    assert len(index) == 13
    hits = searched(index, case, k=N)
    assert_none("ids are below the new length, 13", hits.ids >= 13, hits)
    short = filled(make, part(tokens, 0, 13))
    assert index.nbytes() == short.nbytes()
    index.truncate(0)
    assert (searched(index, case).ids == -1).all()


def check_truncate_then_append_equals_fresh(make: Make, case: Case) -> None:
    """After `truncate` and `append`, an index equals a new index with the same tokens."""
    first, other, rest = case.tokens(13), case.tokens(20, seed=1), case.tokens(N - 13, seed=2)
    index = filled(make, first, other)
    index.truncate(13)
    index.append(*rest)
    fresh = filled(make, first, rest)
    assert_same_hits(searched(index, case), searched(fresh, case), close=ROUNDED)
    assert_same_rows("keys", all_rows(index, case.batch).keys, join(first, rest)[0])


def check_truncate_into_padding(make: Make, case: Case) -> None:
    """If only padding remains after `truncate`, a search finds nothing until the next append."""
    keys, values = case.tokens(N)
    valid = left_padding([10] * case.batch, N, case.device)
    index = make()
    index.append(keys, values, valid=valid)
    index.truncate(6)
    assert (searched(index, case).ids == -1).all()
    index.append(keys[:, :, 6:], values[:, :, 6:], valid=valid[:, 6:])
    again = make()
    again.append(keys, values, valid=valid)
    assert_same_hits(searched(index, case), searched(again, case), close=ROUNDED)


def check_reorder_moves_rows(make: Make, case: Case) -> None:
    """`reorder` moves, repeats and removes sequences of the batch with all their contents."""
    B, tokens, more = case.batch, case.tokens(30), case.tokens(10, seed=1)
    for order in ([B - 1], [*range(B)][::-1], [0, B - 1, 0, B - 1]):
        rows = torch.tensor(order, device=case.device)
        index = filled(make, tokens)
        index.reorder(rows)
        assert_same_rows("values", all_rows(index, len(order)).values, tokens[1][rows])
        want = filled(make, (tokens[0][rows], tokens[1][rows]))
        for after in (None, (more[0][rows], more[1][rows])):
            if after is not None:
                index.append(*after)
                want.append(*after)
            hits = searched(index, case, batch=len(order))
            assert_same_hits(hits, searched(want, case, batch=len(order)), close=ROUNDED)


def check_a_batch_equals_its_rows(make: Make, case: Case) -> None:
    """In a batch, a search finds the same tokens as in a separate index for each sequence."""
    tokens = case.tokens(N, batch=3)
    index = filled(make, tokens)
    hits = searched(index, case, batch=3)
    rows = index.fetch(hits)
    for b in range(3):
        one = slice(b, b + 1)
        single = filled(make, (tokens[0][one], tokens[1][one]))
        want = single.search(case.queries(batch=3)[one], k=K)
        assert_same_hits(Hits(hits.ids[one], hits.scores[one]), want, close=ROUNDED)
        rows_alone = single.fetch(Hits(hits.ids[one], hits.scores[one]))
        assert_same_rows("fetched keys", rows.keys[one], rows_alone.keys)


def check_reset_forgets_everything(make: Make, case: Case) -> None:
    """After `reset` the index equals a new one: no tokens, batch size or learned parameters."""
    index = make()
    keys, values = case.tokens(N, batch=2)
    index.append(keys, values, valid=left_padding([3, 7], N, case.device))
    index.reset()
    assert len(index) == 0
    assert index.nbytes() == make().nbytes()
    again = case.tokens(N, seed=1, batch=3)
    index.append(*again)
    want = searched(filled(make, again), case, batch=3)
    assert_same_hits(searched(index, case, batch=3), want)


def check_nbytes_counts_rows_and_grows(make: Make, case: Case) -> None:
    """After each append, `nbytes` reports the exact number of bytes of the stored keys and values.

    The number of bytes that it reports for codes never becomes smaller with an append.
    """
    index, tokens = make(), case.tokens(N)
    assert index.nbytes().keys() >= {"codes", "rows"}
    sizes = [index.nbytes()]
    for start in range(0, N, 8):
        index.append(*part(tokens, start, start + 8))
        sizes.append(index.nbytes())
    numbers = case.head_dim + (0 if case.value_in_key else case.value_dim)
    row = case.batch * case.kv_heads * numbers * tokens[0].element_size()
    assert [size["rows"] for size in sizes] == [8 * step * row for step in range(6)]
    codes = [size["codes"] for size in sizes]
    assert codes == sorted(codes)
    assert all(isinstance(size, int) for size in sizes[-1].values())


def check_signals_disturb_nothing(make: Make, case: Case) -> None:
    """Calls such as `end_prompt` and `observe_queries` do not change the stored keys and values."""
    index, tokens = make(), case.tokens(N)
    index.append(*part(tokens, 0, 30))
    index.end_prompt()
    index.mark_boundary()
    index.observe_tokens(torch.arange(N, device=case.device).expand(case.batch, -1), first=0)
    queries = case.queries()[:, :, None]
    index.observe_queries(queries, torch.tensor([29], device=case.device))
    index.append(*part(tokens, 30, N))
    searched(index, case)
    assert_same_rows("keys", all_rows(index, case.batch).keys, tokens[0])

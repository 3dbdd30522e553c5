"""Checks of the methods `append`, `encode` and `fetch` of an index."""

from __future__ import annotations

from itertools import pairwise

import torch

from kvindex.core.protocol import Hits
from kvindex.testing.cases import Case, left_padding, part
from kvindex.testing.compare import (
    ROUNDED,
    all_rows,
    assert_same_hits,
    assert_same_rows,
    assert_same_snapshot,
    hits_of,
    snapshot,
)
from kvindex.testing.contract.common import K, Make, N, filled, searched


def check_fetch_returns_the_appended_rows(make: Make, case: Case) -> None:
    """`fetch` returns keys and values as they were appended, and zeros for unused slots."""
    tokens = case.tokens(N)
    for store in ("device", "host"):
        index = filled(make, part(tokens, 0, 23), part(tokens, 23, 24), store=store)
        index.append(*part(tokens, 24, N))
        rows = all_rows(index, case.batch)
        assert_same_rows("keys", rows.keys, tokens[0])
        assert_same_rows("values", rows.values, tokens[1])
        generator = torch.Generator().manual_seed(1)
        shape = (case.batch, case.kv_heads, 11)
        ids = torch.randint(-1, N, shape, generator=generator).to(case.device)
        ids[..., 3] = -1
        rows = index.fetch(hits_of(ids))
        assert (rows.keys.dtype, rows.keys.device) == (case.dtype, index.geometry.device)
        for name, got, table in zip(
            ("keys", "values"), (rows.keys, rows.values), tokens, strict=True
        ):
            row = ids.clamp_min(0)[..., None].expand(-1, -1, -1, table.shape[-1])
            want = table.gather(2, row).masked_fill((ids < 0)[..., None], 0)
            assert_same_rows(f"fetched {name}", got, want)


def check_encode_is_deterministic_and_changes_nothing(make: Make, case: Case) -> None:
    """`encode` returns the codes that `append` stores, and does not change the index."""
    tokens = case.tokens(N)
    index = filled(make, tokens)
    before = snapshot(index, case.queries())
    first, second = index.encode(tokens[0]), index.encode(tokens[0])
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name])
        stored = index.state_dict().get(f"codes.{name}")
        if stored is not None:
            assert torch.equal(first[name], stored.to(first[name].device)), (
                "append stores the codes"
            )
    assert_same_snapshot(snapshot(index, case.queries()), before)


def check_append_in_chunks_equals_one_call(make: Make, case: Case) -> None:
    """A search finds the same tokens, however they were divided into calls of `append`."""
    tokens = case.tokens(N)
    whole = filled(make, part(tokens, 0, 5), part(tokens, 5, N))
    cuts = [0, 5, 6, 7, 20, N]
    parts = [part(tokens, start, stop) for start, stop in pairwise(cuts)]
    chunked = filled(make, *parts)
    assert len(chunked) == len(whole) == N
    assert chunked.nbytes() == whole.nbytes()
    assert_same_hits(searched(chunked, case), searched(whole, case), close=ROUNDED)


def check_padding_changes_nothing_but_ids(make: Make, case: Case) -> None:
    """With padding on the left, a search finds the same tokens, and no padded token.

    The positions of the tokens are larger by the amount of padding.
    """
    pads = [4 * (b + 1) for b in range(case.batch)]
    keys, values = case.tokens(N)
    hole = left_padding(pads, N, case.device)
    keys = keys.masked_fill(~hole[:, None, :, None], float("nan"))
    index = make()
    index.append(keys[:, :, :30], values[:, :, :30], valid=hole[:, :30])
    index.append(keys[:, :, 30:], values[:, :, 30:])
    assert len(index) == N
    for k in (K, N):
        hits = searched(index, case, k=k)
        rows = index.fetch(hits)
        assert not rows.keys.isnan().any(), "padding is never returned"
        for b, pad in enumerate(pads):
            single = make()
            single.append(keys[b : b + 1, :, pad:30], values[b : b + 1, :, pad:30])
            single.append(keys[b : b + 1, :, 30:], values[b : b + 1, :, 30:])
            want = single.search(case.queries()[b : b + 1], k=k)
            got = Hits(hits.ids[b : b + 1], hits.scores[b : b + 1])
            assert_same_hits(got, want, close=ROUNDED, shift=pad)


def check_nothing_but_padding_is_as_good_as_empty(make: Make, case: Case) -> None:
    """A search finds nothing as long as the index contains only padding."""
    keys, values = case.tokens(N)
    index = make()
    index.append(keys, values, valid=left_padding([N] * case.batch, N, case.device))
    assert len(index) == N
    assert (searched(index, case).ids == -1).all()
    index.append(keys[:, :, :1], values[:, :, :1])
    assert (searched(index, case).ids[..., 0] == N).all()
    mixed, pads = make(), [N] + [0] * (case.batch - 1)
    mixed.append(keys, values, valid=left_padding(pads, N, case.device))
    found = searched(mixed, case).ids
    assert (found[0] == -1).all(), "a sequence without valid tokens finds nothing"
    assert (found[1:, ..., 0] >= 0).all()

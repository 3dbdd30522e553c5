"""Checks of the method `attend` of an index, which searches and computes attention."""

from __future__ import annotations

import torch

from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import Attends
from kvindex.core.resident import ResidentRows
from kvindex.ops.attention import attend
from kvindex.testing.cases import Case, Tokens, left_padding
from kvindex.testing.contract.common import K, Make, N

RESIDENT = 3


def check_attention_where_few_tokens_are_valid(make: Make, case: Case) -> None:
    """`attend` computes the attention to sink, window and the tokens that a search finds.

    The check also covers indexes without valid tokens, and indexes with fewer than `k` valid
    tokens.
    """
    if make().capability(Attends) is None:
        return
    others = [0] * (case.batch - 1)
    for count, pads in (
        (1, [1] * case.batch),
        (N, [N] * case.batch),
        (N, [N - 1] * case.batch),
        (N, [N, *others]),
        (K - 1, [0, *others]),
    ):
        index = make()
        keys, values = case.tokens(count)
        index.append(keys, values, valid=left_padding(pads, count, case.device))
        for resident in (RESIDENT, 0):
            _assert_attends_to_hits(index, case, case.tokens(resident, seed=1))


def _assert_attends_to_hits(index: BaseIndex, case: Case, tokens: Tokens) -> None:
    """Compare `attend` with `search`, `fetch` and attention to the fetched rows.

    `tokens` are the keys and values of sink and window.
    """
    g, (keys, values) = index.geometry, tokens
    resident = ResidentRows(g, case.batch, RESIDENT + 1)
    resident.add(keys, values, None)
    queries = case.queries()
    hits = index.search(queries, k=K)
    rows = index.fetch(hits)
    bias = torch.zeros(hits.ids.shape, device=g.device).masked_fill(hits.ids < 0, float("-inf"))
    bias = bias.repeat_interleave(g.group_size, dim=1)
    if hits.log_weight is not None:
        bias = bias + hits.log_weight
    bias = torch.cat([bias, bias.new_zeros(*bias.shape[:2], keys.shape[2])], dim=2)
    output, lse = attend(
        queries,
        torch.cat([rows.keys, keys], dim=2),
        torch.cat([rows.values, values], dim=2),
        scale=g.scale,
        softcap=g.softcap,
        bias=bias,
        return_lse=True,
    )
    found = index.attend(queries, resident, k=K)
    assert torch.equal(found.found.long(), (hits.ids >= 0).sum(-1)), "`found` counts the hits"
    # kernels may add float32 numbers in another order than torch, and they round only the output to
    # the index's dtype
    close = 1e-4 if g.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.lse, lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.output, output, rtol=close, atol=close)

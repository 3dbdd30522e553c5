"""The largest number of tokens that an index can have, and of rows that a search can return."""

from contextlib import nullcontext

import pytest
import torch

from kvindex.core.resident import ResidentRows
from kvindex.ops import codes
from kvindex.ops import select as reference
from kvindex_cuda.memory.layout import MAX_TOKENS
from kvindex_cuda.ops import rerank, select
from tests.cuda import emulator
from tests.cuda.devices import DEVICES
from tests.cuda.pariskv.test_backend import assert_found
from tests.cuda.pariskv.test_capture import attention
from tests.support.helpers import Case, hits_of, left_padding

K = 2048

EVERY = MAX_TOKENS // K
"""One in this many tokens stands out for a KV head.

The longest index has as many of them as a search returns.
"""

PIECE = 2**17
"""Number of tokens that are generated at a time."""

LENGTHS = (0, 1, 255, 256, 257, 5_000, 100_001, 2**20 + 1, MAX_TOKENS)


@pytest.mark.parametrize("device", DEVICES)
def test_as_many_rows_as_a_search_may_want(device):
    case = Case(q_heads=2, kv_heads=1, head_dim=64, batch=2, device=device)
    count = 2200 if device == "cpu" else 60_000
    # the second sequence has fewer than that
    valid = left_padding([0, count - 1900], count, device)
    with emulator.emulated() if device == "cpu" else nullcontext():
        pair = [case.index("pariskv", backend=name) for name in ("cuda", "torch")]
        for index in pair:
            index.append(*case.tokens(count), valid=valid)
        assert_found(*pair, case.queries(), K)


def drawn(seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)


def standing_out(case):
    """Return the first token that stands out for each KV head.

    The last head's last one is the last token.
    """
    return torch.linspace(0, EVERY - 1, case.kv_heads).long().tolist()


def tokens(case, directions, start, stop):
    """Return keys and values of these tokens. directions: those of keys that stand out."""
    shape = 1, case.kv_heads, stop - start, case.head_dim
    keys, values = drawn(2 * start, *shape), drawn(2 * start + 1, *shape)
    for head, first in enumerate(standing_out(case)):
        keys[0, head, (first - start) % EVERY :: EVERY] += 30 * directions[0, head]
    return keys, values


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "store", "heads"),
    [
        ("fast", "device", 8),  # rows of 17 GB, more than 2^32 elements
        ("fast", "host", 2),
        ("paper", "device", 8),
    ],
)
def test_from_no_tokens_to_four_million(preset, store, heads):
    """All rows that stand out are found, before all other rows."""
    geometry = dict(head_dim=128, value_dim=128, dtype=torch.bfloat16, device="cuda")
    case = Case(q_heads=2 * heads, kv_heads=heads, **geometry)
    directions = torch.nn.functional.normalize(drawn(7, 1, heads, 128), dim=-1)
    queries = 11 * directions.repeat_interleave(2, dim=1) + drawn(8, 1, 2 * heads, 128) / 10
    index = case.index("pariskv", preset=preset, backend="cuda", store=store)
    start = 0
    for length in LENGTHS:
        while len(index) < length:
            start = len(index)
            index.append(*tokens(case, directions, start, min(start + PIECE, length)))
        hits = index.search(queries, k=K)
        assert ((hits.ids >= 0).sum(-1) == min(K, length)).all()
        for head, first in enumerate(standing_out(case)):
            want = [*range(first, length, EVERY)]
            assert hits.ids[0, head, : len(want)].sort().values.tolist() == want
    last = tokens(case, directions, start, MAX_TOKENS)
    ids = torch.arange(start, MAX_TOKENS, device="cuda").expand(1, heads, -1)
    rows = index.fetch(hits_of(ids))
    assert torch.equal(rows.keys, last[0])
    assert torch.equal(rows.values, last[1])
    with pytest.raises(ValueError, match=f"max_tokens: got {MAX_TOKENS + 1} tokens"):
        index.append(*tokens(case, directions, 0, 1))
    assert len(index) == MAX_TOKENS
    assert torch.equal(index.search(queries, k=K).ids, hits.ids)
    if index.attends:
        resident = ResidentRows(index.geometry, 1, 100)
        resident.add(drawn(9, 1, heads, 100, 128), drawn(10, 1, heads, 100, 128), None)
        attended = index.attend(queries, resident, k=K)
        assert (attended.found == K).all()
        want = attention(index, queries, hits, resident)
        torch.testing.assert_close(attended.output, want, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_votes_beyond_2_to_the_31_elements_are_selected():
    """The last of many matrix rows; and ties at its cut, because 4M keys have few different
    votes.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape, limits = (1, 2**31 // MAX_TOKENS + 1, 1, MAX_TOKENS), torch.tensor([K])
    votes = torch.empty(shape, dtype=torch.int32, device="cuda")
    votes.random_(-1000, 1000, generator=generator)
    got = select.candidates(votes, limits)[:, -1:]
    assert torch.equal(got, reference.candidates(votes[:, -1:], limits.cuda()))


@pytest.mark.gpu
def test_codes_beyond_2_to_the_31_bytes_are_reranked():
    generator = torch.Generator("cuda").manual_seed(0)
    C, bits = 2_500_000, 7
    signs, magnitudes = (
        torch.empty(shape, dtype=torch.uint8, device="cuda").random_(generator=generator)
        for shape in ((1, 8, C, 16), (1, 8, C, bits, 16))
    )
    assert magnitudes.numel() > 2**31
    weights, queries = drawn(1, 1, 8, C, 1).abs(), drawn(2, 1, 8, 4, 128, dtype=torch.float32)
    levels = codes.levels(128, bits, torch.device("cuda"))
    got = rerank.estimate(queries, signs, magnitudes, weights, levels)
    last = [part[:, -1:, -1000:].contiguous() for part in (signs, magnitudes, weights)]
    want = rerank.estimate(queries[:, -1:].contiguous(), *last, levels)
    assert torch.equal(got[:, -1:, :, -1000:], want)

"""The fused step over rows that a caller owns: pages, passed as a table of their addresses."""

import re

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from tests.cuda import emulator
from tests.cuda.devices import on
from tests.support.helpers import Case, assert_same_hits, mostly_slow, part
from tests.support.pages import AddressedPages, Pages

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
GEOMETRY = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, value_dim=16)

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")


@pytest.fixture(autouse=True)
def emulated():
    with on("cpu"):
        yield


def made(store):
    return CASE.index("pariskv", backend="cuda", store=store)


def outputs(index):
    layer = AttentionLayer(index, k=20, sink=4, local_window=16, update_every=8, dense_below=64)
    tokens = CASE.tokens(312)
    layer.step(CASE.tensor(5, 2, 4, 300, 64), *part(tokens, 0, 300))
    for t in range(300, 312):
        yield layer.step(CASE.tensor(t, 2, 4, 1, 64), *part(tokens, t, t + 1))


@pytest.mark.slow
@pytest.mark.parametrize("on_host", mostly_slow([False, True], True))
def test_a_layer_reads_them_as_those_of_the_backend(on_host):
    store = AddressedPages(GEOMETRY, on_host=on_host)
    index = made(store)
    got, want = (torch.cat([*outputs(each)]) for each in (index, made("device")))
    assert index.attends
    assert "attend: in one go" in index.explain()
    assert (index._executor.cache is not None) == on_host
    assert store.waited
    assert torch.equal(got, want)


def test_they_are_read_where_they_lie():
    index, queries = made(AddressedPages(GEOMETRY)), CASE.queries()
    index.append(*CASE.tokens(300))
    resident = ResidentRows(GEOMETRY, 2, 1)
    before = index.attend(queries, resident, k=20).output
    for page in index._store.pages:
        page[..., 64:] *= 2  # values
    torch.testing.assert_close(index.attend(queries, resident, k=20).output, 2 * before)
    index.reorder(torch.tensor([1, 0]))
    flipped = index.attend(queries.flip(0), resident, k=20).output
    torch.testing.assert_close(flipped, 2 * before.flip(0))


@pytest.mark.parametrize(
    ("store", "why"),
    [
        (Pages(GEOMETRY), "store: got 'Pages', allowed is one that has AddressedRows"),
        (AddressedPages(GEOMETRY, 64), r"got \(64, 20480, 320\), allowed is \(256, 81920, 320\)"),
    ],
    ids=["no addresses", "pages of 64"],
)
def test_of_others_a_search_is_fused_and_rows_are_fetched(store, why):
    index, theirs, queries = made(store), made("device"), CASE.queries()
    for each in (index, theirs):
        each.append(*CASE.tokens(300))
    hits = index.search(queries, k=20)
    assert_same_hits(hits, theirs.search(queries, k=20))
    assert torch.equal(index.fetch(hits).values, theirs.fetch(hits).values)
    assert not index.attends
    with pytest.raises(ValueError, match="attend: got an index with backend='cuda', but no"):
        index.attend(queries, ResidentRows(GEOMETRY, 2, 1), k=20)
    assert re.search(why, index.explain())

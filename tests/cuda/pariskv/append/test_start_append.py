"""`ParisKV.start_append` and streams: what happens between the start and the end of an append."""

import pytest
import torch

from kvindex.pariskv.encoding import Encoding
from kvindex.pariskv.index import ParisKV
from tests.cuda.launches import Launches
from tests.cuda.pariskv.append.test_append import (
    CASE,
    append,
    assert_searches_alike,
    pair,
    tokens_of,
)
from tests.support.helpers import Case, Operations, part


def large(count):
    """On a GPU, with rows on the host: `pair`, the number of tokens, queries."""
    case = Case(q_heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    queries = case.queries().to("cuda")
    return pair("cuda", case, store="host"), tokens_of(case, count, "cuda"), queries


@pytest.mark.gpu
def test_an_append_on_a_side_stream_under_load():
    """Kernels, copies to the host and searches run in the right order on a busy GPU."""
    (mine, theirs), tokens, queries = large(9000)
    side = torch.cuda.Stream()
    # a segment's center belongs to the append that began the segment
    for start in range(0, 9000, 3000):
        theirs.append(*part(tokens, start, start + 3000))
    load = torch.randn(4096, 4096, device="cuda")
    for start in range(0, 9000, 3000):
        for _ in range(10):
            load = (load @ load).tanh()
        late = tuple(
            piece + 0 * load[0, 0].to(piece.dtype) for piece in part(tokens, start, start + 3000)
        )
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mine.append(*late)
        for piece in late:
            piece.record_stream(side)
        del late, piece
        torch.full((1, 2, 3000, 256), float("nan"), device="cuda")  # reuses the freed memory
        torch.cuda.current_stream().wait_stream(side)
    assert_searches_alike(mine, theirs, queries)
    ids = torch.arange(9000, device="cuda").expand(1, 2, -1)
    rows = mine._store.gather(ids)
    assert torch.equal(rows.keys, tokens[0])
    assert torch.equal(rows.values, tokens[1])


def test_an_append_may_end_later(device):
    """In between, a search sees the old index, and the started append is not written twice."""
    both = pair(device)
    tokens, queries = tokens_of(CASE, 900, device), CASE.queries().to(device)
    append(both, *part(tokens, 0, 300))
    before = both[1].search(queries, k=20)
    ends = [index.start_append(*part(tokens, 300, 700)) for index in both]
    assert_searches_alike(*both, queries)
    assert torch.equal(both[1].search(queries, k=20).ids, before.ids)
    for end in ends:
        end()
    assert_searches_alike(*both, queries)
    for index in both:
        end = index.start_append(*part(tokens, 700, 900))
        index.truncate(600)
        with pytest.raises(ValueError, match="append: the index was changed after start_append"):
            end()
    append(both, *part(tokens, 600, 900))
    assert_searches_alike(*both, queries)


def test_an_append_that_fails_does_not_take_the_place_of_what_was_begun(device, monkeypatch):
    """The failed append has overwritten rows and codes of the append that was started."""
    both = pair(device)
    tokens, others = tokens_of(CASE, 768, device), tokens_of(CASE, 256, device, seed=7)
    append(both, *part(tokens, 0, 512))
    ends = [index.start_append(*part(tokens, 512, 768)) for index in both]

    def fails(*given, **how):
        raise MemoryError("none left")

    for index in both:
        with monkeypatch.context() as patch:
            patch.setattr(type(index._valid), "append", fails)
            with pytest.raises(MemoryError):
                index.append(*others)
    for end in ends:
        end()
    assert_searches_alike(*both, CASE.queries().to(device))
    ids = torch.arange(768, device=device).expand(2, 2, -1)
    for index in both:
        rows = index._store.gather(ids)
        assert torch.equal(rows.keys, tokens[0])
        assert torch.equal(rows.values, tokens[1])


def test_what_was_begun_and_left_is_written_over(device):
    both = pair(device)
    tokens = tokens_of(CASE, 900, device)
    for index in both:
        index.append(*part(tokens, 0, 300))
        index.start_append(*part(tokens, 500, 900))
        index.append(*part(tokens, 300, 600))
    assert_searches_alike(*both, CASE.queries().to(device))


@pytest.mark.gpu
def test_an_append_of_real_tokens_waits_for_nothing():
    (index, _), tokens, queries = large(3000)
    index.append(*part(tokens, 0, 1000))
    index.search(queries, k=20)
    index.append(*part(tokens, 1000, 1300))
    index._store._pool.settle()
    torch.cuda.set_sync_debug_mode("error")
    try:
        index.append(*part(tokens, 1300, 1556))
        index.start_append(*part(tokens, 1556, 1812))()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(index) == 1812


@pytest.mark.gpu
def test_an_append_begins_beside_a_replayed_search():
    """The graph is replayed while a side stream encodes. It sees the index as it was before."""
    (mine, theirs), tokens, queries = large(6000)
    side = torch.cuda.Stream()
    append((mine, theirs), *part(tokens, 0, 3000))
    mine.warm_up(k=20, tokens=6000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        hits = mine.search(queries, k=20)
    for start in range(3000, 6000, 500):
        some = part(tokens, start, start + 500)
        graph.replay()
        before = hits.ids.clone()
        ready = torch.cuda.current_stream().record_event()
        for _ in range(20):
            graph.replay()
        side.wait_event(ready)
        with torch.cuda.stream(side):
            end = mine.start_append(*some)
        assert torch.equal(hits.ids, before)
        torch.cuda.current_stream().wait_stream(side)
        end()
        theirs.append(*some)
        graph.replay()
        assert torch.equal(hits.ids, mine.search(queries, k=20).ids)
        assert_searches_alike(mine, theirs, queries)
    everything = torch.arange(6000, device="cuda").expand(1, 2, -1)
    assert torch.equal(mine._store.gather(everything).keys, tokens[0])


def test_an_update_is_three_launches(device, monkeypatch):
    """Starting an append reads nothing else from the device, because a wait would delay the next
    step.
    """
    monkeypatch.setattr(ParisKV, "_defers", True)
    mine, theirs = both = pair(device)
    mine._store._launched = True  # as on a GPU
    tokens, queries = tokens_of(CASE, 1200, device), CASE.queries().to(device)
    append(both, *part(tokens, 0, 512))
    mine.reserve(1200)
    assert_searches_alike(*both, queries)
    with Launches() as launches, Operations() as operations:
        end = mine.start_append(*part(tokens, 512, 768))
        assert launches.names == ["encode", "write_rows"]
        end()
    assert launches.names == ["encode", "write_rows", "update_state"]
    assert operations.names == ["aten.add.Tensor"]  # a count of tokens, which is on the host
    theirs.append(*part(tokens, 512, 768))
    append(both, *part(tokens, 768, 1200))
    assert_searches_alike(*both, queries)


def test_what_signs_tell_is_fitted_beside_the_steps(device, monkeypatch):
    """When the number of blocks passes a power of two, memory is allocated at the start of the
    append, not at its end.
    """
    case = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
    index = case.index("pariskv", backend="cuda", device=device)
    tokens, fits, fit = tokens_of(case, 1024, device), [], Encoding.fit
    monkeypatch.setattr(Encoding, "fit", lambda *given: fits.append(given[2]) or fit(*given))
    index.append(*part(tokens, 0, 256))
    for start in (256, 512, 768):
        index.search(case.queries().to(device), k=5)
        before, made = index._regressed(), len(fits)
        end = index.start_append(*part(tokens, start, start + 256))
        assert index._regressed() is before  # a search in between
        begun = fits[made:]
        assert begun == ([] if start == 512 else [start // 256 + 1])
        end()
        assert fits[made:] == begun
    fresh = case.index("pariskv", backend="cuda", device=device)
    fresh.append(*tokens)
    assert torch.equal(index._regressed(), fresh._regressed())
    queries = case.queries().to(device)
    assert torch.equal(index.search(queries, k=20).ids, fresh.search(queries, k=20).ids)

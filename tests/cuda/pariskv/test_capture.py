"""Searches captured in CUDA graphs and replayed while queries and indexes change. Needs a GPU."""

import gc

import pytest
import torch

from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend
from tests.cuda.launches import nodes_of
from tests.cuda.pariskv.test_backend import assert_found
from tests.support.helpers import Case, left_padding, part

pytestmark = pytest.mark.gpu

CASE = Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128, batch=2, dtype=torch.bfloat16)
K, TOKENS, ROOM = 50, 6000, 40


class Replayed:
    """A graph of one search and one attention per index, for queries `[B, H, D]`."""

    def __init__(self, indexes, queries, resident, tokens=TOKENS):
        for index in indexes:
            index.warm_up(k=K, tokens=tokens)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outputs = [index.attend(queries, resident, k=K).output for index in indexes]
            self.hits = [index.search(queries, k=K) for index in indexes]

    def __call__(self):
        """Copies of the outputs and ids of a replay."""
        for result in (*self.outputs, *(hits.ids for hits in self.hits)):
            result.fill_(-7)
        self.graph.replay()
        return [output.clone() for output in self.outputs], [h.ids.clone() for h in self.hits]


def cuda(*tensors):
    return tuple(tensor.to("cuda") for tensor in tensors)


def made(count, store="host", pads=(0, 70), seed=0):
    """The index on its kernels, the same index in plain torch, and the tokens to be appended."""
    options = dict(preset="fast", candidates_per="group", device="cuda", store=store)
    pair = [CASE.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]
    tokens = cuda(*CASE.tokens(TOKENS, seed))
    for index in pair:
        index.append(*part(tokens, 0, count), valid=left_padding(list(pads), count, "cuda"))
    return *pair, tokens


def near_rows(count=ROOM - 10, seed=9):
    resident = ResidentRows(CASE.index("exact", device="cuda").geometry, CASE.batch, ROOM)
    resident.add(*cuda(*CASE.tokens(count, seed)), left_padding([0, 3], count, "cuda"))
    return resident


def assert_eager(index, reference, replay, queries, resident):
    """A replay returns what a call returns, and what the reference's rows give where both select
    the same rows.
    """
    (output,), (ids,) = replay()
    eager, hits = index.attend(queries, resident, k=K).output, index.search(queries, k=K)
    assert torch.equal(ids, hits.ids)
    torch.testing.assert_close(output, eager)
    assert_found(index, reference, queries, K)
    torch.testing.assert_close(
        output, attention(index, queries, hits, resident), rtol=2e-2, atol=2e-2
    )
    return ids


def attention(index, queries, hits, resident):
    """Attention in plain torch over hits and resident rows."""
    g, rows = index.geometry, index.fetch(hits)
    beside = resident.rows[:, :, : len(resident)].tensor_split([g.head_dim], dim=-1)
    shown = resident.mask[:, None, : len(resident)].expand(-1, g.kv_heads, -1) > 0
    seen = torch.cat([hits.ids >= 0, shown], dim=2).repeat_interleave(g.group_size, dim=1)
    bias = torch.zeros(seen.shape, device="cuda").masked_fill(~seen, -torch.inf)
    if hits.log_weight is not None:
        bias[..., : hits.ids.shape[-1]] += hits.log_weight
    keys = torch.cat([rows.keys, beside[0]], dim=2)
    values = torch.cat([rows.values, beside[1]], dim=2)
    return attend(queries, keys, values, scale=g.scale, softcap=g.softcap, bias=bias)


@pytest.mark.parametrize("store", ["host", "device"])
def test_replays_follow_queries_tokens_and_near_rows(store):
    index, reference, tokens = made(3000, store)
    (queries,), resident = cuda(CASE.queries()), near_rows()
    replay = Replayed([index], queries, resident)
    assert_eager(index, reference, replay, queries, resident)
    queries.copy_(CASE.queries(seed=1))
    assert_eager(index, reference, replay, queries, resident)
    resident.add(*cuda(*CASE.tokens(3, seed=11)), None)
    assert_eager(index, reference, replay, queries, resident)
    known = 3000
    for count in (1, 200, 256, 1500):
        new = [piece.clone() for piece in part(tokens, known, known + count)]
        # the last token is what every head of a group looks for most
        new[0][:, :, -1] = 3 * queries.view(2, 2, 4, 128).mean(2)
        for one in (index, reference):
            one.append(*new)
        known += count
        ids = assert_eager(index, reference, replay, queries, resident)
        assert (ids == known - 1).any(-1).all()
    for one in (index, reference):
        one.truncate(2500)
    ids = assert_eager(index, reference, replay, queries, resident)
    assert ids.max() < 2500
    for one in (index, reference):
        one.append(*part(tokens, 2700, 4000))
    assert_eager(index, reference, replay, queries, resident)


def test_a_captured_call_has_five_nodes():
    index, _, _ = made(3000)
    (queries,), resident = cuda(CASE.queries()), near_rows()
    index.warm_up(k=K, tokens=3000)
    assert nodes_of(lambda: index.attend(queries, resident, k=K)) in (5, None)


def test_two_replays_are_the_same_to_the_bit():
    index, _, _ = made(5000)
    (queries,) = cuda(CASE.queries())
    replay = Replayed([index], queries, near_rows())
    first, second = replay(), replay()
    assert torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1][0], second[1][0])


def test_layers_that_share_buffers_follow_one_another_in_a_graph():
    indexes = [made(3000 + 500 * i, seed=i)[0] for i in range(3)]
    (queries,), resident = cuda(CASE.queries()), near_rows()
    replay = Replayed(indexes, queries, resident)
    outputs, ids = replay()
    for index, output, found in zip(indexes, outputs, ids, strict=True):
        assert torch.equal(found, index.search(queries, k=K).ids)
        torch.testing.assert_close(output, index.attend(queries, resident, k=K).output)


def test_a_graph_outlives_the_buffers_that_others_have_outgrown():
    index, reference, tokens = made(300)
    (queries,), resident = cuda(CASE.queries()), near_rows()
    replay = Replayed([index], queries, resident, tokens=300)
    for one in (index, reference):
        one.append(*part(tokens, 300, TOKENS))
    assert_found(index, reference, queries, K)
    (output,), (ids,) = replay()
    assert output.isfinite().all()
    assert ids.min() >= 0
    assert ids.max() >= 300  # fewer candidates than wanted, chosen from all tokens
    assert (ids.sort().values.diff() > 0).all()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_on_a_side_stream_under_load(graph):
    index, reference, tokens = made(3000)
    (queries,), resident = cuda(CASE.queries()), near_rows()
    replay = Replayed([index], queries, resident) if graph else None
    want = index.attend(queries, resident, k=K).output, index.search(queries, k=K).ids
    new = part(tokens, 3000, 3500)
    reference.append(*new)
    load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        load = (load @ load).clamp(-1, 1)
    with torch.cuda.stream(side):
        for _ in range(5):
            if replay:
                (output,), (ids,) = replay()
            else:
                output, ids = (
                    index.attend(queries, resident, k=K).output,
                    index.search(queries, k=K).ids,
                )
            assert torch.equal(ids, want[1])
            torch.testing.assert_close(output, want[0])
        index.append(*new)
        ids = replay()[1][0] if replay else index.search(queries, k=K).ids
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(ids, index.search(queries, k=K).ids)
    assert_found(index, reference, queries, K)


@pytest.mark.parametrize("store", ["host", "device"])
def test_a_search_allocates_nothing_new_and_waits_for_nothing(store):
    index, _, _ = made(5000, store)
    (queries,), resident = cuda(CASE.queries()), near_rows()

    def run():
        return index.attend(queries, resident, k=K), index.search(queries, k=K)

    run()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("segment.all.allocated", "allocated_bytes.all.current"):
        # memory that earlier tests left may be freed meanwhile
        assert after[name] <= before[name], name


def test_a_layers_steps_and_updates_wait_for_nothing():
    options = dict(
        preset="fast", candidates_per="group", device="cuda", store="host", backend="cuda"
    )
    index = CASE.index("pariskv", **options)
    layer = AttentionLayer(index, k=K, sink=4, local_window=16, update_every=64, dense_below=64)
    tokens = cuda(*CASE.tokens(1000))
    (queries,) = cuda(CASE.tensor(5, 2, 8, 600, 128))

    def step(t):
        layer.step(queries[:, :, t % 600][:, :, None], *part(tokens, t, t + 1))

    layer.step(queries, *part(tokens, 0, 600))
    for t in range(600, 700):
        step(t)
    index._store._pool.settle()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(700, 1000):
            step(t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layer.traffic.steps == 400
    assert len(index) > 900


def test_a_first_search_is_not_captured():
    index, _, _ = made(300)
    (queries,) = cuda(CASE.queries())
    with (
        pytest.raises(
            RuntimeError,
            match="graph: no buffers that are large enough for a search of k = 50 rows",
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        index.search(queries, k=K)


@pytest.mark.parametrize("store", ["host", "device"])
def test_a_fetch_is_not_captured(store):
    index, _, _ = made(300, store)
    hits = index.search(*cuda(CASE.queries()), k=K)
    with (
        pytest.raises(RuntimeError, match=r"graph: got a call \(such as fetch\) that"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        index.fetch(hits)
    index.raise_pending()
    assert index.fetch(hits).keys.isfinite().all()


@pytest.mark.parametrize(
    "options", [dict(row_codec="int8"), dict(row_codec="fp8", store="device")], ids=str
)
@pytest.mark.parametrize("wrapper", ["", "+sample"])
def test_codes_and_rows_drawn_at_random_are_replayed(wrapper, options):
    options = dict(preset="fast", device="cuda", store="host") | options
    index, plain = (
        CASE.index("pariskv" + wrapper, backend=backend, **options) for backend in ("cuda", "torch")
    )
    tokens = cuda(*CASE.tokens(TOKENS))
    for one in (index, plain):
        one.append(*part(tokens, 0, 3000), valid=left_padding([0, 70], 3000, "cuda"))
    (queries,), resident = cuda(CASE.queries()), near_rows()
    replay = Replayed([index], queries, resident)
    for seed, known in ((0, 3000), (1, 3001), (2, 3700)):
        queries.copy_(CASE.queries(seed=seed))
        if known > len(index):
            new = part(tokens, len(index), known)
            for one in (index, plain):
                one.append(*new)
        (output,), (ids,) = replay()
        hits = index.search(queries, k=K)
        assert torch.equal(ids, hits.ids)
        torch.testing.assert_close(output, index.attend(queries, resident, k=K).output)
        want = attention(index, queries, hits, resident)
        torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)
        close = plain.search(queries, k=K).ids
        assert (ids[..., None] == close[..., None, :]).any(-1).float().mean() > 0.9
    assert (ids >= 3000).any()  # replays find rows that were appended after the capture
    getattr(index, "inner", index).raise_pending()

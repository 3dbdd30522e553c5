"""Sink, index, local window and update buffer: where each token is stored, and what a step
reads."""

import math
import weakref

import pytest
import torch

from kvindex import Hits
from kvindex.indexes.exact import Exact
from kvindex.layer.window import Window
from tests.support.helpers import Case, all_rows, sampled
from tests.support.sequences import SIZES, Sequence, layer_of, steps_of

PLANS = [
    steps_of(20, *[1] * 30),
    steps_of(2, 2, *[1] * 12, 9, 3, *[1] * 12),
    steps_of(*[1] * 40),
]


class Recording(Exact):
    """Stores the hits of its last search."""

    hits = None

    def _search(self, queries, k):
        self.hits = super()._search(queries, k)
        return self.hits


class ReturnsNothing(Exact):
    def _search(self, queries, k):
        hits = super()._search(queries, k)
        return Hits(torch.full_like(hits.ids, -1), torch.full_like(hits.scores, -torch.inf))


def layer_with(kind, case, **options):
    layer = layer_of(case, **options)
    layer.index = kind(q_heads=case.q_heads, kv_heads=case.kv_heads, head_dim=case.head_dim)
    return layer


def regions(lengths, local, update_every):
    """Return the number of tokens in the index after each step, by the rule of the spec."""
    held_local = buffer = indexed = 0
    for length in lengths:
        buffer += length
        if buffer >= update_every:
            joined = held_local + buffer
            held_local, buffer = min(local, joined), 0
            indexed += joined - held_local
        yield indexed


@pytest.mark.parametrize(
    ("sizes", "steps"), sampled([(4, 5), (0, 3), (7, 1), (3, 10), (9, 4)], PLANS)
)
def test_sizes_of_the_regions_follow_the_spec(steps, sizes):
    case, (local, update_every) = Case(), sizes
    sequence = Sequence.of(case, steps[-1][1])
    layer = layer_of(case, local_window=local, update_every=update_every)
    lengths = [stop - start for start, stop in steps]
    for (start, stop), indexed in zip(steps, regions(lengths, local, update_every), strict=True):
        sequence.feed(layer, start, stop)
        assert len(layer.index) == indexed


def test_local_is_shorter_after_a_cut_into_it():
    sequence, layer = Sequence.of(Case(), 60), layer_of(Case(), local_window=4, update_every=5)
    sequence.feed(layer, 0, 20)  # 16 tokens in the index, 4 in the local window
    sequence.feed(layer, 20, 22)
    layer.truncate(18)  # 2 tokens in the local window, none in the buffer
    for token in range(18, 22):
        sequence.feed(layer, token, token + 1)
        assert len(layer.index) == 16
    sequence.feed(layer, 22, 23)  # the buffer is full: of 7 tokens the newest 4 stay
    assert len(layer.index) == 19


def test_the_oldest_tokens_move_and_their_rows_stay_what_they_were():
    case, steps = Case(q_heads=4, value_dim=8, batch=2), PLANS[1]
    sequence, layer = Sequence.of(case, steps[-1][1], [4, 0]), layer_of(case)
    for start, stop in steps:
        sequence.feed(layer, start, stop)
        held = len(layer.index)
        rows = all_rows(layer.index, 2)
        real = sequence.valid[:, None, :held, None]
        assert torch.equal(rows.keys * real, sequence.keys[:, :, :held] * real)
        assert torch.equal(rows.values * real, sequence.values[:, :, :held] * real)


@pytest.mark.parametrize("pads", [[30, 25], [40, 33], [59, 59]])
@pytest.mark.parametrize("sink", [0, 3])
def test_rows_that_are_all_padding_leave_again_and_again(pads, sink):
    """Some updates move only padding, in every sequence of the batch."""
    case = Case(q_heads=4, batch=2)
    sequence = Sequence.of(case, 80, pads)
    layer = layer_of(case, k=1000, sink=sink, local_window=4, update_every=5)
    for start in range(0, 80, 5):
        sequence.assert_equals(sequence.feed(layer, start, start + 5), sequence.dense(), start)
    assert len(layer.index) == 76


@pytest.mark.parametrize(("pads", "steps"), sampled([[0, 0], [6, 1], [0, 11]], PLANS))
def test_a_step_reads_the_sink_the_hits_and_the_window_and_nothing_else(steps, pads):
    """The sink contains each sequence's first real tokens; the index never returns them."""
    case, count = Case(q_heads=4, batch=2), steps[-1][1]
    sequence, layer = Sequence.of(case, count, pads), layer_with(Recording, case, k=4)
    positions = torch.arange(count)
    sink_of = torch.stack([(positions >= pad) & (positions < pad + 3) for pad in pads])
    for start, stop in steps:
        indexed = len(layer.index)
        layer.index.hits = None
        got = sequence.feed(layer, start, stop)
        hits = layer.index.hits
        if hits is None:
            continue
        mask = (sink_of | (positions >= indexed))[:, None].repeat(1, 2, 1)
        for b in range(2):
            for h in range(2):
                ids = [i for i in hits.ids[b, h].tolist() if i >= 0]
                assert not sink_of[b, ids].any(), "the sink is not retrieved"
                assert sequence.valid[b, ids].all()
                mask[b, h, ids] = True
        want = sequence.dense(mask[:, :, None].expand(-1, -1, count, -1))
        sequence.assert_equals(got, want, start)
    assert layer.traffic.steps > 0


@pytest.mark.parametrize(
    "sizes", [dict(), {"local_window": 0}, {"local_window": 0, "update_every": 1}], ids=str
)
def test_the_newest_token_is_attended_to_at_every_step(sizes):
    """The index finds nothing, and the newest key gets nearly all attention."""
    case = Case(q_heads=4)
    sequence = Sequence.of(case, 40)
    layer = layer_with(ReturnsNothing, case, **sizes)
    sequence.queries = 100 * sequence.keys.repeat_interleave(2, dim=1)
    sequence.keys = sequence.keys / sequence.keys.norm(dim=-1, keepdim=True)
    for start, stop in steps_of(5, *[1] * 30):
        got = sequence.feed(layer, start, stop)[:, :, -1]
        own = sequence.values[:, :, stop - 1].repeat_interleave(2, dim=1)
        torch.testing.assert_close(got, own, rtol=1e-3, atol=1e-3)


def test_after_a_cut_into_the_sink_the_next_real_tokens_fill_it():
    case = Case(batch=2)
    sequence = Sequence.of(case, 60, [2, 0])
    layer = layer_with(Recording, case, k=100)
    for start, stop in steps_of(20, 1):
        sequence.feed(layer, start, stop)
    layer.truncate(2)  # the first sequence has no real token left, the second two
    for start in range(2, 30):
        sequence.feed(layer, start, start + 1)
    ids = [set(row) - {-1} for row in layer.index.hits.ids[:, 0].tolist()]
    indexed = set(range(layer.index.hits.ids.max() + 1))
    assert ids[0] == indexed - {0, 1, 2, 3, 4}
    assert ids[1] == indexed - {0, 1, 2}


@pytest.mark.parametrize("threshold", [0, 17, 25, 1000])
def test_below_the_threshold_attention_is_dense_and_the_index_fills(threshold):
    case = Case()
    sequence = Sequence.of(case, 40)
    layer = layer_with(Recording, case, k=1, dense_below=threshold)
    want = sequence.dense()
    for start, stop in steps_of(14, *[1] * 20):
        layer.index.hits = None
        had = len(layer.index)
        got = sequence.feed(layer, start, stop)
        searches = stop - start == 1 and stop >= threshold and had > 0
        assert (layer.index.hits is not None) == searches
        if not searches:
            sequence.assert_equals(got, want, start)
    assert len(layer.index) > 20


def test_several_queries_never_search():
    case = Case()
    sequence, layer = Sequence.of(case, 60), layer_with(Recording, case, k=1)
    for start, stop in steps_of(20, 2, 3, 17):
        sequence.feed(layer, start, stop)
    assert layer.index.hits is None
    assert layer.traffic.steps == 0


def test_traffic_counts_rows_and_bytes():
    case = Case(q_heads=4, value_dim=8, batch=2)
    sequence, layer = Sequence.of(case, 60, [0, 4]), layer_of(case, k=5)
    rows_read = rows_full = fetched = 0
    for start, stop in steps_of(20, *[1] * 12):
        indexed = len(layer.index)
        sequence.feed(layer, start, stop)
        if stop - start == 1:
            rows_read += 3 + 5 + stop - indexed
            rows_full += stop - 2  # mean over the sequences of the batch
            fetched += 2 * 2 * 5 * (16 + 8) * 4
    assert layer.traffic.steps == 12
    assert float(layer.traffic.rows_read) == pytest.approx(rows_read)
    assert float(layer.traffic.rows_full) == pytest.approx(rows_full)
    assert float(layer.traffic.bytes_fetched) == fetched


class Doubled(Recording):
    """Gives every row a weight of 2, and a weight of 0 for the second query head of a group."""

    def _search(self, queries, k):
        hits = super()._search(queries, k)
        twice = torch.full(hits.ids.shape, math.log(2.0)).repeat_interleave(2, dim=1)
        twice[:, 1::2] = float("-inf")
        unused = (hits.ids == -1).repeat_interleave(2, dim=1)
        return Hits(hits.ids, hits.scores, twice.masked_fill(unused, float("-inf")))


def test_log_weights_of_hits_reach_the_softmax_of_each_query_head():
    case = Case(q_heads=4)
    sequence = Sequence.of(case, 60)
    layer = layer_with(Doubled, case, k=6)
    for start, stop in steps_of(30, *[1] * 20):
        indexed = len(layer.index)
        got = sequence.feed(layer, start, stop)
        if stop - start > 1:
            continue
        ids = layer.index.hits.ids
        counted = torch.zeros(1, 2, stop, dtype=torch.float64)
        counted[:, :, : SIZES["sink"]] = counted[:, :, indexed:] = 1
        first = counted.scatter(-1, ids, 2.0)  # heads 0 and 2
        times = torch.stack([first, counted], dim=2).flatten(1, 2)  # [B, H, N]
        pair = (sequence.keys, sequence.values)
        rows = [part[:, :, :stop].double().repeat_interleave(2, 1) for part in pair]
        query = sequence.queries[:, :, stop - 1].double()
        weights = (0.25 * query[:, :, None] @ rows[0].mT)[:, :, 0].exp() * times
        want = (weights[:, :, None] @ rows[1])[:, :, 0] / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(got[:, :, 0].double(), want, rtol=1e-4, atol=1e-5)


def test_a_share_of_attention_needs_fewer_rows_and_is_counted():
    case = Case(q_heads=4)
    sequence = Sequence.of(case, 60)
    some, all_of_it = layer_of(case, k=30), layer_of(case, k=30)
    some.coverage = 0.6
    for start, stop in steps_of(40, *[1] * 12):
        sequence.feed(some, start, stop)
        sequence.feed(all_of_it, start, stop)
    traffic = some.traffic
    assert traffic.steps == all_of_it.traffic.steps == 12
    assert float(traffic.rows_read) < 0.8 * float(all_of_it.traffic.rows_read)
    assert float(traffic.bytes_fetched) < 0.8 * float(all_of_it.traffic.bytes_fetched)
    assert 0.6 < float(traffic.coverage) / 12 < 0.95
    assert all_of_it.traffic.coverage == 0


def test_nbytes_counts_sink_and_window_beside_the_index():
    case = Case(q_heads=4, value_dim=8, batch=2)
    sequence, layer = Sequence.of(case, 60), layer_of(case)
    assert layer.nbytes()["window"] == 0
    for start, stop in steps_of(20, 1, 1):
        sequence.feed(layer, start, stop)
    row = 2 * 2 * (16 + 8) * 4
    window = len(layer) - len(layer.index)
    assert layer.nbytes()["window"] == (SIZES["sink"] + window) * row
    assert layer.nbytes()["rows"] == len(layer.index) * row


def test_signals_reach_the_index():
    calls = []

    class Listening(Exact):
        def end_prompt(self):
            calls.append(("end_prompt", len(self)))

        def observe_queries(self, queries, positions):
            calls.append((tuple(queries.shape), positions.tolist()))

    case = Case()
    sequence, layer = Sequence.of(case, 30), layer_with(Listening, case)
    for start, stop in steps_of(12, 2, 1, 1):
        sequence.feed(layer, start, stop)
    shape = (1, 2)
    assert calls == [
        ((*shape, 12, 16), [*range(12)]),
        ((*shape, 2, 16), [12, 13]),
        ("end_prompt", 8),
        ((*shape, 1, 16), [14]),
        ((*shape, 1, 16), [15]),
    ]


def test_staged_tokens_are_taken_over_in_inference_mode_too():
    """Whatever reads the window takes them over, also a checkpoint, which runs in no
    transaction."""
    case = Case(q_heads=2, kv_heads=2, head_dim=8, value_dim=8)
    own = Window(case.index("exact").geometry, sink_size=0, local_size=4, room=64)
    tokens = case.tokens(60)
    own.append(0, *(part[:, :, :1] for part in tokens), None)
    for n in range(1, 59):
        resident = own.resident(0, more=1)
        resident.rows[:, :, n] = torch.cat([part[:, :, n] for part in tokens], -1)
        own.count_staged()
    with torch.inference_mode():
        own.checkpoint()
    own.append(0, *(part[:, :, 59:] for part in tokens), None)
    assert torch.equal(own.rows.keys, tokens[0])


def test_rows_that_have_left_are_let_go_though_someone_keeps_a_checkpoint():
    case = Case()
    held = Window(case.index("exact").geometry, sink_size=2, local_size=4, room=8)
    empty = held.checkpoint()
    held.append(0, *case.tokens(20), None)
    full, kept = held.checkpoint(), weakref.ref(held._window._data["keys"])
    held.begin(16)
    held.end(held.without(16), None)
    assert len(held) == 4
    held.rollback(full)
    assert len(held) == 20
    assert torch.equal(held.rows.keys, case.tokens(20)[0])
    del full
    held.begin(16)
    held.end(held.without(16), None)
    assert kept() is None
    held.rollback(empty)
    assert len(held) == 0


def test_a_row_that_a_failed_step_added_is_not_attended_to():
    """`rollback` also discards it from the resident buffer; the next token takes its place."""
    case = Case()
    keys, values = case.tokens(12)
    held = Window(case.index("exact").geometry, sink_size=0, local_size=4, room=16)
    held.append(0, keys[:, :, :10], values[:, :, :10], None)
    held.resident(0)
    before = held.checkpoint()
    held.append(0, keys[:, :, 10:11], values[:, :, 10:11], None)
    held.resident(0)
    held.rollback(before)
    held.append(0, keys[:, :, 11:], values[:, :, 11:], None)
    resident = held.resident(0)
    assert len(resident) == 11
    want = torch.cat([held.rows.keys, held.rows.values], dim=-1)
    assert torch.equal(resident.rows[:, :, :11], want)
    assert torch.equal(want[:, :, 10], torch.cat([keys[:, :, 11], values[:, :, 11]], dim=-1))

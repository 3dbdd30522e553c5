"""The steps of `scan`, `paper` and `accurate`: stage by stage, as an index, and in a graph.

One file, for all presets are held to the same; `test_step.py` has the setting.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.decode.timing import Launches
from kvindex import ops
from kvindex.core import backend
from kvindex.core.resident import ResidentRows
from kvindex.indexes.pariskv import ParisKV
from kvindex.layer import AttentionLayer
from kvindex.ops import coarse, select
from kvindex_cuda import store, writer
from kvindex_cuda.memory.code_blocks import CodeBlocks
from kvindex_cuda.memory.device_store import DeviceStore
from kvindex_cuda.memory.layout import SubspaceLayout
from kvindex_cuda.pariskv.dispatch import STEPS, kind_of, options_of
from kvindex_cuda.pariskv.executor import fused
from tests.cuda import emulator
from tests.cuda.devices import on, on_devices
from tests.cuda.test_capture import CASE as LARGE
from tests.cuda.test_capture import TOKENS, K, Replayed, assert_eager, near_rows
from tests.cuda.test_step import assert_close, expected, run, setting
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    follow_changes,
    left_padding,
    part,
)

LISTS = dict(scan="group", paper="head", accurate="group")
NAMES = dict(
    scan=["turn", "all", "agree", "attend"],
    paper=["turn", "count", "heads", "weigh", "agree", "attend"],
    accurate=["turn", "count", "group", "weigh", "agree", "attend"],
)
each_preset = pytest.mark.parametrize("preset", LISTS)

CASES = {
    "g4": (Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128), 1500, {}),
    "g1-B2": (Case(q_heads=2, kv_heads=2, head_dim=64, batch=2), 700, {}),
    "g3-D96": (Case(q_heads=3, kv_heads=1, head_dim=96), 600, {}),
    "g2-D40": (Case(q_heads=2, kv_heads=1, head_dim=40), 600, {}),
    "g8-D256": (Case(q_heads=8, kv_heads=1, head_dim=256, value_dim=64), 300, {}),
    "g12": (Case(q_heads=12, kv_heads=1, head_dim=64), 400, {}),
    "one": (Case(q_heads=4, kv_heads=2, head_dim=64), 1, {}),
    "1025": (Case(q_heads=4, kv_heads=2, head_dim=64), 1025, {}),
    "softcap": (Case(q_heads=4, kv_heads=2, head_dim=64, softcap=5.0), 500, {}),
    "max_share": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(group="max_share")),
    "bits": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(magnitude_bits=2)),
    "bfloat16": (Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16), 500, {}),
    "float16": (Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.float16), 500, {}),
}
ONLY = {
    "accurate-4bits": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(weight_bits=4)),
    "accurate-127": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(query_max=127)),
    "accurate-plain": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(center=0)),
    "scan-plain": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(center=0)),
    "paper-logs": (
        Case(q_heads=2, kv_heads=1, head_dim=64),
        500,
        dict(weights="log", weight_bits=8),
    ),
}
ALL = {f"{preset}-{name}": case for preset in LISTS for name, case in CASES.items()} | ONLY

ON_CPU = {
    f"{preset}-{name}"
    for i, name in enumerate(CASES)
    for j, preset in enumerate(LISTS)
    if name == "g4" or i % len(LISTS) == j
} | ONLY.keys()
"""Each case by one preset, for to compile a step for the emulator takes half a minute."""


def made(name, case, count, options, device, **more):
    preset = name.partition("-")[0]
    options = dict(preset=preset, lists=LISTS[preset]) | options | more
    return setting(case, count, device=device, **options)


@on_devices
@pytest.mark.parametrize("name", ALL)
def test_a_step_selects_and_attends_as_the_reference(name, device):
    if device == "cpu" and name not in ON_CPU:
        pytest.skip("another preset runs this case on a CPU; on a GPU all do")
    case, count, options = ALL[name]
    index, layout, state, _kept, k = made(name, case, count, options, device)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@on_devices
@each_preset
def test_padded_tokens_and_hidden_rows_are_never_read(preset, device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3)
    valid = left_padding([0, 130, 600], 600).to(device)
    index, layout, state, _kept, k = made(preset, case, 600, {}, device, valid=valid)
    state.resident_mask[1, ::3] = 0
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)
    assert got[1][4] == got[1][5] == []


@on_devices
@each_preset
def test_fewer_keys_than_rows(preset, device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
    valid = left_padding([0, 290], 300).to(device)
    index, layout, state, _kept, _ = made(preset, case, 300, {}, device, valid=valid)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, 200, device=device)
    hits, want = expected(index, queries, state, 200)
    assert [len(row) for row in got[1]][2:] == [10, 10]
    if preset == "scan":  # the others rerank what k = 20 asks for
        assert_close(got, want, hits)


@on_devices
@each_preset
def test_ties_go_to_the_lower_ids(preset, device):
    """Nearly all keys are equal, in more than one chunk."""
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    keys, values = case.tokens(2540)
    keys[:, :, 5:] = keys[:, :, 5:6]
    tokens = keys, values
    index, layout, state, _kept, k = made(preset, case, 2500, {}, device, tokens=tokens)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    if preset != "scan":
        hits, want = expected(index, queries, state, k)
        assert_close(got, want, hits, missing=0.01)
    elif device == "cpu":  # centers differ in the last bit: no ties between segments
        first = [sorted(i % 256 for i in row if i >= 256) for row in got[1]]
        assert all(row == list(range(len(row))) for row in first if row)


@on_devices
@each_preset
def test_a_zero_query_gives_numbers(preset, device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    index, layout, state, _kept, k = made(preset, case, 300, {}, device)
    queries = torch.zeros_like(case.queries()).to(device)
    output, ids = run(index, layout, state, queries, k, device=device)
    assert [len(row) for row in ids] == [k, k]
    want = expected(index, queries, state, k)[1]
    torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)


@on_devices
@each_preset
def test_a_query_that_is_not_finite_is_told_and_harms_no_other_group(preset, device):
    case, count, options = CASES["g4"]
    index, layout, state, _kept, k = made(preset, case, count, options, device)
    wrong, queries = torch.zeros((), dtype=torch.int32, device=device), case.queries().to(device)
    state = replace(state, wrong=wrong)
    ids = run(index, layout, state, queries, k, device=device)[1]
    assert int(wrong) == 0
    queries[-1, -1, 3] = torch.nan
    its = run(index, layout, state, queries, k, device=device)[1]
    assert int(wrong) == 1
    assert its[:-1] == ids[:-1]
    assert [len(set(row)) for row in its] == [k] * len(its)


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@each_preset
def test_neither_the_order_of_threads_nor_of_blocks_changes_ids(preset):
    case, count, options = CASES["1025"]
    index, layout, state, _kept, k = made(preset, case, count, options, "cpu")
    found = [
        run(index, layout, state, case.queries(), k, order=order)
        for order in ("forward", "backward", "random")
    ]
    assert found[0][1] == found[1][1] == found[2][1]


def stepped(index, layout, state, queries, k, device):
    """A step that has run, to look into."""
    kind, count = kind_of(index), int(state.length)
    options = options_of(kind, index.config) | dict(batch=len(queries), k=k, multiprocessors=4)
    step = STEPS[kind](index.geometry, layout, most=count, **options)
    with on(device):
        step.select(queries, state)
    return step


@on_devices
@pytest.mark.parametrize(
    ("name", "pads"),
    [
        (f"{p}-{c}", pads)
        for p in ("paper", "accurate")
        for c in ("g4", "g1-B2")
        for pads in (0, 90)
    ],
)
def test_votes_and_candidates_are_the_references_to_the_bit(name, pads, device):
    """Given the same table, and offsets of the same products."""
    case, count, options = ALL[name]
    valid = left_padding([pads] * case.batch, count).to(device) if pads else None
    index, layout, state, _kept, k = made(name, case, count, options, device, valid=valid)
    step = stepped(index, layout, state, case.queries().to(device), k, device)
    B, G, g, M = case.batch, case.kv_heads, index.geometry.group_size, case.head_dim // 8
    table = step._table.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :g].unflatten(0, (B, G))
    signs, limits = index._codes["signs"], state.wanted.long()
    if name.startswith("paper"):
        votes = coarse.votes(signs, table)
        mine = step._votes.view(torch.uint8).view(B, G, -1, count, 4)
        mine = mine.transpose(3, 4).flatten(2, 3)[:, :, :g]
        assert table.shape == (B, G, g, M, 256)
        assert torch.equal(mine.int(), votes)
        wanted = select.candidates(votes, limits, valid)
    else:
        factors = index._factors[index._codes["weights"].long()]
        segments = -(-count // 256)
        products = step._products[:, :segments].unflatten(0, (B, G))  # [B, G, S, g]
        scaled = products.transpose(2, 3) * step._units.view(B, G, g, 1)
        offsets = scaled.round().int()
        votes = coarse.votes(signs, table, factors, offsets, 256).amax(2, keepdim=True)
        real = torch.ones(B, count, dtype=torch.bool, device=device) if valid is None else valid
        mine = step._votes.view(B, G, 1, count)
        assert torch.equal(
            mine[real[:, None, None].expand_as(mine)], votes[real[:, None, None].expand_as(votes)]
        )
        wanted = select.candidates(votes, limits, valid)
    for row, ids in enumerate(wanted.flatten(0, 1)):
        want = set(ids[ids >= 0].tolist())
        entries = step._kept[row, : int(step._many[row])]
        kept = {0xFFFFFFFF - (int(entry) & 0xFFFFFFFF) for entry in entries}
        if name.startswith("paper"):
            assert kept == want
        else:
            assert kept >= want


@on_devices
@pytest.mark.parametrize("preset", ["paper", "accurate"])  # one stage has no table
def test_a_table_of_the_query_is_the_references(preset, device):
    case, count, options = CASES["g3-D96"]
    index, layout, state, _kept, k = made(preset, case, count, options, device)
    queries = case.queries().to(device)
    step = stepped(index, layout, state, queries, k, device)
    folded = queries.view(1, 1, 3, 96)
    directions = ops.transform.normalize(folded)[0]
    rotated = ops.transform.rotate(directions, index._rotation)
    mine = step._table.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :3].unflatten(0, (1, 1))
    if preset == "paper":
        want = coarse.tier_table(rotated, index._histogram, index._limits(k)[0])
        assert (mine != want).float().mean() < 1e-3  # an order that the last bit turns
    else:
        want = coarse.dot_table(rotated, index.config.query_max)
        assert (mine - want).abs().max() <= 2  # a coordinate at a half
        assert (mine != want).float().mean() < 0.02


@on_devices
@pytest.mark.parametrize("preset", ["paper", "accurate"])
def test_ties_in_pieces_of_several_chunks(preset, device):
    """And so few centroids that most keys tie."""
    case, count = Case(q_heads=2, kv_heads=1, head_dim=16), 300_000
    index, layout, state, _kept, k = made(preset, case, count, {}, device)
    queries = case.queries().to(device)
    step = stepped(index, layout, state, queries, k, device)
    if preset == "paper":
        table = step._table.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :2].unflatten(0, (1, 1))
        votes = coarse.votes(index._codes["signs"], table)
        want = select.candidates(votes, state.wanted.long())[0, 0]
        kept = 0xFFFFFFFF - (step._kept[0, : int(step._many[0])] & 0xFFFFFFFF)
        assert torch.equal(kept.sort().values, want)
    mine = step.ids[0].sort().values
    want = index.search(queries, k=k).ids[0, 0].sort().values
    assert (mine[:, None] == want).any(-1).float().mean() > 0.9


# As an index

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)


@pytest.fixture
def blocks(device, monkeypatch):
    """The torch ops with the fused search beside them."""
    names, resolve = {name: getattr(ops, name) for name in ops.__all__}, backend.resolve
    names |= dict(fused=fused, store=store, ready=lambda device: None)
    both = SimpleNamespace(**names)
    monkeypatch.setattr(backend, "resolve", lambda name: both if name == "cuda" else resolve(name))
    if device == "cpu":
        monkeypatch.setattr(DeviceStore, "far", True)
    return device


def pair(preset, device, case=CASE, **options):
    options = dict(preset=preset, device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def moved(tokens, device):
    return tuple(piece.to(device) for piece in tokens)


def assert_same(mine, theirs, queries, k=20):
    assert mine._fused
    for name in theirs._codes:
        assert torch.equal(mine._codes[name], theirs._codes[name]), name
    assert_same_hits(mine.search(queries, k=k), theirs.search(queries, k=k), close=ROUNDED)


@each_preset
def test_it_follows_appends_truncation_reordering_and_reset(preset, blocks):
    mine, theirs = pair(preset, blocks)
    follow_changes(mine, theirs, CASE, blocks, assert_same)
    assert mine.nbytes()["codes"] > 0


@each_preset
def test_a_layer_attends_in_one_go(preset, blocks):
    layers = [
        AttentionLayer(index, k=20, sink=4, local_window=16, update_every=8, dense_below=64)
        for index in pair(preset, blocks)
    ]
    keys, values = moved(CASE.tokens(316), blocks)
    valid = left_padding([0, 9], 300).to(blocks)
    for layer in layers:
        queries = CASE.tensor(5, 2, 4, 300, 64).to(blocks)
        layer.step(queries, *part((keys, values), 0, 300), valid=valid)
    for t in range(300, 316):
        query = CASE.tensor(100 + t, 2, 4, 1, 64).to(blocks)
        mine, theirs = (layer.step(query, *part((keys, values), t, t + 1)) for layer in layers)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@each_preset
def test_nothing_that_a_search_reads_or_writes_moves(preset, blocks, monkeypatch):
    monkeypatch.setattr(ParisKV, "_defers", True)
    mine, theirs = pair(preset, blocks)
    tokens, queries = moved(CASE.tokens(700), blocks), CASE.queries().to(blocks)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
    mine.warm_up(k=20, tokens=700)
    resident = ResidentRows(mine.geometry, 2, 1)
    resident.add(*moved(CASE.tokens(1, seed=3), blocks), None)
    with Launches() as launches:
        mine.attend(queries, resident, k=20)
    assert launches.names == NAMES[preset]

    def addresses():
        state, step = mine._fused._state, mine._fused._uses[-1].step
        kept = {**vars(state), **vars(step)}
        del kept["output"], kept["found"]
        return [part.data_ptr() for part in kept.values() if isinstance(part, torch.Tensor)]

    where = addresses()
    for index in (mine, theirs):
        index.append(*part(tokens, 300, 700))
    assert_same(mine, theirs, queries)
    for index in (mine, theirs):
        index.truncate(290)
    assert_same(mine, theirs, queries)
    assert addresses() == where


@each_preset
def test_a_step_sees_no_more_tokens_than_it_has_room_for(preset, blocks):
    """As in a graph of a smaller index; a call makes room."""
    mine, theirs = pair(preset, blocks)
    tokens, queries = moved(CASE.tokens(1300), blocks), CASE.queries().to(blocks)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
    mine.warm_up(k=20, tokens=300)
    use, state = mine._fused._ready(mine, 20)
    mine.append(*part(tokens, 300, 1300))
    theirs.append(*part(tokens, 300, 1300))
    use.step.select(queries, replace(state, wanted=use.wanted))
    assert use.step.most == 300
    assert int(use.step.ids[:, :20].max()) < 300
    assert int(use.step.ids[:, :20].min()) >= 0
    assert_same(mine, theirs, queries)
    assert mine._fused._newest(20).step.most == 2600


@pytest.mark.parametrize("preset", ["fast", "precise"])
def test_one_stage_gives_way_to_two_where_the_index_outgrows_it(preset, blocks):
    mine, theirs = pair(preset, blocks, single_stage_below=400)
    tokens, queries = moved(CASE.tokens(900), blocks), CASE.queries().to(blocks)
    plain = pair("scan", blocks, magnitude_bits=mine.config.magnitude_bits)[1]
    resident, names = ResidentRows(mine.geometry, 2, 1), []
    resident.add(*moved(CASE.tokens(1, seed=3), blocks), None)
    for start, stop in ((0, 300), (300, 400), (400, 900)):
        for index in (mine, theirs, plain):
            index.append(*part(tokens, start, stop))
        if not start:
            mine.warm_up(k=20, tokens=900)
            made = [(use.kind, use.step.most) for use in mine._fused._uses]
            assert made == [("votes", 400), ("all", 900)]
        assert_same(mine, theirs, queries)
        if stop <= 400:
            assert_same_hits(theirs.search(queries, k=20), plain.search(queries, k=20))
        with Launches() as launches:
            mine.attend(queries, resident, k=20)
        names.append(launches.names)
    assert names[:2] == [NAMES["scan"]] * 2
    assert names[2][:2] == ["ask", "scan"]
    assert len(mine._fused._uses) == 2
    for index in (mine, theirs):
        index.truncate(350)
    assert_same(mine, theirs, queries)


def test_a_padded_row_is_reranked_whole_where_it_is_short_itself(blocks):
    mine, theirs = pair("fast", blocks, single_stage_below=200)
    valid = left_padding([0, 250], 400).to(blocks)
    for index in (mine, theirs):
        index.append(*moved(CASE.tokens(400), blocks), valid=valid)
    assert theirs._wanted(5) == [20, 150]
    assert_same(mine, theirs, CASE.queries().to(blocks), k=5)


def test_the_kernel_that_appends_serves_scan_alone(blocks):
    served = {preset: writer(pair(preset, blocks)[0]) is not None for preset in LISTS}
    assert served == dict(scan=True, paper=False, accurate=False)


@pytest.mark.parametrize("weight_bytes", [1, 2])
@pytest.mark.parametrize("counts", [[1], [300, 0, 900], [256, 600]], ids=str)
def test_codes_with_a_weight_for_each_subspace_are_what_was_appended(counts, weight_bytes):
    layout = SubspaceLayout(40, 3, weight_bytes, weight_bytes == 1)
    blocks, draw, pieces = (
        CodeBlocks(layout, 3, torch.device("cpu"), 4096),
        torch.manual_seed(0),
        [],
    )
    for count in counts:

        def some(*shape, n=count):
            return torch.randint(0, 256, (2, 3, n, *shape), generator=draw).to(torch.uint8)

        weights = some(5)
        if weight_bytes == 2:
            weights = torch.randn(2, 3, count, 5, generator=draw).bfloat16()
        pieces.append({"signs": some(5), "magnitudes": some(3, 5), "weights": weights})
        blocks.append(pieces[-1])
    assert list(blocks) == ["signs", "magnitudes", "weights"]
    for name in blocks:
        want = torch.cat([piece[name] for piece in pieces], dim=2)
        assert torch.equal(blocks[name], want), name
    assert blocks.nbytes() == 6 * sum(counts) * (8 * 4 + -(-5 * weight_bytes // 4) * 4)


@pytest.mark.parametrize(
    "options",
    [
        dict(preset="paper", candidates_per="group"),
        dict(preset="accurate", candidates_per="head"),
        dict(preset="accurate", weight_bits=16),
        dict(preset="scan", block="subspace"),
        dict(preset="paper", group="union"),
    ],
    ids=str,
)
def test_what_no_step_serves(options):
    assert kind_of(CASE.index("pariskv", **options)) is None


# In a graph


@pytest.mark.gpu
@each_preset
@pytest.mark.parametrize("place", ["host", "device"])
def test_replays_follow_queries_and_tokens(preset, place):
    options = dict(preset=preset, device="cuda", store=place)
    both = [LARGE.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]
    tokens, resident = moved(LARGE.tokens(TOKENS), "cuda"), near_rows()
    for index in both:
        index.append(*part(tokens, 0, 3000), valid=left_padding([0, 70], 3000, "cuda"))
    queries = LARGE.queries().to("cuda")
    replay = Replayed(both[:1], queries, resident)
    assert_eager(*both, replay, queries, resident)
    first, second = replay(), replay()
    assert torch.equal(first[1][0], second[1][0])
    for seed, known in ((1, 3001), (2, 4000), (3, TOKENS)):
        queries.copy_(LARGE.queries(seed=seed))
        new = part(tokens, len(both[0]), known)
        for index in both:
            index.append(*new)
        assert_eager(*both, replay, queries, resident)
    for index in both:
        index.truncate(2500)
    assert assert_eager(*both, replay, queries, resident).max() < 2500


@pytest.mark.gpu
@each_preset
def test_a_search_allocates_nothing_and_waits_for_nothing(preset):
    index = LARGE.index("pariskv", backend="cuda", preset=preset, device="cuda", store="host")
    index.append(*moved(LARGE.tokens(5000), "cuda"))
    queries, resident = LARGE.queries().to("cuda"), near_rows()
    index.attend(queries, resident, k=K)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            index.attend(queries, resident, k=K)
            index.search(queries, k=K)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before

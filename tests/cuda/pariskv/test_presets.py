"""The decode step of the preset `paper`: by stages, as an index, and in a graph.

The setting is that of `test_sign_votes.py`.
"""

from dataclasses import replace

import pytest
import torch

from kvindex import ops
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.ops import coarse, select
from kvindex.pariskv.index import ParisKV
from kvindex.testing.contract.attending import check_attention_where_few_tokens_are_valid
from kvindex_cuda.memory.code_blocks import CodeBlocks
from kvindex_cuda.memory.layout import SubspaceLayout
from kvindex_cuda.pariskv.dispatch import STEPS, kind_of, options_of
from tests.cuda import emulator
from tests.cuda.devices import (
    on,
    on_devices,
    on_devices_slowly,
    slow_on_cpu,
    torch_ops_and_an_executor,
)
from tests.cuda.launches import Launches
from tests.cuda.pariskv.steps.test_reference import CASES as TWINS
from tests.cuda.pariskv.steps.test_sign_votes import assert_close, expected, run, setting
from tests.cuda.pariskv.test_capture import CASE as LARGE
from tests.cuda.pariskv.test_capture import TOKENS, K, Replayed, assert_eager, near_rows
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    follow_changes,
    left_padding,
    part,
    slow_as,
)

NAMES = ["query_table", "vote", "candidates", "rerank_blocks", "select_rows", "attend"]

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


WHOLE = {"one", "1025", "bits"}
"""Beside what `test_reference.py` compares launch by launch, the ends: the others are slow, and not
in CI where a case of that file is the same."""


def made(case, count, device, **options):
    return setting(
        case, count, device=device, **dict(preset="paper", candidates_per="head") | options
    )


@on_devices
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in WHOLE else slow_as(n in TWINS)) for n in CASES]
)
def test_a_step_selects_and_attends_as_the_reference(name, device):
    case, count, options = CASES[name]
    index, layout, state, _kept, k = made(case, count, device, **options)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@on_devices
def test_padded_tokens_and_hidden_rows_are_never_read(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3)
    valid = left_padding([0, 130, 600], 600).to(device)
    index, layout, state, _kept, k = made(case, 600, device, valid=valid)
    state.resident_mask[1, ::3] = 0
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)
    assert got[1][4] == got[1][5] == []


@on_devices
def test_fewer_keys_than_rows(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
    valid = left_padding([0, 290], 300).to(device)
    index, layout, state, _kept, _ = made(case, 300, device, valid=valid)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, 200, device=device)
    assert [len(row) for row in got[1]][2:] == [10, 10]


@on_devices
def test_ties_go_to_the_lower_ids(device):
    """Nearly all keys are equal, in more than one chunk."""
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    keys, values = case.tokens(2540)
    keys[:, :, 5:] = keys[:, :, 5:6]
    tokens = keys, values
    index, layout, state, _kept, k = made(case, 2500, device, tokens=tokens)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@on_devices
def test_a_zero_query_gives_numbers(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    index, layout, state, _kept, k = made(case, 300, device)
    queries = torch.zeros_like(case.queries()).to(device)
    output, ids = run(index, layout, state, queries, k, device=device)
    assert [len(row) for row in ids] == [k, k]
    want = expected(index, queries, state, k)[1]
    torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@on_devices
def test_a_query_that_is_not_finite_is_told_and_harms_no_other_group(device):
    case, count, options = CASES["g4"]
    index, layout, state, _kept, k = made(case, count, device, **options)
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
def test_neither_the_order_of_threads_nor_of_blocks_changes_ids():
    case, count, options = CASES["1025"]
    index, layout, state, _kept, k = made(case, count, "cpu", **options)
    found = [
        run(index, layout, state, case.queries(), k, order=order)
        for order in ("forward", "backward", "random")
    ]
    assert found[0][1] == found[1][1] == found[2][1]


def stepped(index, layout, state, queries, k, device):
    """Return a step that has run, in order to read its buffers."""
    kind, count = kind_of(index.config, index.geometry), int(state.length)
    options = options_of(kind, index.config) | dict(batch=len(queries), k=k, multiprocessors=4)
    step = STEPS[kind](index.geometry, layout, most=count, **options)
    with on(device):
        step.select(queries, state)
    return step


def table_of(step, queries, group):
    """Return the table of a step that has run, in the form of `ops.coarse.tier_table`."""
    both = step.table.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :group]
    return both.unflatten(0, (len(queries), -1))


@on_devices
@pytest.mark.parametrize("name", ["g4", "g1-B2"])
@pytest.mark.parametrize("pads", [0, 90])
def test_votes_and_candidates_are_the_references_to_the_bit(name, pads, device):
    """Votes are equal, given the same table."""
    case, count, options = CASES[name]
    valid = left_padding([pads] * case.batch, count).to(device) if pads else None
    index, layout, state, _kept, k = made(case, count, device, valid=valid, **options)
    queries = case.queries().to(device)
    step = stepped(index, layout, state, queries, k, device)
    B, G, g, M = case.batch, case.kv_heads, index.geometry.group_size, case.head_dim // 8
    table = table_of(step, queries, g)
    assert table.shape == (B, G, g, M, 256)
    votes = coarse.votes(index._codes["signs"], table)
    mine = step.votes.view(torch.uint8).view(B, G, -1, count, 4)
    mine = mine.transpose(3, 4).flatten(2, 3)[:, :, :g]
    assert torch.equal(mine.int(), votes)
    wanted = select.candidates(votes, state.wanted.long(), valid)
    for row, ids in enumerate(wanted.flatten(0, 1)):
        entries = step.candidates[row, : int(step.candidate_counts[row])]
        kept = {0xFFFFFFFF - (int(entry) & 0xFFFFFFFF) for entry in entries}
        assert kept == set(ids[ids >= 0].tolist())


@on_devices
def test_a_table_of_the_query_is_the_references(device):
    case, count, options = CASES["g3-D96"]
    index, layout, state, _kept, k = made(case, count, device, **options)
    queries = case.queries().to(device)
    step = stepped(index, layout, state, queries, k, device)
    directions = ops.transform.normalize(queries.view(1, 1, 3, 96))[0]
    rotated = ops.transform.rotate(directions, index.encoding.rotation)
    tiers = index.config.limits(index.counts, k)[0].to(device)
    want = coarse.tier_table(rotated, index._histogram, tiers)
    mine = table_of(step, queries, 3)
    assert (mine != want).float().mean() < 1e-3  # the order depends on the last bit


@on_devices_slowly
def test_ties_in_pieces_of_several_chunks(device):
    """There are so few centroids that most keys have equal votes."""
    case, count = Case(q_heads=2, kv_heads=1, head_dim=16), 300_000
    index, layout, state, _kept, k = made(case, count, device)
    queries = case.queries().to(device)
    step = stepped(index, layout, state, queries, k, device)
    votes = coarse.votes(index._codes["signs"], table_of(step, queries, 2))
    want = select.candidates(votes, state.wanted.long())[0, 0]
    kept = 0xFFFFFFFF - (step.candidates[0, : int(step.candidate_counts[0])] & 0xFFFFFFFF)
    assert torch.equal(kept.sort().values, want)
    mine = step.ids[0].sort().values
    want = index.search(queries, k=k).ids[0, 0].sort().values
    assert (mine[:, None] == want).any(-1).float().mean() > 0.9


# As an index

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)


@pytest.fixture
def blocks(device, monkeypatch):
    """The torch ops together with the executor."""
    torch_ops_and_an_executor(monkeypatch, on_host=device == "cpu")
    return device


def pair(device, case=CASE, **options):
    options = dict(preset="paper", device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def moved(tokens, device):
    return tuple(piece.to(device) for piece in tokens)


def assert_same(mine, theirs, queries, k=20):
    assert mine._executor
    for name in theirs._codes:
        assert torch.equal(mine._codes[name], theirs._codes[name]), name
    assert_same_hits(mine.search(queries, k=k), theirs.search(queries, k=k), close=ROUNDED)


def test_it_follows_appends_truncation_reordering_and_reset(blocks):
    mine, theirs = pair(blocks)
    follow_changes(mine, theirs, CASE, blocks, assert_same)
    assert mine.nbytes()["codes"] > 0


@slow_on_cpu
def test_a_layer_attends_in_one_go(blocks):
    layers = [
        AttentionLayer(index, k=20, sink=4, local_window=16, update_every=8, dense_below=64)
        for index in pair(blocks)
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


@slow_on_cpu
def test_it_attends_where_few_tokens_are_valid(blocks):
    case = replace(CASE, device=blocks)
    check_attention_where_few_tokens_are_valid(
        lambda **others: case.index("pariskv", preset="paper", backend="cuda", **others), case
    )


def test_nothing_that_a_search_reads_or_writes_moves(blocks, monkeypatch):
    monkeypatch.setattr(ParisKV, "_defers", True)
    mine, theirs = pair(blocks)
    tokens, queries = moved(CASE.tokens(700), blocks), CASE.queries().to(blocks)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
    mine.warm_up(k=20, tokens=700)
    resident = ResidentRows(mine.geometry, 2, 1)
    resident.add(*moved(CASE.tokens(1, seed=3), blocks), None)
    with Launches() as launches:
        mine.attend(queries, resident, k=20)
    assert launches.names == NAMES

    def addresses():
        state, step = mine._executor._state, mine._executor._uses[-1].step
        kept = {**vars(state), **vars(step)}
        del kept["output"], kept["lse"], kept["found"]
        return [part.data_ptr() for part in kept.values() if isinstance(part, torch.Tensor)]

    where = addresses()
    for index in (mine, theirs):
        index.append(*part(tokens, 300, 700))
    assert_same(mine, theirs, queries)
    for index in (mine, theirs):
        index.truncate(290)
    assert_same(mine, theirs, queries)
    assert addresses() == where


def test_a_step_sees_no_more_tokens_than_it_has_room_for(blocks):
    """The step's buffers are full, as in a graph of a smaller index; a call makes room."""
    mine, theirs = pair(blocks)
    tokens, queries = moved(CASE.tokens(1300), blocks), CASE.queries().to(blocks)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
    mine.warm_up(k=20, tokens=300)
    use, state = mine._executor._ready(20)
    mine.append(*part(tokens, 300, 1300))
    theirs.append(*part(tokens, 300, 1300))
    use.step.select(queries, replace(state, wanted=use.wanted))
    assert use.step.most == 300
    assert int(use.step.ids[:, :20].max()) < 300
    assert int(use.step.ids[:, :20].min()) >= 0
    assert_same(mine, theirs, queries)
    assert mine._executor._newest(20).step.most == 2600


def test_no_kernel_appends_its_codes(device):
    mine = CASE.index("pariskv", preset="paper", backend="cuda", device=device)
    assert not mine._executor.encodes


@pytest.mark.parametrize("counts", [[1], [300, 0, 900], [256, 600]], ids=str)
def test_codes_with_a_weight_for_each_subspace_are_what_was_appended(counts):
    layout = SubspaceLayout(40, 3)
    blocks, draw, pieces = (
        CodeBlocks(layout, 3, torch.device("cpu"), 4096),
        torch.manual_seed(0),
        [],
    )
    for count in counts:

        def some(*shape, n=count):
            return torch.randint(0, 256, (2, 3, n, *shape), generator=draw).to(torch.uint8)

        weights = torch.randn(2, 3, count, 5, generator=draw).bfloat16()
        pieces.append({"signs": some(5), "magnitudes": some(3, 5), "weights": weights})
        blocks.append(pieces[-1])
    assert list(blocks) == ["signs", "magnitudes", "weights"]
    for name in blocks:
        want = torch.cat([piece[name] for piece in pieces], dim=2)
        assert torch.equal(blocks[name], want), name
    assert blocks.nbytes() == 6 * sum(counts) * (8 * 4 + 12)


@pytest.mark.parametrize(
    "options",
    [
        dict(preset="paper", candidates_per="group"),
        dict(preset="paper", weights="log", weight_bits=8),
        dict(preset="paper", group="union"),
        dict(preset="paper", single_stage_below=100),
        dict(preset="fast", single_stage_below=100),
        dict(preset="accurate"),
        dict(preset="scan"),
    ],
    ids=str,
)
def test_what_no_step_serves(options):
    index = CASE.index("pariskv", **options)
    assert kind_of(index.config, index.geometry) is None


# In a graph


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "device"])
def test_replays_follow_queries_and_tokens(place):
    options = dict(preset="paper", device="cuda", store=place)
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
def test_a_search_allocates_nothing_and_waits_for_nothing():
    index = LARGE.index("pariskv", backend="cuda", preset="paper", device="cuda", store="host")
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

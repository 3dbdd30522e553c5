"""Compare ParisKV on compiled kernels with plain torch: search, attention, changes and errors."""

from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.protocol import Attends, Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu.pariskv.executor import stage_token
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    follow_changes,
    left_padding,
    part,
)
from tests.support.sequences import Sequence

CASE = Case(q_heads=6, kv_heads=2, head_dim=64, batch=2)

PRESETS = "fast", "paper", "sampled"
"""A preset for each kind of coarse stage, and one that samples."""


def pair(case=CASE, **options):
    """Make the index on kernels and in plain torch, with options so that some tokens are no
    candidates."""
    options = dict(least_candidates=1) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cpu", "torch")]


def padded(count):
    """Return flags bool `[2, count]`: the second sequence is padded on the left, both in
    between."""
    valid = left_padding([0, 70], count)
    valid[0, 250:290] = valid[1, 300:303] = valid[1, 391:] = False
    return valid


def assert_same(mine, theirs, queries, k=20):
    assert mine._executor
    assert not theirs._executor
    assert_same_hits(mine.search(queries, k=k), theirs.search(queries, k=k), close=ROUNDED)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (dict(head_dim=64), {}),
        (dict(head_dim=64, q_heads=2), dict(preset="precise")),
        (dict(head_dim=128, q_heads=14), dict(center=0)),
        (dict(head_dim=80, q_heads=2), dict(center=100, group="max_share")),
        (dict(head_dim=8, value_dim=3), dict(query_max=127, magnitude_bits=0)),
        (dict(head_dim=24, softcap=5.0), dict(center=1, magnitude_bits=7)),
        (dict(head_dim=256, dtype=torch.bfloat16), dict(center=512)),
        (dict(head_dim=64, dtype=torch.float16), dict(beta=0.5)),
        (dict(head_dim=64), dict(preset="paper")),
        (dict(head_dim=80, q_heads=22), dict(preset="paper", group="max_share", beta=0.01)),
        (dict(head_dim=128, value_dim=3, softcap=5.0), dict(preset="paper", magnitude_bits=0)),
        (dict(head_dim=64), dict(refine_factor=2)),
        (dict(head_dim=128, q_heads=14), dict(sampling="priority", refine_factor=1)),
        (dict(head_dim=64, q_heads=2), dict(center=0, beta=0.1, seed=3)),
        (dict(head_dim=80, softcap=5.0), dict(center=100, group="max_share", least_candidates=100)),
        (dict(head_dim=8, value_dim=3), dict(sampling="priority", query_max=127, magnitude_bits=0)),
        (dict(head_dim=24, dtype=torch.bfloat16), dict(sign_decoder="regression", center=32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 256, 700])
def test_a_search_is_the_reference_search(sizes, options, tokens):
    case = replace(CASE, **sizes)
    mine, theirs = pair(case, **options)
    for index in (mine, theirs):
        index.append(*case.tokens(tokens))
    for k in (1, 20, tokens):
        assert_same(mine, theirs, case.queries(), k)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_follows_appends_truncation_reordering_and_reset(preset):
    follow_changes(*pair(preset=preset), CASE, "cpu", assert_same)


@pytest.mark.parametrize("preset", PRESETS)
def test_many_queries_at_once(preset):
    case = replace(CASE, batch=1)
    mine, theirs = pair(case, preset=preset)
    for index in (mine, theirs):
        index.append(*case.tokens(300))
    queries = case.queries(batch=3)
    found = [index.expand_batch(3).search(queries, k=9) for index in (mine, theirs)]
    assert_same_hits(*found, close=ROUNDED)
    assert_same(mine, theirs, queries[:1])


@pytest.mark.parametrize("preset", PRESETS)
def test_of_queries_of_zeros_and_equal_keys_the_best_have_the_lower_ids(preset):
    mine, theirs = pair(preset=preset)
    keys, values = CASE.tokens(600)
    keys = keys[:, :, :1].expand_as(keys).contiguous()
    for index in (mine, theirs):
        index.append(keys, values)
    for queries in (CASE.queries() * 0, CASE.queries()):
        assert_same(mine, theirs, queries)
        first = mine.search(queries, k=5).ids.sort(-1).values[0, 0].tolist()
        assert (first == list(range(5))) == (preset != "sampled")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_of_the_batch_without_a_valid_token_finds_nothing(preset):
    mine, theirs = pair(preset=preset)
    for index in (mine, theirs):
        index.append(*CASE.tokens(300), valid=left_padding([300, 10], 300))
    assert_same(mine, theirs, CASE.queries())
    assert (mine.search(CASE.queries(), k=3).ids[0] == -1).all()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(dtype=torch.bfloat16, softcap=2.0),
        dict(dtype=torch.float16, value_dim=24),
        dict(head_dim=8, q_heads=2, value_dim=5),
    ],
    ids=str,
)
@pytest.mark.parametrize("k", [7, 5000])
def test_it_attends_to_what_it_finds_and_to_resident_rows(sizes, k):
    case = replace(CASE, **sizes)
    index, _ = pair(case, preset="fast")
    keys, values = case.tokens(430)
    index.append(*part((keys, values), 0, 400), valid=padded(400))
    resident, queries = ResidentRows(index.geometry, 2, 40), case.queries()
    shown = left_padding([3, 0], 30)
    resident.add(*part((keys, values), 400, 430), shown)
    hits = index.search(queries, k=min(k, 400))
    hits = replace(hits, log_weight=case.tensor(3, 2, case.q_heads, hits.ids.shape[-1]).float())
    for found, weights in ((index.attend(queries, resident, k=k), 0), (None, hits.log_weight)):
        found = found or index.attend_hits(queries, hits, resident)
        rows = index.fetch(hits)
        seen = torch.cat([hits.ids >= 0, shown[:, None].expand(-1, case.kv_heads, -1)], dim=2)
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        bias = bias.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
        bias[..., : hits.ids.shape[-1]] += weights
        both = [
            torch.cat(two, dim=2)
            for two in ((rows.keys, keys[:, :, 400:]), (rows.values, values[:, :, 400:]))
        ]
        g = index.geometry
        output, lse = attend(
            queries, *both, scale=g.scale, softcap=g.softcap, bias=bias, return_lse=True
        )
        torch.testing.assert_close(found.output, output, rtol=1e-2, atol=3e-3)
        torch.testing.assert_close(found.lse, lse, rtol=1e-4, atol=1e-4)
        assert found.found.tolist() == (hits.ids >= 0).sum(-1).tolist()


@pytest.mark.parametrize("k", [7, 5000])
def test_it_attends_to_rows_that_it_samples_with_their_weights(k):
    index, _ = pair(preset="sampled")
    index.append(*CASE.tokens(400), valid=padded(400))
    resident = ResidentRows(index.geometry, 2, 40)
    resident.add(*CASE.tokens(30, seed=2), None)
    queries = CASE.queries()
    hits = index.search(queries, k=min(k, 400))
    assert (hits.log_weight > 0).any() == (k == 7)
    mine, want = index.attend(queries, resident, k=k), index.attend_hits(queries, hits, resident)
    torch.testing.assert_close(mine.output, want.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.lse, want.lse, rtol=1e-5, atol=1e-6)
    assert torch.equal(mine.found, want.found)


@pytest.mark.parametrize("preset", ["fast", "sampled"])
def test_a_query_that_sees_no_row_gives_0(preset):
    index, _ = pair(preset=preset)
    index.append(*CASE.tokens(20), valid=left_padding([20, 0], 20))
    found = index.attend(CASE.queries(), ResidentRows(index.geometry, 2, 1), k=3)
    assert (found.output[0] == 0).all()
    assert (found.lse[0] == float("-inf")).all()
    assert found.found.tolist() == [[0, 0], [3, 3]]


@pytest.mark.parametrize("options", [{}, dict(sampling="priority"), dict(preset="paper")], ids=str)
def test_without_a_valid_row_a_step_attends_to_resident_rows(options):
    index, _ = pair(**options)
    index.append(*CASE.tokens(300), valid=left_padding([300, 300], 300))
    resident, window = (ResidentRows(index.geometry, 2, 2) for _ in range(2))
    keys, values = CASE.tokens(1, seed=1)
    rows = window.rows[:, :, :1]
    token, place = Rows(keys, values), Rows(rows[..., :64], rows[..., 64:])
    for found in (
        index.decode_step(CASE.queries(), token, resident, place, k=9),
        index.attend(CASE.queries(), resident, k=1),
    ):
        want = values[:, :, 0].repeat_interleave(3, dim=1)  # attention to one row
        torch.testing.assert_close(found.output, want)
        assert found.found.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("options", [{}, dict(sampling="priority"), dict(preset="paper")], ids=str)
def test_a_pool_attends_where_some_or_all_sequences_have_no_valid_row(options):
    pools = [kvindex.Pool(index) for index in pair(**options)]
    for all_padded in (True, False):
        found = []
        for pool in pools:
            both = [pool.open(), pool.open()]
            pads = [5, 5 if all_padded else 2]
            pool.append(both, *CASE.tokens(5), valid=left_padding(pads, 5))
            assert (pool.search(both, CASE.queries(), k=9).ids[0] == -1).all()
            found.append(pool.attend(both, CASE.queries(), k=9))
        mine, theirs = found
        torch.testing.assert_close(mine.output, theirs.output)
        torch.testing.assert_close(mine.lse, theirs.lse)
        assert mine.found.tolist() == theirs.found.tolist()
        assert (mine.lse[0] == float("-inf")).all()


@pytest.mark.parametrize("options", [{}, dict(sampling="priority"), dict(preset="paper")], ids=str)
def test_a_pool_of_layers_steps_where_some_or_all_indexes_have_no_valid_row(options):
    sizes = dict(k=9, sink=4, local_window=1, update_every=1, dense_below=0)
    case = replace(CASE, batch=1)
    made = [case.index("pariskv", backend=name, **options) for name in ("cpu", "torch")]
    pools = [kvindex.LayerPool(AttentionLayer(index, **sizes)) for index in made]
    first, second = ([pool.open() for pool in pools] for _ in range(2))
    for t in range(12):
        tokens = case.tensor(50 + t, 1, 6, 1, 64), *case.tokens(1, seed=t)
        outputs = [pool.step([one], *tokens) for pool, one in zip(pools, first, strict=True)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        if t > 4:  # the second sequence is 5 tokens behind
            both = [torch.cat([part, part]) for part in tokens]
            outputs = [
                pool.step([*some], *both)
                for pool, some in zip(pools, zip(first, second, strict=True), strict=True)
            ]
            torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("preset", ["fast", "sampled"])
def test_a_layer_on_kernels_is_the_layer_in_plain_torch(dtype, softcap, preset):
    case = replace(CASE, dtype=dtype, softcap=softcap)
    mine, theirs = pair(case, preset=preset)
    layers = [
        AttentionLayer(index, k=20, sink=4, local_window=16, update_every=8, dense_below=64)
        for index in (mine, theirs)
    ]
    tokens = case.tokens(316)
    for layer in layers:
        queries = case.tensor(5, 2, 6, 300, 64)
        layer.step(queries, *part(tokens, 0, 300), valid=left_padding([0, 9], 300))
    for t in range(300, 316):
        query = case.tensor(100 + t, 2, 6, 1, 64)
        outputs = [layer.step(query, *part(tokens, t, t + 1)) for layer in layers]
        torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-3)
    mine, theirs = (layer.traffic for layer in layers)
    assert mine.steps == theirs.steps == 16
    assert float(mine.rows_read) == float(theirs.rows_read)


@pytest.mark.parametrize("preset", PRESETS)
def test_results_stay_as_they_are(preset):
    index, _ = pair(preset=preset)
    index.append(*CASE.tokens(300))
    resident = ResidentRows(index.geometry, 2, 1)
    first = index.attend(CASE.queries(), resident, k=9)
    hits = index.search(CASE.queries(), k=9)
    results = first.output, first.lse, hits.ids, hits.scores
    results += () if hits.log_weight is None else (hits.log_weight,)
    before = [result.clone() for result in results]
    index.attend(CASE.queries(1), resident, k=9)
    index.search(CASE.queries(1), k=9)
    for now, then in zip(results, before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(preset="scan"), "coarse: got 'none'"),
        (dict(preset="paper", block="key"), "block: got 'key'"),
        (dict(preset="fast", candidates_per="head"), "candidates_per: got 'head'"),
        (dict(preset="fast", group="union"), "group: got 'union'"),
        (dict(single_stage_below=9), "single_stage_below: got 9"),
    ],
    ids=str,
)
def test_what_kernels_do_not_serve_runs_op_by_op_and_says_why(options, said):
    mine, theirs = pair(**options)
    assert said in mine.explain()
    for index in (mine, theirs):
        index.append(*CASE.tokens(300))
    hits = [index.search(CASE.queries(), k=9) for index in (mine, theirs)]
    assert_same_hits(*hits, close=ROUNDED)


def test_rows_as_codes_are_fetched_and_said_so():
    mine, theirs = pair(row_codec="int8")
    assert "row_codec: got 'int8'" in mine.explain()
    assert mine.capability(Attends) is None
    for index in (mine, theirs):
        index.append(*CASE.tokens(300))
    assert_same(mine, theirs, CASE.queries())


def test_kernels_are_the_default_and_say_so():
    said = kvindex.create("pariskv", **CASE.geometry()).explain()
    assert said.startswith("backend: cpu (kernels run on 'cpu')")
    assert "executor: compiled by Numba" in said


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="device: got meta with backend='cpu'"):
        kvindex.create("exact", **CASE.geometry() | dict(device="meta"), backend="cpu")


def test_a_token_of_another_shape_changes_nothing():
    index, _ = pair()
    resident = ResidentRows(index.geometry, 2, 1)
    rows = kvindex.Rows(*CASE.tokens(1))
    wrong = kvindex.Rows(rows.keys, rows.values[..., :3])
    with pytest.raises(ValueError, match="values: got"):
        stage_token(wrong, resident, rows)
    resident.add(rows.keys, rows.values, None)
    with pytest.raises(ValueError, match="resident: got 1 rows"):
        stage_token(rows, resident, rows)
    assert len(resident) == 1


@pytest.mark.parametrize("preset", ["fast", "sampled"])
def test_a_layers_step_of_several_tokens_is_as_many_of_one(preset):
    case = Case(q_heads=6, kv_heads=3, head_dim=64, value_dim=64, batch=2)
    sequence, layers = Sequence.of(case, 605), []
    for up_to in (5, 1):
        index = case.index("pariskv", preset=preset, backend="cpu")
        sizes = dict(local_window=16, dense_below=0, search_up_to=up_to)
        layers.append(AttentionLayer(index, k=30, **sizes))
        sequence.feed(layers[-1], 0, 600)
    want = [sequence.feed(layers[1], i, i + 1) for i in range(600, 605)]
    assert torch.equal(sequence.feed(layers[0], 600, 605), torch.cat(want, dim=2))
    assert layers[0].traffic.steps == 5

"""Compare the specification of the fused step with ParisKV's single stages."""

from dataclasses import replace

import pytest
import torch

from kvindex.ops import coarse, codes, select
from kvindex.pariskv.block_layout import BLOCK, Layout, SubspaceLayout, flags_of, words_of
from kvindex.pariskv.decode_step import (
    Selected,
    attend,
    decode_step,
    find_rows,
    prepare_query,
    rerank,
    scan,
)
from kvindex.pariskv.sign_votes import integers_of, planes_of
from kvindex.pariskv.step_state import (
    BELOW,
    EMPTY,
    LEAST,
    buckets_of,
    cut_of,
    descending,
    entry_of,
    id_of,
    operands_of,
    queries_of,
    rotated,
    up_of,
    vote_of,
)
from kvindex.storage.codecs import CODES
from tests.support.helpers import Case, hits_of, left_padding, sampled
from tests.support.steps import Layer, codes_of

PRESETS = ("fast", "precise", "sampled", "paper")

CASES = {
    "g1": (Case(q_heads=2, kv_heads=2, head_dim=64), 900, {}),
    "g3": (Case(q_heads=3, kv_heads=1, head_dim=96), 600, {}),
    "g4-B2": (Case(q_heads=8, kv_heads=2, head_dim=64, batch=2), 700, {}),
    "softcap": (Case(q_heads=4, kv_heads=2, head_dim=64, softcap=2.0), 500, {}),
    "max_share": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(group="max_share")),
    "bfloat16": (Case(4, 2, 64, 24, torch.bfloat16), 500, {}),
    "one": (Case(q_heads=4, kv_heads=2, head_dim=64), 1, {}),
    "fewer than k": (Case(q_heads=4, kv_heads=2, head_dim=64), 11, {}),
    "256": (Case(q_heads=4, kv_heads=2, head_dim=64), 256, {}),
    "257": (Case(q_heads=4, kv_heads=2, head_dim=64), 257, {}),
    "long": (Case(q_heads=4, kv_heads=1, head_dim=32), 40_000, {}),
}


def assert_as_searched(layer):
    hits, output, lse = layer.searched()
    chosen = find_rows(layer.queries, layer.state, layer.k, layer.config)
    order = torch.where(hits.ids < 0, len(layer.index), hits.ids).argsort(-1)
    assert torch.equal(chosen.ids, hits.ids.gather(-1, order))
    torch.testing.assert_close(chosen.scores, hits.scores.gather(-1, order), rtol=1e-5, atol=1e-5)
    assert torch.equal(chosen.found.long(), (hits.ids >= 0).sum(-1))
    got = decode_step(layer.queries, layer.state, layer.k, layer.config)
    close = 1e-5 if layer.queries.dtype == torch.float32 else 1e-2
    assert got.output.dtype == layer.queries.dtype
    torch.testing.assert_close(got.output.double(), output, rtol=close, atol=close)
    torch.testing.assert_close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.found, chosen.found)


@pytest.mark.parametrize(("name", "preset"), sampled(CASES, PRESETS))
def test_a_step_gives_what_the_ops_give(name, preset):
    case, count, options = CASES[name]
    assert_as_searched(Layer.of(case, count, preset=preset, **options))


@pytest.mark.parametrize("preset", PRESETS)
def test_padding_is_never_found(preset):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3)
    valid = left_padding([0, 130, 595], 600)
    layer = Layer.of(case, 600, valid=valid, preset=preset)
    assert_as_searched(layer)
    found = find_rows(layer.queries, layer.state, layer.k, layer.config).found
    assert found.tolist() == [[20, 20], [20, 20], [5, 5]]


@pytest.mark.parametrize("preset", PRESETS)
def test_equal_keys_go_to_the_lower_ids(preset):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    keys, values = case.tokens(1340)
    keys[:, :, 5:] = keys[:, :, 5:6]
    assert_as_searched(Layer.of(case, 1300, tokens=(keys, values), preset=preset))


@pytest.mark.parametrize(("row_codec", "preset"), sampled(["plain", *CODES], PRESETS))
def test_rows_are_decoded(row_codec, preset):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=40)
    assert_as_searched(Layer.of(case, 300, row_codec=row_codec, preset=preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_zero_query_gives_numbers(preset):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    assert_as_searched(Layer.of(case, 300, queries=0 * case.queries(), preset=preset))


@pytest.mark.parametrize(("bad", "preset"), sampled([torch.nan, torch.inf, 1e20], PRESETS))
def test_a_query_out_of_range_harms_no_other_group(preset, bad):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    queries = case.queries()
    layer = Layer.of(case, 300, preset=preset)
    want = find_rows(queries, layer.state, 20, layer.config)
    assert not rotated(queries, layer.config)[2]
    queries[0, 3, 7] = bad
    got = find_rows(queries, layer.state, 20, layer.config)
    assert rotated(queries, layer.config)[2]
    assert torch.equal(got.ids[:, 0], want.ids[:, 0])
    assert torch.equal(got.scores[:, 0], want.scores[:, 0])
    assert len(set(got.ids[0, 1].tolist())) == 20
    assert 0 <= int(got.ids.min()) <= int(got.ids.max()) < 300


# Stages


def stages(layer):
    prepared = prepare_query(layer.queries, layer.state, layer.config)
    return prepared, scan(layer.queries, layer.state, prepared, layer.config)


def test_the_list_holds_the_candidates_and_few_more():
    layer = Layer.of(Case(q_heads=4, kv_heads=2, head_dim=64, batch=2), 6000, preset="fast")
    prepared, scanned = stages(layer)
    target = layer.state.target
    assert (scanned.counts >= target).all()
    assert (scanned.counts <= 4 * target).all()
    assert torch.equal(scanned.histogram.sum(-1), scanned.counts)
    assert ((scanned.list != EMPTY).sum(-1) == scanned.counts).all()
    votes = vote_of(scanned.list).masked_fill(scanned.list == EMPTY, 2**40)
    assert (votes >= prepared.thresholds[..., None]).all()
    assert torch.equal(prepared.thresholds, prepared.bases)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_threshold_too_high_changes_nothing(shift):
    """For a group with too few listed keys, the best keys are found without the list."""
    layer = Layer.of(Case(q_heads=8, kv_heads=2, head_dim=64, batch=2), 2000, preset="fast")
    prepared, scanned = stages(layer)
    want = rerank(layer.state, prepared, scanned, layer.config)
    high = prepared.thresholds.clone()
    high[:, shift] = 2**30
    prepared = replace(prepared, thresholds=high)
    scanned = scan(layer.queries, layer.state, prepared, layer.config)
    assert (scanned.counts[:, shift] == 0).all()
    got = rerank(layer.state, prepared, scanned, layer.config)
    assert got.cuts[:, shift].tolist() == [[-1, 0]] * 2
    assert torch.equal(got.candidate_counts[:, shift].long(), layer.state.target[:, 0])
    count = int(layer.state.target.max())
    assert torch.equal(got.candidates[..., :count], want.candidates[..., :count])


def test_candidates_are_the_best_votes():
    layer = Layer.of(Case(q_heads=4, kv_heads=2, head_dim=64), 3000, preset="fast")
    prepared, scanned = stages(layer)
    reranked = rerank(layer.state, prepared, scanned, layer.config)
    target, (bins, above) = int(layer.state.target), reranked.cuts.unbind(-1)
    assert (bins >= 0).all()
    assert torch.equal(above + reranked.edge_counts, reranked.candidate_counts)
    assert (above < target).all()
    assert (reranked.candidate_counts >= target).all()
    for head in range(2):
        edge = reranked.edge[0, head, : int(reranked.edge_counts[0, head])]
        assert torch.equal(edge, reranked.candidates[0, head, int(above[0, head]) :][: len(edge)])
        mine = reranked.edge_estimates[0, head, : len(edge)]
        assert torch.equal(mine, reranked.estimates[0, head, int(above[0, head]) :][: len(edge)])
    index = layer.index
    integers = integers_of(prepared.planes).float()
    table = coarse.dot_table(integers, layer.config.largest)
    assert torch.equal(coarse.rounded(integers, layer.config.largest).float(), integers)
    own, _, weight_scale = codes_of(index)
    factors = codes.factors(own["weights"], weight_scale, codes.log_factors(16))
    units = (scanned.products * prepared.units[:, :, None]).round().int().mT
    votes = coarse.votes(own["signs"], table, factors, units, BLOCK).amax(2, keepdim=True)
    want = select.candidates(votes, torch.tensor([target]))
    assert torch.equal(id_of(reranked.candidates[..., :target]).sort(-1).values, want)


def test_attention_takes_weights_and_hides_rows():
    layer = Layer.of(Case(q_heads=4, kv_heads=2, head_dim=64), 300, preset="fast", resident=2)
    ids = torch.tensor([[[4, 9, -1], [7, 3, 250]]])
    given = torch.zeros(1, 4, 3)
    given[0, 1, 0], given[0, 2] = -torch.inf, 0.5
    selected = Selected(ids, torch.zeros(ids.shape), torch.full((1, 2), 3, dtype=torch.int32))
    got = attend(layer.queries, layer.state, selected, layer.config, weights=given)
    rows = layer.index.fetch(hits_of(ids))
    keys = torch.cat([rows.keys, layer.state.resident[:, :, :1, :64]], 2)[0]
    for head in range(4):
        logits = keys[head // 2] @ layer.queries[0, head] * layer.config.geometry.scale
        logits = logits + torch.cat([given[0, head], torch.zeros(1)])
        shown = torch.cat([ids[0, head // 2] >= 0, torch.ones(1, dtype=torch.bool)])
        want = logits[shown].logsumexp(0)
        torch.testing.assert_close(got.lse[0, head], want, rtol=1e-5, atol=1e-5)


def test_attention_over_nothing_is_zero():
    layer = Layer.of(Case(q_heads=4, kv_heads=2, head_dim=64), 300, preset="fast", resident=1)
    none = torch.full((1, 2, 3), -1)
    selected = Selected(none, torch.zeros(none.shape), torch.zeros(1, 2, dtype=torch.int32))
    got = attend(layer.queries, layer.state, selected, layer.config)
    assert (got.lse == -torch.inf).all()
    assert (got.output == 0).all()


# Parts


def test_an_entry_orders_by_vote_then_by_the_lower_id():
    votes = torch.tensor([5, -7, 5, LEAST, 2**31 - 1], dtype=torch.int32)
    ids = torch.tensor([9, 3, 2, 0, 2**22])
    entries = entry_of(votes, ids)
    assert entries[3] == EMPTY
    assert entries.argsort(descending=True).tolist() == [4, 2, 0, 1, 3]
    some = votes != LEAST
    assert torch.equal(vote_of(entries)[some], votes[some].long())
    assert id_of(entries).tolist() == [9, 3, 2, -1, 2**22]
    assert descending(entries, votes > 0).tolist() == entries[[4, 2, 0]].tolist()


@pytest.mark.parametrize("largest", [1, 5, 6, 21, 22, 85])
def test_digits_hold_what_they_must(largest):
    integers = torch.arange(-largest, largest + 1, dtype=torch.int32)
    planes = planes_of(integers, largest)
    assert planes.shape == (4 if largest <= 5 else 6 if largest <= 21 else 8, len(integers))
    assert torch.equal(integers_of(planes), integers)


def test_more_digits_than_there_are_is_refused():
    with pytest.raises(ValueError, match="query_max: got 86, allowed is up to 85"):
        planes_of(torch.zeros(3, dtype=torch.int32), 86)


def test_operands_have_22_bits():
    queries = torch.randn(2, 1, 3, 64, generator=torch.Generator().manual_seed(0)) * 1e-9
    ups = up_of(queries.abs().amax(-1))
    whole = queries.abs().amax(-1) * ups
    assert ((whole >= 2**13) & (whole < 2**14)).all()
    error = (queries_of(operands_of(queries, ups), ups) - queries).abs()
    assert (error <= queries.abs() * 2**-21 + 2**-25 / ups[..., None]).all()


def test_a_cut_counts_from_the_top():
    histogram = torch.tensor([[4, 0, 3, 2], [1, 1, 1, 0]])
    for wanted, want in ((1, [3, 2]), (2, [3, 1]), (3, [2, 0]), (6, [0, -1])):
        assert cut_of(histogram, torch.tensor([wanted, wanted]))[0].tolist() == want
    assert cut_of(histogram, torch.tensor([5, 2]))[1].tolist() == [2, 1]
    assert cut_of(histogram, torch.tensor([0, 4]))[0].tolist() == [-1, -1]


def test_buckets_add_up_to_the_sum_of_exponentials():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 30
    chosen = logits < 40
    sums = buckets_of(logits, chosen).double()
    octaves = 16.0 * (torch.arange(256) - 128) - BELOW
    total = (sums.log2() + octaves).mul(torch.tensor(2.0).log()).logsumexp(-1)
    want = logits.double().masked_fill(~chosen, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)


def test_bits_of_tokens():
    valid = left_padding([0, 3, 290], 300)
    words = words_of(valid, 2)
    assert words.shape == (3, 2, 8)
    assert torch.equal(flags_of(words, 300), valid)


@pytest.mark.parametrize(("count", "preset"), sampled([300, 256, 1], PRESETS))
def test_blocks_unpack_to_what_was_packed(preset, count):
    index = Layer.of(Case(q_heads=4, kv_heads=2, head_dim=40, batch=2), count, preset=preset).index
    kind = SubspaceLayout if preset == "paper" else Layout
    layout = kind(40, index.config.magnitude_bits)
    own, centers, _ = codes_of(index)
    blocks = layout.pack(own, centers)
    unpacked = layout.unpack(blocks, count)
    assert unpacked.keys() == own.keys()
    for name, part in unpacked.items():
        assert torch.equal(part, own[name]), name
    if centers is not None:
        assert torch.equal(layout.centers(blocks), centers)
        scanned = layout.fields(blocks, count)["weights"]
        assert torch.equal(scanned, own["weights"])

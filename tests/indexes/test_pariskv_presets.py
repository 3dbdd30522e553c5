"""Presets of ParisKV: codes depend only on their block, and results are correct for any input."""

import copy
import dataclasses

import pytest
import torch

import kvindex
from kvindex.core.protocol import Hits
from kvindex.pariskv import candidates
from kvindex.pariskv.config import ParisKVConfig
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding, part, sampled

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
PAST = ["fast", "accurate", "precise", "scan"]
TIERED = ["fast:coarse=tiered_votes:center=0", "accurate:coarse=tiered_votes:center=0"]
"""Tiered votes over codes of whole blocks, for blocks of weights of a key and of a subspace."""


def made(preset, **options):
    return CASE.index(f"pariskv:preset={preset}", **options)


def filled(preset, keys, values, **options):
    index = made(preset, **options)
    index.append(keys, values)
    return index


def test_the_defaults_are_a_preset():
    assert CASE.index("pariskv").config == made("sampled").config == ParisKVConfig()


@pytest.mark.parametrize("preset", PAST)
def test_scores_are_near_the_inner_products(preset):
    """Scores include the center's inner product: a softcap and attention weights need all of
    `q·k`."""
    case = Case(q_heads=2, kv_heads=2, head_dim=64, batch=2)
    keys, values = case.tokens(300)
    keys = keys + 3 * case.tokens(1, seed=5)[0]
    index = case.index(f"pariskv:preset={preset}", beta=1.0)
    index.append(keys, values)
    hits = index.search(case.queries(), k=300)
    truth = (case.queries()[:, :, None] @ keys.mT)[:, :, 0].gather(-1, hits.ids)
    deviation = float((hits.scores - truth).square().mean().sqrt())
    assert deviation < 0.02 * float(truth.std()) * {"precise": 1}.get(preset, 6)


@pytest.mark.parametrize("preset", PAST)
def test_a_constant_added_to_all_keys_changes_no_ranking(preset):
    """This holds for one head. The constant adds different numbers to the votes of different heads.

    With `candidates_per="group"` these votes would be compared.
    """
    keys, values = CASE.tokens(200)
    shift = 4 * CASE.tokens(1, seed=7)[0]
    alone = dict(group="union", candidates_per="head")
    plain = filled(preset, keys, values, **alone).search(CASE.queries(), k=20)
    moved = filled(preset, keys + shift, values, **alone).search(CASE.queries(), k=20)
    same = (plain.ids[..., None] == moved.ids[..., None, :]).any(-1)
    assert same.float().mean() > 0.97  # rounding of the shifted keys may flip a bit of a code
    rough = filled("paper", keys + shift, values, group="union", beta=0.1, rho=0.25)
    lost = rough.search(CASE.queries(), k=20).ids
    assert (plain.ids[..., None] == lost[..., None, :]).any(-1).float().mean() < 0.9


@pytest.mark.parametrize(("power", "preset"), sampled([-8, 3, 8], PAST))
def test_scaling_all_keys_by_a_power_of_two_changes_no_hit(preset, power):
    keys, values = CASE.tokens(300)
    plain, scaled = filled(preset, keys, values), filled(preset, keys * 2.0**power, values)
    queries = CASE.queries()  # half the norm for keys of twice the norm: equal attention weights
    same = plain.search(queries, k=20), scaled.search(queries * 2.0**-power, k=20)
    assert torch.equal(same[0].ids, same[1].ids)
    assert torch.equal(same[0].scores, same[1].scores)


HISTORIES = {
    "one by one": [1] * 700,
    "chunks": [100, 500, 100],
    "blocks": [256, 256, 188],
    "across": [255, 2, 443],
    "cut inside the open block": [650, -40, 90],
    "cut inside a full block": [700, -300, 300],
    "cut where a block ends": [700, -188, 188],
    "cut and filled": [300, -100, 500],
}


def played(index, tokens, chunks, valid=None):
    for count in chunks:
        start = len(index)
        if count < 0:
            index.truncate(start + count)
            continue
        some = None if valid is None else valid[:, start : start + count]
        index.append(*part(tokens, start, start + count), valid=some)
    return index


def assert_same_codes(got, want):
    assert len(got) == len(want)
    assert len(got._codes) == len(want._codes)
    for mine, theirs in zip(got._parts(), want._parts(), strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert torch.equal(mine[name], theirs[name]), name
    hits = [index.search(CASE.queries(), k=30) for index in (got, want)]
    assert torch.equal(hits[0].ids, hits[1].ids)
    assert torch.equal(hits[0].scores, hits[1].scores)


@pytest.mark.parametrize(("history", "preset"), sampled(HISTORIES, [*PAST, *TIERED, "paper"]))
def test_codes_are_a_function_of_their_tokens(preset, history):
    """Codes are equal bit by bit, however the tokens were divided into appends."""
    if history == "one by one" and preset != "fast":
        pytest.skip("one preset does")
    keys, values = CASE.tokens(700)
    valid = left_padding([0, 300], 700)
    options = dict(beta=0.2, rho=0.25) if preset in ("paper", *TIERED) else {}
    tokens = 3 + keys, values
    want = played(made(preset, **options), tokens, [sum(HISTORIES[history])], valid)
    got = played(made(preset, **options), tokens, HISTORIES[history], valid)
    assert_same_codes(got, want)


@pytest.mark.parametrize(
    ("chunks", "preset"),
    sampled([[200], [512], [900], [300, 600], [100, 100, 700], [900, -250]], TIERED),
)
def test_tiered_votes_of_blocks_are_the_same_with_padding_and_without(preset, chunks):
    """Candidates depend on the number of keys of each centroid, the open block included."""
    count, options = sum(chunks), dict(beta=0.2, rho=0.25, refine_factor=1)
    keys, values = CASE.tokens(900)
    valid = left_padding([0, 60], 900)
    valid[:, 150:170] = valid[1, 880:] = False
    padded = keys.masked_fill(~valid[:, None, :, None], float("nan"))
    index = played(made(preset, **options), (padded, values), chunks, valid)
    hits = index.search(CASE.queries(), k=20)
    counted = index.inputs(CASE.queries())[0].histogram
    assert (counted.sum(-1) == valid[:, :count].sum(1)[:, None, None]).all()
    for row in range(2):
        places = valid[row, :count].nonzero()[:, 0]
        alone = made(preset, **options)
        alone.append(*(part[row : row + 1, :, places] for part in (keys, values)))
        want = alone.search(CASE.queries()[row : row + 1], k=20)
        got = Hits(hits.ids[row : row + 1], hits.scores[row : row + 1])
        assert_same_hits(got, Hits(places[want.ids], want.scores), close=ROUNDED)
        assert torch.equal(counted[row], alone.inputs(CASE.queries()[:1])[0].histogram[0])


@pytest.mark.parametrize("preset", ["fast", *TIERED])
def test_a_fork_a_rollback_and_a_state_have_the_same_codes(preset):
    tokens = CASE.tokens(700)
    index = played(made(preset), tokens, [300])
    before, fork = index.checkpoint(), copy.deepcopy(index)
    index.append(*part(tokens, 400, 700))
    index.rollback(before)
    assert_same_codes(index, fork)
    loaded = made(preset)
    loaded.load_state_dict(fork.state_dict())
    for each in (index, fork, loaded):
        assert_same_codes(played(each, tokens, [250]), played(made(preset), tokens, [550]))
    fork.reorder(torch.tensor([1, 1]))
    assert torch.equal(fork._opened()["signs"][0], loaded._opened()["signs"][1])


def test_a_lossy_store_gives_the_keys_of_a_block_that_opens_again():
    tokens = CASE.tokens(300)
    index = played(made("fast", row_codec="int8"), tokens, [300, -100])
    keys = index._learned["open_keys"]
    assert torch.equal(keys, index._store.gather(torch.arange(200).expand(2, 2, -1)).keys)
    torch.testing.assert_close(keys, tokens[0][:, :, :200], rtol=0, atol=0.03)


def test_a_full_block_is_encoded_once():
    keys, values = CASE.tokens(600)
    index = filled("fast", keys[:, :, :512], values[:, :, :512])
    first = {name: index._codes[name].clone() for name in index._codes}
    index.append(*part((100 * keys, values), 512, 600))
    for name, codes in first.items():
        assert torch.equal(index._codes[name], codes)


def test_padding_has_no_weight_and_no_part_in_a_center():
    keys, values = CASE.tokens(300)
    valid = left_padding([0, 270], 300)
    index = made("fast")
    index.append(9 + keys, values, valid=valid)
    full, opened = index._parts()
    assert not full["weights"][1].any()
    assert not full["centers"][1].any()
    assert not opened["weights"][1, :, :14].any()
    mean = 9 + keys[1, :, 270:].mean(1)
    torch.testing.assert_close(opened["centers"][1, :, 0].float(), mean, rtol=8e-3, atol=0)


def test_zeros_and_a_token_alone_are_found_like_any_others():
    keys, values = CASE.tokens(40)
    index = made("fast")
    index.append(0 * keys[:, :, :5], values[:, :, :5])
    assert (index.search(CASE.queries(), k=5).ids.sort(-1).values == torch.arange(5)).all()
    index.append(keys, values)
    hits = index.search(CASE.queries(), k=10)
    assert (hits.ids >= 5).float().mean() > 0.9
    alone = made("fast")
    alone.append(keys[:, :, :1], values[:, :, :1])  # a single key is its own center
    assert (alone.search(CASE.queries(), k=1).ids == 0).all()
    shares = alone.search(CASE.queries(), k=1, coverage=0.5)
    torch.testing.assert_close(shares.coverage, torch.ones(2, 4))


def test_keys_of_very_different_norms_are_ranked_by_what_they_are():
    """Later keys are 2^10 times as large as earlier keys."""
    keys, values = CASE.tokens(100)
    index = made("fast", beta=1.0)
    index.append(keys[:, :, :50] * 2.0**-10, values[:, :, :50])
    index.append(keys[:, :, 50:], values[:, :, 50:])
    hits = index.search(CASE.queries(), k=100)
    assert hits.scores.isfinite().all()
    assert (hits.ids.sort(dim=-1).values == torch.arange(100)).all()
    assert (hits.ids[..., 0] >= 50).all()


@pytest.mark.parametrize(("times", "preset"), sampled([16.0, 2.0**-6], PAST))
def test_norms_that_drift_after_the_prompt_cost_nothing(preset, times):
    keys, values = CASE.tokens(600)
    mean = CASE.queries().reshape(2, 2, 2, 64).mean(2)
    true = (mean[:, :, None] @ keys[:, :, 100:].mT)[:, :, 0].topk(20).indices + 100
    found = {}
    for factor in (1.0, times):
        index = made(preset, group="mean_query", beta=1.0, center=0)
        index.append(keys[:, :, :100] / factor, values[:, :, :100])
        index.append(keys[:, :, 100:], values[:, :, 100:])
        hits = index.search(CASE.queries(), k=140).ids.flatten(0, 1).tolist()
        best = [[i for i in row if i >= 100][:40] for row in hits]  # earlier keys may score more
        pairs = zip(best, true.flatten(0, 1).tolist(), strict=True)
        found[factor] = sum(len({*got} & {*want}) for got, want in pairs) / (4 * 20)
    assert found[1.0] > 0.85
    assert found[times] > found[1.0] - 0.04


def test_alike_first_keys_do_not_narrow_the_scale():
    """The first 50 keys are nearly equal, so nearly nothing remains after subtracting their
    center."""
    keys, values = CASE.tokens(300)
    alike = keys[:, :, :1] * (1 + 1e-4 * torch.arange(50)[:, None])
    index = made("fast", group="mean_query", beta=1.0)
    index.append(alike, values[:, :, :50])
    index.append(keys[:, :, 50:], values[:, :, 50:])
    mean = CASE.queries().reshape(2, 2, 2, 64).mean(2)
    true = (mean[:, :, None] @ keys[:, :, 50:].mT)[:, :, 0].topk(20).indices + 50
    hits = index.search(CASE.queries(), k=40).ids
    assert (true[..., None] == hits[..., None, :]).any(-1).float().mean() > 0.8


def test_encode_on_an_empty_index_is_what_append_would_keep():
    keys, values = CASE.tokens(40)
    index = made("accurate")
    codes = index.encode(keys)
    assert len(index) == 0
    index.append(keys, values)
    for name in index._codes:
        assert torch.equal(index._codes[name], codes[name])


@pytest.mark.parametrize("preset", ["paper", *PAST])
def test_many_queries_at_once_find_what_each_finds_alone(preset):
    case = Case(q_heads=6, kv_heads=2, head_dim=64)
    index = case.index(f"pariskv:preset={preset}")
    index.append(*case.tokens(300), valid=left_padding([40], 300))
    queries = case.queries(batch=5)
    together = index.expand_batch(5).search(queries, k=9)
    rows = index.expand_batch(5).fetch(together)
    for i in range(5):
        alone = index.search(queries[i : i + 1], k=9)
        got = dataclasses.replace(
            together, ids=together.ids[i : i + 1], scores=together.scores[i : i + 1]
        )
        assert_same_hits(got, alone, close=ROUNDED)
    assert torch.equal(
        rows.keys[:1], index.fetch(dataclasses.replace(got, ids=together.ids[:1])).keys
    )


def test_repeated_is_for_a_batch_of_one():
    index = filled("fast", *CASE.tokens(20))
    with pytest.raises(
        ValueError, match="expand_batch: got an index with 2 sequences, allowed is 1"
    ):
        index.expand_batch(3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("coarse", "tables"),
        ("block", "head"),
        ("weights", "int8"),
        ("weight_bits", 0),
        ("weight_bits", 9),
        ("query_max", 0),
        ("query_max", 128),
        ("magnitude_bits", -1),
        ("magnitude_bits", 8),
        ("refine_factor", 0),
        ("center", "yes"),
        ("center", True),
        ("center", -1),
        ("center", 2**16 + 1),
        ("candidates_per", "all"),
    ],
)
def test_bad_options_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option}: got {value!r}, allowed is"):
        kvindex.create("pariskv", q_heads=2, kv_heads=1, head_dim=64, **{option: value})


@pytest.mark.parametrize(
    "options",
    [
        dict(weights="log", weight_bits=8),
        dict(coarse="sign_votes"),  # bfloat16 weights, which the coarse stage ignores
        dict(coarse="sign_votes", query_max=7, weights="log"),
        dict(coarse="sign_votes", weights="log", center=32),
        dict(coarse="sign_votes", weights="log", center=100, candidates_per="group"),
        dict(coarse="none", center=2**16),
        dict(block="key", magnitude_bits=0),
        dict(block="key", magnitude_bits=7),
    ],
    ids=str,
)
def test_any_combination_finds_more_than_chance(options):
    keys, values = CASE.tokens(400)
    index = CASE.index("pariskv:preset=paper", beta=0.2, rho=0.25, group="mean_query", **options)
    index.append(keys, values)
    hits = index.search(CASE.queries(), k=20)
    mean = CASE.queries().reshape(2, 2, 2, 64).mean(2)
    true = (mean[:, :, None] @ keys.mT)[:, :, 0].topk(20).indices
    assert (true[..., None] == hits.ids[..., None, :]).any(-1).float().mean() > 0.3  # by chance .05


@pytest.mark.parametrize(
    "options", [dict(coarse="tiered_votes"), dict(coarse="sign_votes")], ids=str
)
def test_votes_without_weights_know_no_scale_for_a_center(options):
    with pytest.raises(ValueError, match=r"center: got 256 with coarse=.*, allowed is center=0"):
        CASE.index("pariskv:preset=paper", center=256, **options)


@pytest.mark.parametrize("preset", PAST)
def test_keys_that_move_along_the_sequence_are_coded_near_their_own_centers(preset):
    """Each 64 keys are around a different, distant point.

    One center for all keys would not help.
    """
    case = Case(q_heads=2, kv_heads=2, head_dim=64, batch=2)
    keys, values = case.tokens(512)
    places = 6 * case.tokens(8, seed=3)[0].repeat_interleave(64, dim=2)
    truth = (case.queries()[:, :, None] @ (keys + places).mT)[:, :, 0]
    error = {}
    for center in (64, 512):
        index = case.index(f"pariskv:preset={preset}", beta=1.0, center=center)
        index.append(keys + places, values)
        hits = index.search(case.queries(), k=512)
        error[center] = (hits.scores - truth.gather(-1, hits.ids)).square().mean()
    assert error[64] < error[512] / 20


@pytest.mark.parametrize("preset", ["fast", "accurate", "precise"])
def test_candidates_come_from_all_centers_by_their_scores(preset):
    """As many of the best keys are candidates as if votes did not add center offsets separately."""
    case = Case(q_heads=2, kv_heads=2, head_dim=64, batch=2)
    keys, values = case.tokens(1024)
    keys = keys + case.tokens(16, seed=3)[0].repeat_interleave(64, dim=2)
    truth = (case.queries()[:, :, None] @ keys.mT)[:, :, 0].topk(20).indices
    found = {}
    for center in (0, 64):
        index = case.index(f"pariskv:preset={preset}", beta=0.06, refine_factor=1, center=center)
        index.append(keys, values)
        hits = index.search(case.queries(), k=60)
        found[center] = (truth[..., None] == hits.ids[..., None, :]).any(-1).float().mean()
    assert found[64] > found[0] + 0.02


def test_one_list_per_group_holds_no_more_candidates_than_one_head_has():
    keys, values = CASE.tokens(400)
    for lists, most in (("head", 80), ("group", 40)):
        index = made("fast", candidates_per=lists, beta=0.1, refine_factor=1)
        index.append(keys, values)
        width = candidates.find(*index.inputs(CASE.queries()), 10).shape[-1]
        assert (width == most) if lists == "group" else 40 < width <= most


def test_an_index_without_presets_says_so():
    with pytest.raises(
        ValueError, match="preset: got 'fast', allowed is None: Quest has no presets"
    ):
        kvindex.create("quest:preset=fast", q_heads=4, kv_heads=2, head_dim=64)

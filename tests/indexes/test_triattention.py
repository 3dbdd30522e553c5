"""TriAttention equals the published series in Python's own numbers; exact with enough budget."""

import cmath
import math

import pytest
import torch

from kvindex.core.rope import rotate
from kvindex.indexes import triattention
from kvindex.indexes.triattention import Centers, paired, unpaired
from tests.support.exactly import assert_follows_exact_in_a_layer, assert_stays_exact, unchanged
from tests.support.helpers import Case, left_padding, part, rope
from tests.support.policies import kept

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
N = 40
SMALL = dict(budget=12, horizon=64)
HALF = rope(8)  # 8 of 16 coordinates rotate


def prompt(case=CASE, count=N, seed=0, frequencies=None):
    """Return queries `[B, H, count, D]` around a center of each head, rotated to their
    positions."""
    center = 2 * case.tensor(600 + seed, case.batch, case.q_heads, 1, case.head_dim)
    spread = case.tensor(500 + seed, case.batch, case.q_heads, count, case.head_dim)
    frequencies = rope(case.head_dim) if frequencies is None else frequencies
    queries = rotate((center + spread).float(), torch.arange(count), frequencies)
    return queries.to(case.dtype)


def built(case=CASE, pads=None, queries=None, **options):
    index = case.index("triattention", **{**SMALL, **options})
    index.append(*case.tokens(N), valid=None if pads is None else left_padding(pads, N))
    index.observe_queries(prompt(case) if queries is None else queries, torch.arange(N))
    index.end_prompt()
    return index


def straight(row, place, omega):
    """Return pairs of a rotated vector as complex numbers, rotated back."""
    F = len(omega)
    rest = (len(row) - 2 * F) // 2
    pairs = [complex(row[j], row[j + F]) * cmath.exp(-1j * omega[j] * place) for j in range(F)]
    return pairs + [complex(row[2 * F + j], row[2 * F + rest + j]) for j in range(rest)]


def scores_in_words(queries, keys, omega, *, now, horizon, pad=0):
    """Compute the published series for queries `[n][D]` of a head and keys `{id: [D]}` at `now`."""
    known = [straight(query, i, omega) for i, query in enumerate(queries) if i >= pad]
    pairs = range(len(known[0]))
    mean = [sum(q[f] for q in known) / len(known) for f in pairs]
    size = [sum(abs(q[f]) for q in known) / len(known) for f in pairs]
    omega_all = [*omega, *[0.0] * (len(mean) - len(omega))]
    ahead = [2**i for i in range(horizon.bit_length())]
    found = {}
    for i, row in keys.items():
        k = straight(row, i, omega)
        series = 0.0
        for delta in ahead:
            for f in pairs:
                phase = cmath.phase(mean[f] * k[f].conjugate())
                angle = (now - i + delta) * omega_all[f] + phase
                series += abs(mean[f]) * abs(k[f]) * math.cos(angle) / len(ahead)
        found[i] = series + sum((size[f] - abs(mean[f])) * abs(k[f]) for f in pairs)
    return found


def kept_in_words(heads, budget):
    """Return ids of the `budget` best by the largest standardized score of any head."""
    best = {}
    for found in heads:
        mean = sum(found.values()) / len(found)
        spread = math.sqrt(sum((x - mean) ** 2 for x in found.values()) / len(found))
        for i, x in found.items():
            best[i] = max(best.get(i, -math.inf), (x - mean) / spread)
    return sorted(sorted(best, key=lambda i: (-best[i], i))[:budget])


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("frequencies", [rope(16), HALF, torch.zeros(8)], ids=["all", "half", "0"])
def test_it_keeps_what_the_series_rates_highest(pads, frequencies):
    queries = prompt(frequencies=frequencies)
    index, omega = built(pads=pads, queries=queries, rope=frequencies), frequencies.tolist()
    more, keys = CASE.tokens(10, seed=5), CASE.tokens(N)[0]
    before = {(b, h): kept(index, CASE, b, h) for b in range(2) for h in range(2)}
    index.append(*more)
    for (b, h), first in before.items():
        pad, now = 0 if pads is None else pads[b], N
        mine, rows = queries[b, 3 * h : 3 * h + 3].tolist(), keys[b, h].tolist()
        asked = dict(horizon=64, pad=pad)
        held = {i: rows[i] for i in range(pad, N)}
        want = kept_in_words([scores_in_words(q, held, omega, now=now, **asked) for q in mine], 12)
        assert first == want
        new = {N + i: row for i, row in enumerate(more[0][b, h].tolist())}
        held = {i: rows[i] for i in want} | new
        now += 10
        want = kept_in_words([scores_in_words(q, held, omega, now=now, **asked) for q in mine], 12)
        assert kept(index, CASE, b, h) == want


def test_the_series_in_words_can_differ():
    queries, rows = prompt()[0, :3].tolist(), dict(enumerate(CASE.tokens(N)[0][0, 0].tolist()))
    omega = rope(16).tolist()
    for wrong in (dict(now=N + 5), dict(horizon=1), dict(pad=35)):
        asked = {**dict(now=N, horizon=64), **wrong}
        found = [scores_in_words(q, rows, omega, **asked) for q in queries]
        assert kept_in_words(found, 12) != kept(built(), CASE, 0, 0)


def test_queries_that_are_all_alike_are_foreseen_exactly():
    """If queries are equal before rotation, a score is the mean of the true later products."""
    case = Case(q_heads=3, kv_heads=1, head_dim=32)
    alike = case.tensor(1, 1, 3, 1, 32).expand(-1, -1, N, -1)
    queries = rotate(alike, torch.arange(N), rope(32))
    index = built(case, queries=queries, horizon=16, budget=39)
    keys = case.tokens(N)[0]
    got = index._scores(index._learned, keys, N)
    ahead = rotate(alike[:, :, :5], N + torch.tensor([1, 2, 4, 8, 16]), rope(32))
    want = (ahead @ keys.mT).mean(2)
    torch.testing.assert_close(got[0, 0], want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pads", [None, [0, 7]])
@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_a_budget_above_n_is_exact(pads, group):
    index, exact = built(pads=pads, group=group, budget=N + 6), CASE.index("exact", group=group)
    exact.append(*CASE.tokens(N), valid=None if pads is None else left_padding(pads, N))
    changes = [unchanged, lambda i: i.append(*CASE.tokens(5, seed=3))]
    assert_stays_exact(CASE, index, exact, changes, ks=(7, N + 5))


def test_keys_scored_some_at_a_time_score_the_same(monkeypatch):
    index, keys = built(), CASE.tokens(N)[0]
    whole = index._scores(index._learned, keys, N)
    monkeypatch.setattr(triattention, "BLOCK", 7)
    torch.testing.assert_close(index._scores(index._learned, keys, N), whole)


def test_the_budget_holds_at_every_search_after_the_prompt():
    index = built()
    assert len(kept(index, CASE, 0, 0)) == 12
    for step in range(5):
        index.append(*CASE.tokens(3, seed=step))
        index.observe_queries(CASE.queries()[:, :, None], torch.tensor([N + 3 * step + 2]))
        assert len(kept(index, CASE, 1, 1)) == 12
        assert index._learned["ids"].shape[2] == 12


def test_nothing_is_dropped_without_centers_or_before_the_seal():
    silent = CASE.index("triattention", **SMALL)
    silent.append(*CASE.tokens(N))
    silent.end_prompt()
    silent.append(*CASE.tokens(5))
    assert kept(silent, CASE, 0, 0) == list(range(N + 5))
    early = CASE.index("triattention", **SMALL)
    early.append(*CASE.tokens(N))
    early.observe_queries(prompt(), torch.arange(N))
    assert kept(early, CASE, 0, 0) == list(range(N))


@pytest.mark.parametrize("first", [0, 9])
def test_keys_that_come_after_the_seal_meet_the_same_centers(first):
    """This happens in a layer, whose window delays tokens."""
    tokens, index = CASE.tokens(N), CASE.index("triattention", **SMALL)
    index.observe_queries(prompt(), torch.arange(N))
    index.append(*part(tokens, 0, first))
    index.end_prompt()
    index.append(*part(tokens, first, N))
    for b in range(2):
        for h in range(2):
            assert kept(index, CASE, b, h) == kept(built(), CASE, b, h)


def centers(queries, **options):
    """Return the centers of one sequence's queries `[H, T, D]`."""
    known = torch.ones(1, queries.shape[1], dtype=torch.bool)
    found = Centers.of(queries[None], torch.arange(queries.shape[1]), known, rope(16), **options)
    return Centers(found.mean[0], found.size[0])


def test_centers_of_a_text_beforehand_are_those_of_the_prompt():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    given, own = case.index("triattention", **SMALL, centers=centers(prompt(case)[0])), built(case)
    given.append(*case.tokens(N))
    given.end_prompt()
    for h in range(2):
        assert kept(given, case, 0, h) == kept(own, case, 0, h)


def test_padding_does_not_move_the_places_that_given_centers_know():
    known = centers(prompt()[0])
    index = CASE.index("triattention", **SMALL, centers=known)
    keys, values = CASE.tokens(N)
    pads = [0, 11]
    keys[1] = rotate(keys[1], torch.arange(N) - 11, rope(16))
    index.append(keys, values, valid=left_padding(pads, N))
    index.end_prompt()
    alone = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    single = alone.index("triattention", **SMALL, centers=known)
    single.append(keys[1:, :, 11:], values[1:, :, 11:])
    single.end_prompt()
    for h in range(2):
        assert [i - 11 for i in kept(index, CASE, 1, h)] == kept(single, alone, 0, h)


def test_truncate_and_reorder_leave_what_is_kept():
    index = built()
    before = {(b, h): kept(index, CASE, b, h) for b in range(2) for h in range(2)}
    index.reorder(torch.tensor([1, 0, 1]))
    for row, b in enumerate([1, 0, 1]):
        assert kept(index, CASE, row, 0) == before[b, 0]
    index.truncate(20)
    for row, b in enumerate([1, 0, 1]):
        assert kept(index, CASE, row, 1) == [i for i in before[b, 1] if i < 20]


def test_in_a_layer_it_follows_exact_where_the_budget_is_enough():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    assert_follows_exact_in_a_layer(case, "triattention", budget=70)
    with pytest.raises(AssertionError):
        assert_follows_exact_in_a_layer(case, "triattention", budget=5)


@pytest.mark.parametrize("turning", [1, 5, 8])
def test_pairs_are_the_coordinates_that_turn_together(turning):
    vectors, omega = CASE.tensor(0, 3, 16), rope(2 * turning)
    assert torch.equal(unpaired(paired(vectors, omega), omega), vectors)
    places = torch.tensor([0, 3, 10])
    angles = torch.nn.functional.pad(omega, (0, 8 - turning)) * places[:, None]
    want = paired(vectors, omega) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(paired(rotate(vectors, places, omega), omega), want)


def test_bytes_per_key_and_head():
    case = Case(head_dim=128, value_dim=128, dtype=torch.bfloat16)
    index = built(case, budget=10)
    size = index.nbytes()["codes"]
    center = 2 * 64 * (8 + 4)  # bytes for two heads
    assert size == center + 8 + 2 * 10 * 8
    assert index.bytes_per_key()["scanned"] == 10 * (256 + 8) / N


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(budget=0), "budget: got 0, allowed"),
        (dict(horizon=0), "horizon: got 0, allowed"),
        (dict(most=0), "most: got 0, allowed"),
        (dict(centers="file"), "centers: got 'file', allowed is None or a Centers object"),
        (
            dict(centers=Centers(torch.zeros(2, 4, dtype=torch.complex64), torch.zeros(2, 8))),
            r"centers.mean: got shape \[2, 4\], allowed is \[H=2, D/2=8\]",
        ),
        (
            dict(centers=Centers(torch.zeros(2, 8), torch.zeros(2, 8))),
            "centers.mean: got dtype torch.float32, allowed is torch.complex64",
        ),
        (dict(rope=None), "rope: got None, but TriAttention needs the inverse frequencies"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        Case().index("triattention", **options)

"""A step of several tokens that searches gives the same as single-token steps."""

import random
from itertools import product

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from tests.support.beside import CASES, beside, feed, singles
from tests.support.helpers import Case, mostly_slow, sampled
from tests.support.sequences import Sequence, layer_of

PROMPT, NEW = 60, 5
SIZES = dict(sink=3, local_window=4, update_every=20, dense_below=0)


def pair(case, name, **options):
    """Make two layers with equal indexes; steps of several tokens search in the first one only."""
    made = dict(k=9, **SIZES, **options)
    return [AttentionLayer(case.index(name), search_up_to=n, **made) for n in (NEW, 1)]


def assert_same(case, name, pads=None, **options):
    """Check that one step equals single-token steps bit by bit, twice, with equal counters."""
    sequence, (mine, theirs) = (
        Sequence.of(case, PROMPT + 2 * NEW, pads),
        pair(case, name, **options),
    )
    for layer in (mine, theirs):
        sequence.feed(layer, 0, PROMPT)
    for start in (PROMPT, PROMPT + NEW):
        want = [sequence.feed(theirs, *one) for one in singles(start, start + NEW)]
        assert torch.equal(sequence.feed(mine, start, start + NEW), torch.cat(want, dim=2))
    counts = [layer.traffic for layer in (mine, theirs)]
    assert counts[0].steps == counts[1].steps == 2 * NEW
    assert float(counts[0].rows_read) == float(counts[1].rows_read)
    assert float(counts[0].rows_full) == float(counts[1].rows_full)


@pytest.mark.parametrize("name", kvindex.names())
def test_it_is_as_many_single_steps(name):
    assert_same(Case(), name)


@pytest.mark.parametrize("name", ["exact", "pariskv", "h2o", "exact+reuse"])
def test_of_a_padded_batch(name):
    assert_same(Case(q_heads=4, value_dim=24, batch=3), name, [0, 7, 16])


def test_with_a_coverage():
    assert_same(Case(batch=2), "exact", coverage=0.5)


def test_with_a_bias():
    case, T = Case(batch=2), NEW
    sequence, (mine, theirs) = Sequence.of(case, PROMPT + T), pair(case, "exact")
    bias = case.tensor(3, 2, 2, T, PROMPT + T)
    for layer in (mine, theirs):
        sequence.feed(layer, 0, PROMPT)
    want = []
    for t in range(T):
        term = bias[:, :, t : t + 1, : PROMPT + t + 1]
        want.append(theirs.step(*sequence.parts(PROMPT + t, PROMPT + t + 1), bias=term))
    got = mine.step(*sequence.parts(PROMPT, PROMPT + T), bias=bias)
    assert torch.equal(got, torch.cat(want, dim=2))


def test_a_longer_step_is_a_piece_of_a_prompt():
    case = Case()
    sequence, layer = Sequence.of(case, 80), pair(case, "exact")[0]
    for start, stop in [(0, PROMPT), (PROMPT, PROMPT + NEW + 1)]:
        sequence.assert_equals(sequence.feed(layer, start, stop), sequence.dense(), start)
    assert layer.traffic.steps == 0


@pytest.mark.parametrize(("phase", "case"), sampled([None, 0.5], CASES))
def test_updates_beside_the_steps_of_many_lengths(case, phase):
    case, pads = CASES[case]
    layer = beside(case, search_up_to=NEW, update_phase=phase)
    draw, steps, length = random.Random(0), [(0, 17)], 17
    while length < 70:
        steps.append((length, length + draw.randint(1, NEW)))
        length = steps[-1][1]
    feed(layer, Sequence.of(case, 80, pads), steps)
    assert len(layer) - len(layer.index) < 4 + 6 + 4 + NEW


@pytest.mark.parametrize(
    ("local", "name"),
    mostly_slow(product([0, 4], ["exact", "pariskv", "quest"]), (4, "exact"), (0, "quest")),
)
def test_rejected_tokens_leave_no_trace(name, local):
    """After any truncations, the layer equals one that has only seen the remaining tokens."""
    case, draw, kept = Case(batch=2), random.Random(local), PROMPT
    sequence, other = Sequence.of(case, 150), Sequence.of(case, 150, seed=1)
    sizes = dict(SIZES, local_window=local, update_every=6)
    made = [AttentionLayer(case.index(name), k=9, search_up_to=NEW, **sizes) for _ in range(2)]
    for layer in made:
        sequence.feed(layer, 0, PROMPT)
    while kept < 120:
        T = draw.randint(2, NEW)
        right = draw.randint(1, T)
        speculated = sequence.then(kept + right, other)
        got = speculated.feed(made[0], kept, kept + T)[:, :, :right]
        made[0].truncate(kept + right)
        assert torch.equal(got, sequence.feed(made[1], kept, kept + right))
        kept += right
    states = [layer.state_dict() for layer in made]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_a_step_that_fails_half_way_is_undone(monkeypatch):
    case = Case()
    sequence, (mine, theirs) = Sequence.of(case, 80), pair(case, "exact")
    for layer in (mine, theirs):
        sequence.feed(layer, 0, PROMPT)
    search, calls = mine.index.search, []

    def fails(queries, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("half way")
        return search(queries, **options)

    with monkeypatch.context() as patch:
        patch.setattr(mine.index, "search", fails)
        with pytest.raises(RuntimeError, match="half way"):
            sequence.feed(mine, PROMPT, PROMPT + NEW)
    assert len(mine) == PROMPT
    want = [sequence.feed(theirs, *one) for one in singles(PROMPT, PROMPT + NEW)]
    assert torch.equal(sequence.feed(mine, PROMPT, PROMPT + NEW), torch.cat(want, dim=2))


def test_bad_sizes():
    with pytest.raises(ValueError, match="search_up_to: got 0"):
        AttentionLayer(layer_of(Case()).index, search_up_to=0)

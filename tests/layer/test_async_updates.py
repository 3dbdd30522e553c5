"""Updates of the window that run concurrently with steps: what is read when, and in which order.

Layers take turns: each begins its updates at another step.
"""

import pytest
import torch

from kvindex.layer.updates import LAG
from kvindex.wrappers import MeasureRecall, Wrapper
from tests.support.beside import CASES, beside, feed, leaving, singles
from tests.support.helpers import Case, all_rows, sampled, slow
from tests.support.sequences import Sequence, layer_of, steps_of


@pytest.mark.parametrize(
    ("sizes", "case", "threshold"),
    sampled(
        [
            dict(),
            dict(local_window=0),
            dict(sink=0),
            dict(update_every=1),
            dict(update_every=3, local_window=9),
        ],
        CASES,
        [0, 30, 1000],
    ),
    ids=str,
)
def test_every_step_is_dense_attention(case, sizes, threshold):
    case, pads = CASES[case]
    plan = steps_of(17, *[1] * 20, 2, 9, *[1] * 14)
    feed(beside(case, dense_below=threshold, **sizes), Sequence.of(case, 62, pads), plan)


@pytest.mark.parametrize(("around", "passed_on"), [(Wrapper, True), (MeasureRecall, False)])
def test_a_wrapper_passes_it_on_unless_it_appends_more(around, passed_on):
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), around=around, local_window=4)
    feed(layer, sequence, [(0, 14), *singles(14, 22)])
    assert layer._window.leaving == (6 if passed_on else 0)
    feed(layer, sequence, singles(22, 60))


def test_token_by_token_from_nothing():
    feed(beside(Case()), Sequence.of(Case(), 50), singles(0, 50))


def test_tokens_are_in_the_index_lag_tokens_after_the_buffer_was_full():
    """With a local window of 4 and updates of 6 tokens.

    Only the lag differs from a layer without.
    """
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), local_window=4)
    feed(layer, sequence, [(0, 14)])
    indexed = []
    for start, stop in singles(14, 44):
        sequence.feed(layer, start, stop)
        indexed.append(len(layer.index))
        assert len(layer) - indexed[-1] <= 4 + 6 + LAG
    assert indexed == [10] * (5 + LAG) + [16] * 6 + [22] * 6 + [28] * 6 + [34] * (7 - LAG)


def test_an_update_is_never_longer_under_way_than_it_takes_to_the_next():
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), local_window=4, update_every=2)
    feed(layer, sequence, [(0, 14)])
    for start, stop in singles(14, 40):
        sequence.feed(layer, start, stop)
        assert len(layer) - len(layer.index) <= 4 + 2 + 2


def test_several_tokens_at_once_end_it_and_go_at_once():
    sequence, layer = leaving()
    feed(layer, sequence, [(22, 24)])
    assert (len(layer.index), layer._window.leaving) == (16, 0)
    feed(layer, sequence, [(24, 40), *singles(40, 60)])


@pytest.mark.parametrize("pads", [slow([0, 0]), [6, 1]])
def test_a_step_reads_what_is_leaving_in_the_window_alone(pads):
    """A step reads the sink, the hits and the window.

    The index does not return rows that are being appended.
    """
    case = Case(q_heads=4, batch=2)
    sequence, layer = Sequence.of(case, 60, pads), beside(case, k=4)
    positions = torch.arange(60)
    sink = torch.stack([(positions >= pad) & (positions < pad + 3) for pad in pads])
    sequence.feed(layer, 0, 14)
    for start, stop in singles(14, 60):
        indexed = len(layer.index)
        got, hits = sequence.feed(layer, start, stop), layer.index.hits
        assert hits.ids.max() < indexed
        shown = (sink | (positions >= indexed))[:, None].repeat(1, 2, 1)
        for b in range(2):
            for g in range(2):
                ids = [i for i in hits.ids[b, g].tolist() if i >= 0]
                assert not sink[b, ids].any()
                shown[b, g, ids] = True
        sequence.assert_equals(got, sequence.dense(shown[:, :, None].expand(-1, -1, 60, -1)), start)


def test_rows_are_in_the_index_as_they_were():
    case = Case(q_heads=4, value_dim=8, batch=2)
    sequence, layer = Sequence.of(case, 60), beside(case)
    for start, stop in [(0, 14), *singles(14, 60)]:
        sequence.feed(layer, start, stop)
    held = len(layer.index)
    rows = all_rows(layer.index, 2)
    assert torch.equal(rows.keys, sequence.keys[:, :, :held])
    assert torch.equal(rows.values, sequence.values[:, :, :held])


@pytest.mark.parametrize("prompt", [20, slow(21), slow(27), 2])
def test_layers_take_turns(prompt):
    """Each layer begins updates at its own remainder of the step, and the window is not longer."""
    case, begun = Case(), []
    layers = [
        beside(case, local_window=4, update_every=8, update_phase=turn / 4) for turn in range(4)
    ]
    sequence = Sequence.of(case, 80)
    for number, layer in enumerate(layers):
        begin = layer.index.start_append

        def noted(*args, number=number, begin=begin, **options):
            begun.append((len(layers[number]), number))
            return begin(*args, **options)

        layer.index.start_append = noted
        feed(layer, sequence, [(0, prompt)])
    begun.clear()
    for start, stop in singles(prompt, 80):
        for layer in layers:
            sequence.feed(layer, start, stop)
            assert len(layer) - len(layer.index) <= 4 + 8 + LAG
    later = [(length % 8, number) for length, number in begun if length > prompt + 8]
    assert set(later) == {(0, 0), (2, 1), (4, 2), (6, 3)}
    for number in range(4):
        mine = [length for length, layer in begun if layer == number and length > prompt + 8]
        assert mine == list(range(mine[0], 81, 8))


@pytest.mark.parametrize("update_phase", [-0.1, 1, 1.5])
def test_an_update_phase_out_of_range_is_refused(update_phase):
    with pytest.raises(ValueError, match=f"update_phase: got {update_phase}, allowed is"):
        beside(Case(), update_phase=update_phase)


def test_another_index_takes_no_turns():
    sequence, layer = Sequence.of(Case(), 60), layer_of(Case(), local_window=4, update_every=6)
    layer._updates.turn = 1
    for start, stop in [(0, 14), *singles(14, 20)]:
        sequence.feed(layer, start, stop)
    assert (len(layer.index), layer._updates.pending) == (16, None)

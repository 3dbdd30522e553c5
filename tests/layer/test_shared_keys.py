"""A layer attends again, to the same rows, with the queries of other layers that share its keys."""

import pytest
import torch

from kvindex.layer import AttentionLayer
from tests.support.helpers import Case
from tests.support.sequences import SIZES, Sequence, layer_of, steps_of

N = 44
PADDED = Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]
STEPS = steps_of(17, *[1] * 9, 3, *[1] * 9, 6)


def of_others(sequence):
    """Return the same keys and values with other queries."""
    return Sequence(
        sequence.case,
        sequence.queries.flip(2) * 1.5,
        sequence.keys,
        sequence.values,
        sequence.pads,
    )


@pytest.mark.parametrize("options", [{}, {"search_up_to": 3}, {"local_window": 0}], ids=str)
@pytest.mark.parametrize(("case", "pads"), [(Case(batch=2), None), PADDED], ids=["plain", "padded"])
def test_other_queries_attend_to_all_that_the_layer_holds(case, pads, options):
    sequence = Sequence.of(case, N, pads)
    other, layer = (
        of_others(sequence),
        AttentionLayer(case.index("exact"), k=1000, **{**SIZES, **options}),
    )
    want, searches = other.dense(), 0
    for start, stop in STEPS:
        sequence.feed(layer, start, stop)
        searches += layer._searched
        other.assert_equals(layer.attend(other.queries[:, :, start:stop]), want, start)
        searches += layer._searched
        assert len(layer) == stop
        last = other.queries[:, :, stop - 1 : stop]  # only the newest query
        other.assert_equals(layer.attend(last), want, stop - 1)
        searches += layer._searched > 0
    assert layer.traffic.steps == searches > 0


@pytest.mark.parametrize(
    ("name", "backend"),
    [("exact", "torch"), ("pariskv", "torch"), ("pariskv", "cpu"), ("h2o", "torch")],
)
def test_the_same_queries_get_what_the_step_gave(name, backend):
    """Between two updates, both calls retrieve the same few rows.

    The index observes queries once.
    """
    case = Case(q_heads=4, batch=2)
    sequence = Sequence.of(case, N)
    layer = AttentionLayer(
        case.index(name, backend=backend),
        **{**SIZES, **dict(k=3, update_every=12, search_up_to=3)},
    )
    for start, stop in steps_of(17, 1, 1, 1, 3, 1):
        given = sequence.feed(layer, start, stop)
        assert bool(layer._searched) == (start > 0)
        got = layer.attend(sequence.queries[:, :, start:stop])
        torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-5)


def test_learned_sinks():
    case = Case(q_heads=4)
    sequence, layer, sinks = Sequence.of(case, N), layer_of(case), torch.tensor([0.0, 3, -2, 1])
    want = of_others(sequence).dense(sinks=sinks[:, None])
    for start, stop in STEPS:
        sequence.feed(layer, start, stop)
        queries = of_others(sequence).queries[:, :, start:stop]
        sequence.assert_equals(layer.attend(queries, sink_logits=sinks), want, start)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q: q.double(), "queries: got dtype torch.float64"),
        (lambda q: q[:, :1], "queries: got shape"),
        (lambda q: q[:, :, :0], r"queries.shape\[2\] \(tokens\): got 0, allowed is 1 to 1"),
        (lambda q: q.expand(-1, -1, 2, -1), r"got 2, allowed is 1 to 1"),
        (lambda q: q * float("nan"), "queries: got nan"),
    ],
)
def test_what_are_no_queries_of_its_tokens_is_refused(change, match):
    case = Case()
    sequence, layer = Sequence.of(case, N), layer_of(case)
    with pytest.raises(ValueError, match="queries: got 1 tokens for an empty layer; append"):
        layer.attend(sequence.queries[:, :, :1])
    for start, stop in steps_of(20, 1):
        sequence.feed(layer, start, stop)
    with pytest.raises(ValueError, match=match):
        layer.attend(change(sequence.queries[:, :, 20:21]))
    assert (len(layer), layer.traffic.steps) == (21, 1)
    sequence.assert_equals(sequence.feed(layer, 21, 22), sequence.dense(), 21)

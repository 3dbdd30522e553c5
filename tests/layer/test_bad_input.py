"""A step with wrong arguments raises an error that says why, and leaves the layer unchanged."""

import pytest
import torch

from tests.support.helpers import Case
from tests.support.sequences import Sequence, layer_of, steps_of

CASE = Case(q_heads=4, value_dim=8, batch=2)
NAN = float("nan")


def spoiled(tensor):
    tensor = tensor.clone()
    tensor[1, 1, 0, 3] = NAN
    return tensor


def padded(count, *flags):
    valid = torch.ones(2, count, dtype=torch.bool)
    for token in flags:
        valid[1, token] = False
    return valid


BAD_STEPS = {
    # (change of the arguments, start of the message)
    "NaN in keys": (lambda q, k, v: (q, spoiled(k), v), "keys: got nan, allowed is a finite"),
    "keys of another dtype": (lambda q, k, v: (q, k.half(), v), "keys: got dtype torch.float16"),
    "keys on another device": (lambda q, k, v: (q, k.to("meta"), v), "keys: got device meta"),
    "keys of rank 3": (lambda q, k, v: (q, k[0], v), "keys: got shape"),
    "keys of another batch": (lambda q, k, v: (q[:1], k[:1], v[:1]), "keys: got shape"),
    "values of another length": (
        lambda q, k, v: (q, k, torch.cat([v, v], 2)),
        "values: got shape",
    ),
    "queries of another length": (
        lambda q, k, v: (torch.cat([q, q], 2), k, v),
        "queries: got shape",
    ),
    "queries of rank 3": (lambda q, k, v: (q[:, :, 0], k, v), "queries: got shape"),
    "queries of rank 2": (lambda q, k, v: (q[0, 0], k, v), "queries: got shape"),
    "queries that are no tensor": (lambda q, k, v: ([1.0], k, v), "queries: got list"),
    "queries with KV heads": (lambda q, k, v: (q[:, :2], k, v), "queries: got shape"),
    "no tokens": (
        lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]),
        "queries.shape[2] (tokens): got 0",
    ),
}
SEARCHING = {  # exact attention passes NaN on, as dense attention does
    "NaN in queries": (lambda q, k, v: (spoiled(q), k, v), "queries: got nan, allowed is a finite"),
}


@pytest.mark.parametrize(
    ("case", "fed"),
    [(case, steps_of(2)) for case in BAD_STEPS]
    + [(case, steps_of(20, 1, 1)) for case in BAD_STEPS | SEARCHING],
)
def test_a_bad_step_is_refused_and_changes_nothing(case, fed):
    change, message = (BAD_STEPS | SEARCHING)[case]
    sequence, layer = Sequence.of(CASE, 40), layer_of(CASE)
    for start, stop in fed:
        sequence.feed(layer, start, stop)
    held, counted = len(layer), layer.traffic.steps
    with pytest.raises((ValueError, TypeError)) as error:
        layer.step(*change(*sequence.parts(held, held + 1)))
    assert str(error.value).startswith(message)
    assert (len(layer), layer.traffic.steps) == (held, counted)
    assert_goes_on(layer, sequence, held)


def assert_goes_on(layer, sequence, start):
    """Check that the next steps equal dense attention to the tokens from before the error."""
    want = sequence.dense()
    for token in range(start, start + 12):
        sequence.assert_equals(sequence.feed(layer, token, token + 1), want, token)


def test_valid_of_another_shape_is_refused():
    sequence, layer = Sequence.of(CASE, 40), layer_of(CASE)
    with pytest.raises(ValueError, match="valid: got shape"):
        layer.step(*sequence.parts(0, 3), valid=padded(4, 0))
    assert_goes_on(layer, sequence, 0)


def test_nan_in_padded_keys_and_values_is_fine():
    sequence, layer = Sequence.of(CASE, 40, [0, 9]), layer_of(CASE)
    want = sequence.dense()
    sequence.keys[1, :, :9] = sequence.values[1, :, :9] = NAN
    for start, stop in steps_of(5, 9, 3, *[1] * 20):
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)


def test_bad_batch_indices_are_refused():
    sequence, layer = Sequence.of(CASE, 40), layer_of(CASE)
    sequence.feed(layer, 0, 20)
    for wrong in (torch.tensor([2]), torch.tensor([], dtype=torch.int64), torch.tensor([0.5])):
        with pytest.raises(ValueError, match="batch_indices: got"):
            layer.reorder(wrong)
    assert_goes_on(layer, sequence, 20)


@pytest.mark.parametrize("at", ["observe_queries", "search", "fetch", "append"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fed", [0, 20, 23])
def test_a_failure_inside_a_step_is_undone(monkeypatch, at, error, fed):
    """The step that fails fills the buffer, so its tokens were about to move into the index."""
    sequence, layer = Sequence.of(CASE, 60), layer_of(CASE)
    for start, stop in steps_of(20, 1, 1, 1)[: fed and fed - 19]:
        sequence.feed(layer, start, stop)
    traffic, tokens = layer.traffic, 1 if fed and at in ("search", "fetch") else 20

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(layer.index), at, fail)
        if fed or at in ("observe_queries", "append"):
            with pytest.raises(error):
                sequence.feed(layer, fed, fed + tokens)
    assert len(layer) == fed
    assert layer.traffic == traffic
    if not fed:
        assert layer.batch_size == 0
    assert_goes_on(layer, sequence, fed)


def test_a_sink_that_is_cut_away_takes_no_room():
    sequence, layer = Sequence.of(CASE, 60), layer_of(CASE)
    held = set()
    for _ in range(3):
        sequence.feed(layer, 0, 20)
        held.add(layer.nbytes()["window"])
        layer.truncate(0)
        assert layer.nbytes()["window"] == 0
    assert len(held) == 1

"""Calls of a layer between the beginning and the end of an update that runs concurrently."""

import gc
import random

import pytest
import torch

from kvindex.layer.updates import LAG
from tests.support.beside import CASES, beside, feed, leaving, singles
from tests.support.helpers import Case, mostly_slow, sampled
from tests.support.sequences import Sequence, layer_of


@pytest.mark.parametrize(
    ("length", "case"), sampled([22, 21, 20, 18, 16, 15, 11, 10, 9, 4, 2, 1, 0], CASES)
)
def test_cut_while_rows_are_leaving(case, length):
    """Truncate into the buffer, the local window, the rows that are moving, the index, and the
    sink."""
    case, pads = CASES[case]
    sequence, layer = leaving(case, pads)
    layer.truncate(length)
    assert len(layer) == length
    assert layer._window.leaving == (6 if length >= 16 else 0)
    assert len(layer.index) == min(10, length)
    other = Sequence.of(case, 80, pads, seed=1)
    feed(layer, sequence.then(length, other), [(i, i + 1) for i in range(length, length + 20)])


@pytest.mark.parametrize("order", [[2, 1, 0], [1], [0, 0, 2, 2]])
def test_reordered_while_rows_are_leaving(order):
    case, pads = CASES["padded"]
    sequence, layer = leaving(case, pads)
    layer.reorder(torch.tensor(order))
    assert (len(layer.index), layer._window.leaving) == (16, 0)
    feed(layer, sequence.rows(order), singles(22, 60))


def test_reordered_after_every_step_as_beams_are():
    sequence, layer = leaving()
    for start, stop in singles(22, 60):
        feed(layer, sequence, [(start, stop)])
        layer.reorder(torch.tensor([0, 1]))
        assert len(layer) - len(layer.index) <= 4 + 6 + LAG


def test_reset_while_rows_are_leaving():
    layer = leaving()[1]
    layer.reset()
    assert (len(layer), layer._updates.pending) == (0, None)
    feed(layer, Sequence.of(Case(batch=3), 40, seed=1), [(0, 14), *singles(14, 40)])


def test_let_go_of_while_rows_are_leaving():
    layer = leaving()[1]
    del layer
    gc.collect()


@pytest.mark.parametrize(
    ("tokens", "at", "error"),
    sampled([22, 23], ["observe_queries", "search", "fetch"], [RuntimeError, KeyboardInterrupt]),
)
def test_a_step_that_fails_while_rows_are_leaving(monkeypatch, at, error, tokens):
    """If the step that fails would have ended the update, a later step ends it."""
    sequence, layer = leaving()
    feed(layer, sequence, singles(22, tokens))
    traffic, window = layer.traffic, layer.nbytes()["window"]

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(layer.index), at, fail)
        with pytest.raises(error):
            sequence.feed(layer, tokens, tokens + 1)
    assert (len(layer), len(layer.index), layer._window.leaving) == (tokens, 10, 6)
    assert (layer.traffic, layer.nbytes()["window"]) == (traffic, window)
    feed(layer, sequence, singles(tokens, 60))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_update_that_cannot_begin_leaves_all_as_it_was(monkeypatch, error):
    sequence, layer = Sequence.of(Case(batch=2), 80), beside(Case(batch=2), local_window=4)
    feed(layer, sequence, [(0, 14), *singles(14, 19)])

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(layer.index), "start_append", fail)
        with pytest.raises(error):
            sequence.feed(layer, 19, 20)
    assert (len(layer), len(layer.index), layer._window.leaving) == (19, 10, 0)
    feed(layer, sequence, singles(19, 60))
    assert len(layer.index) > 40


@pytest.mark.parametrize("at", ["without", "end"])
@pytest.mark.parametrize("by", ["step", "reorder"])
def test_an_update_that_cannot_end_ends_later(monkeypatch, at, by):
    sequence, layer = leaving()
    feed(layer, sequence, singles(22, 23))

    def fail(*args, **options):
        raise MemoryError

    def act():
        return layer.reorder(torch.tensor([1, 0])) if by == "reorder" else feed(*last)

    last = layer, sequence, singles(23, 24)
    with monkeypatch.context() as patch:
        patch.setattr(layer._window if at == "without" else layer._updates.pending, at, fail)
        with pytest.raises(MemoryError):
            act()
    assert (len(layer), len(layer.index), layer._window.leaving) == (23, 10, 6)
    feed(layer, sequence, singles(23, 60))
    assert len(layer.index) > 40


def test_an_index_that_was_changed_by_others_ends_in_words():
    layer = leaving()[1]
    layer.index.append(*Case(batch=2).tokens(1))
    with pytest.raises(ValueError, match="append: the index was changed after start_append"):
        layer.reorder(torch.tensor([1, 0]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", mostly_slow(range(30), *range(3)))
def test_whatever_happens_it_is_what_a_layer_without_it_is(seed, device):
    """Steps, truncations, reorders and failures, in any order; every row is attended to."""
    draw = random.Random(seed)
    pads = draw.choice([[0, 0, 0], [0, 7, 16]]) if device == "cpu" else None
    case = Case(q_heads=4, batch=3, device=device)
    busy = torch.randn(2000, 2000, device=device) if device == "cuda" else None
    sizes = dict(local_window=draw.choice([0, 2, 5]), update_every=draw.choice([1, 3, 6]))
    turn = draw.choice([None, 0, 0.5, 0.99])
    layers = [beside(case, update_phase=turn, **sizes), layer_of(case, **sizes)]
    tokens, length = Sequence.of(case, 400, pads), 0
    for _ in range(60):
        done = draw.choice(["one"] * 8 + ["some", "cut", "turn", "fail"])
        if busy is not None:
            busy = (busy @ busy).clamp(-1, 1)  # the device is behind the host
        if done == "cut" and length:
            length = max(17, length - draw.choice([0, 1, 2, 5, 12]))
            for layer in layers:
                layer.truncate(length)
        elif done == "turn" and length:
            order = torch.tensor(draw.choice([[0, 1, 2], [2, 0, 1]]))
            tokens = tokens.rows(order.tolist())
            for layer in layers:
                layer.reorder(order)
        elif done == "fail" and length:
            for layer in layers:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(layer._updates, "update_if_due", lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        tokens.feed(layer, length, length + 1)
        else:
            count = 1 if length and done == "one" else draw.choice([17, 20])
            mine, theirs = (tokens.feed(layer, length, length + count) for layer in layers)
            real = tokens.valid[:, length : length + count]
            mine, theirs = (part.transpose(1, 2)[real] for part in (mine, theirs))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            length += count
        assert [len(layer) for layer in layers] == [length] * 2

"""Updates of the window that run beside the steps: what is read, and what may come in between."""

import gc
import random

import pytest
import torch

from kvindex.indexes.exact import Exact
from kvindex.layer import LAG, AttentionLayer
from kvindex.wrappers import MeasureRecall, Wrapper
from tests.helpers import Case, all_rows
from tests.sequences import SIZES, Sequence, layer_of, steps_of


class Beside(Exact):
    """Exact search whose appends a layer lets run beside its steps; keeps its last hits."""

    appends_beside, hits = True, None

    def _search(self, queries, k):
        self.hits = super()._search(queries, k)
        return self.hits


CASES = {
    "plain": (Case(), None),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "padded": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
}
GEOMETRY = ("q_heads", "kv_heads", "head_dim", "value_dim", "dtype", "softcap", "device")


def beside(case, k=1000, around=None, **sizes):
    backend = "torch" if case.device == "cpu" else "cuda"  # whose rows lie in blocks: none moves
    index = Beside(**{name: getattr(case, name) for name in GEOMETRY}, backend=backend)
    index = around(index) if around else index
    return AttentionLayer(index, k=k, **{**SIZES, "update_every": 6, **sizes})


def feed(layer, sequence, steps):
    """Every step is dense attention."""
    want = sequence.dense()
    for start, stop in steps:
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
        assert len(layer) == stop


def singles(start, stop):
    return [(token, token + 1) for token in range(start, stop)]


def leaving(case=None, pads=None, **sizes):
    """A layer of 24 tokens, of which 10 are in the index and 6 leave it, and the sequence."""
    case = case or Case(batch=2)
    sequence, layer = Sequence.of(case, 80, pads), beside(case, **{"local": 4, **sizes})
    feed(layer, sequence, [(0, 14), *singles(14, 22)])
    assert (len(layer.index), layer._regions.leaving) == (10, 6)
    return sequence, layer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "sizes",
    [dict(), dict(local=0), dict(sink=0), dict(update_every=1), dict(update_every=3, local=9)],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0, 30, 1000])
def test_every_step_is_dense_attention(case, sizes, threshold):
    case, pads = CASES[case]
    plan = steps_of(17, *[1] * 20, 2, 9, *[1] * 14)
    feed(beside(case, full_threshold=threshold, **sizes), Sequence.of(case, 62, pads), plan)


@pytest.mark.parametrize(("around", "passed_on"), [(Wrapper, True), (MeasureRecall, False)])
def test_a_wrapper_passes_it_on_unless_it_appends_more(around, passed_on):
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), around=around, local=4)
    feed(layer, sequence, [(0, 14), *singles(14, 22)])
    assert layer._regions.leaving == (6 if passed_on else 0)
    feed(layer, sequence, singles(22, 60))


def test_token_by_token_from_nothing():
    feed(beside(Case()), Sequence.of(Case(), 50), singles(0, 50))


def test_tokens_are_in_the_index_lag_tokens_after_the_buffer_was_full():
    """Of local 4 and updates of 6; as without the lag, but for it."""
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), local=4)
    feed(layer, sequence, [(0, 14)])
    indexed = []
    for start, stop in singles(14, 44):
        sequence.feed(layer, start, stop)
        indexed.append(len(layer.index))
        assert len(layer) - indexed[-1] <= 4 + 6 + LAG
    assert indexed == [10] * (5 + LAG) + [16] * 6 + [22] * 6 + [28] * 6 + [34] * (7 - LAG)


def test_an_update_is_never_longer_under_way_than_it_takes_to_the_next():
    sequence, layer = Sequence.of(Case(), 60), beside(Case(), local=4, update_every=2)
    feed(layer, sequence, [(0, 14)])
    for start, stop in singles(14, 40):
        sequence.feed(layer, start, stop)
        assert len(layer) - len(layer.index) <= 4 + 2 + 2


def test_several_tokens_at_once_end_it_and_go_at_once():
    sequence, layer = leaving()
    feed(layer, sequence, [(22, 24)])
    assert (len(layer.index), layer._regions.leaving) == (16, 0)
    feed(layer, sequence, [(24, 40), *singles(40, 60)])


@pytest.mark.parametrize("pads", [[0, 0], [6, 1]])
def test_a_step_reads_what_is_leaving_in_the_window_alone(pads):
    """The sink, the hits and the window: an index that is being appended to does not tell."""
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [22, 21, 20, 18, 16, 15, 11, 10, 9, 4, 2, 1, 0])
def test_cut_while_rows_are_leaving(case, length):
    """Into the buffer, what is local, what is leaving, the index, the sink."""
    case, pads = CASES[case]
    sequence, layer = leaving(case, pads)
    layer.truncate(length)
    assert len(layer) == length
    assert layer._regions.leaving == (6 if length >= 16 else 0)
    assert len(layer.index) == min(10, length)
    other = Sequence.of(case, 80, pads, seed=1)
    feed(layer, sequence.then(length, other), [(i, i + 1) for i in range(length, length + 20)])


@pytest.mark.parametrize("order", [[2, 1, 0], [1], [0, 0, 2, 2]])
def test_reordered_while_rows_are_leaving(order):
    case, pads = CASES["padded"]
    sequence, layer = leaving(case, pads)
    layer.reorder(torch.tensor(order))
    assert (len(layer.index), layer._regions.leaving) == (16, 0)
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
    assert (len(layer), layer._move) == (0, None)
    feed(layer, Sequence.of(Case(batch=3), 40, seed=1), [(0, 14), *singles(14, 40)])


def test_let_go_of_while_rows_are_leaving():
    layer = leaving()[1]
    del layer
    gc.collect()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["observe", "search", "fetch"])
@pytest.mark.parametrize("tokens", [22, 23])
def test_a_step_that_fails_while_rows_are_leaving(monkeypatch, at, error, tokens):
    """Also the one that would have ended it: it is still under way, and ends later."""
    sequence, layer = leaving()
    feed(layer, sequence, singles(22, tokens))
    traffic, window = layer.traffic, layer.nbytes()["window"]

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(layer.index, at, fail)
        with pytest.raises(error):
            sequence.feed(layer, tokens, tokens + 1)
    assert (len(layer), len(layer.index), layer._regions.leaving) == (tokens, 10, 6)
    assert (layer.traffic, layer.nbytes()["window"]) == (traffic, window)
    feed(layer, sequence, singles(tokens, 60))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_update_that_cannot_begin_leaves_all_as_it_was(monkeypatch, error):
    sequence, layer = Sequence.of(Case(batch=2), 80), beside(Case(batch=2), local=4)
    feed(layer, sequence, [(0, 14), *singles(14, 19)])

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(layer.index, "begin_append", fail)
        with pytest.raises(error):
            sequence.feed(layer, 19, 20)
    assert (len(layer), len(layer.index), layer._regions.leaving) == (19, 10, 0)
    feed(layer, sequence, singles(19, 60))
    assert len(layer.index) > 40


@pytest.mark.parametrize("at", ["without", "end"])
@pytest.mark.parametrize("by", ["step", "reorder"])
def test_an_update_that_cannot_end_is_begun_again(monkeypatch, at, by):
    sequence, layer = leaving()
    feed(layer, sequence, singles(22, 23))

    def fail(*args, **options):
        raise MemoryError

    def act():
        return layer.reorder(torch.tensor([1, 0])) if by == "reorder" else feed(*last)

    last = layer, sequence, singles(23, 24)
    with monkeypatch.context() as patch:
        patch.setattr(layer._regions if at == "without" else layer._move, at, fail)
        with pytest.raises(MemoryError):
            act()
    assert (len(layer), len(layer.index), layer._regions.leaving) == (23, 10, 0)
    feed(layer, sequence, singles(23, 60))
    assert len(layer.index) > 40


def test_an_index_that_was_changed_by_others_ends_in_words():
    layer = leaving()[1]
    layer.index.append(*Case(batch=2).tokens(1))
    with pytest.raises(ValueError, match="append: the index has changed between"):
        layer.reorder(torch.tensor([1, 0]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_it_is_what_a_layer_without_it_is(seed, device):
    """Steps, cuts, other orders, failures, in any order; all is attended to."""
    draw = random.Random(seed)
    pads = draw.choice([[0, 0, 0], [0, 7, 16]]) if device == "cpu" else None
    case = Case(q_heads=4, batch=3, device=device)
    busy = torch.randn(2000, 2000, device=device) if device == "cuda" else None
    sizes = dict(local=draw.choice([0, 2, 5]), update_every=draw.choice([1, 3, 6]))
    turn = draw.choice([None, 0, 0.5, 0.99])
    layers = [beside(case, turn=turn, **sizes), layer_of(case, **sizes)]
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
                    patch.setattr(layer, "_update", lambda **_: 1 / 0)
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


@pytest.mark.parametrize("prompt", [20, 21, 27, 2])
def test_layers_take_turns(prompt):
    """Each begins its updates at its own remainder, and the window is no longer for it."""
    case, begun = Case(), []
    layers = [beside(case, local=4, update_every=8, turn=turn / 4) for turn in range(4)]
    sequence = Sequence.of(case, 80)
    for number, layer in enumerate(layers):
        begin = layer.index.begin_append

        def noted(*args, number=number, begin=begin, **options):
            begun.append((len(layers[number]), number))
            return begin(*args, **options)

        layer.index.begin_append = noted
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


@pytest.mark.parametrize("turn", [-0.1, 1, 1.5])
def test_a_turn_out_of_range_is_refused(turn):
    with pytest.raises(ValueError, match=f"turn: got {turn}, allowed is"):
        beside(Case(), turn=turn)


def test_another_index_takes_no_turns():
    sequence, layer = Sequence.of(Case(), 60), layer_of(Case(), local=4, update_every=6)
    layer._turn = 1
    for start, stop in [(0, 14), *singles(14, 20)]:
        sequence.feed(layer, start, stop)
    assert (len(layer.index), layer._move) == (16, None)

"""A prompt in chunks whose rows the caller stores gives the same layer as `step`, bit by bit."""

import pytest
import torch

from kvindex.core.protocol import AppendsAsync, Rows
from kvindex.layer import AttentionLayer, dense
from kvindex.layer.sink import first_of, joined, joining
from tests.layer.test_layer import CASES
from tests.support.beside import Beside, beside
from tests.support.helpers import Case, sampled
from tests.support.sequences import SIZES, Sequence, steps_of

PIECES = steps_of(17, 2, 3, 9, 13)


def pieces(layer, sequence, steps=PIECES):
    """Return the outputs of a prompt that is read chunk by chunk."""
    outputs = []
    for start, stop in steps:
        queries, *_ = sequence.parts(start, stop)
        _, *rows = sequence.parts(0, stop)
        valid = sequence.valid[:, start:stop] if start <= max(sequence.pads) else None
        outputs.append(layer.read_chunk(queries, Rows(*rows), valid=valid))
        assert len(layer) == stop
    return torch.cat(outputs, dim=2)


def assert_same(mine, theirs):
    first, second = (layer.state_dict() for layer in (mine, theirs))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("spec", "case"), sampled(["exact", "pariskv", "quest"], CASES))
def test_the_layer_is_what_steps_make_it(case, spec):
    case, pads = CASES[case]
    sequence = Sequence.of(case, 60, pads)
    mine, theirs = (AttentionLayer(case.index(spec), k=7, **SIZES) for _ in range(2))
    output = pieces(mine, sequence)
    want = torch.cat([sequence.feed(theirs, *step) for step in PIECES], dim=2)
    sequence.assert_equals(output, sequence.dense(), 0)
    if case.softcap is None:  # with a softcap, blocks begin at other rows
        real = sequence.valid[:, None, :44, None].expand_as(output)
        assert torch.equal(output[real], want[real])
    assert_same(mine, theirs)
    for token in range(44, 60):
        steps = [sequence.feed(layer, token, token + 1) for layer in (mine, theirs)]
        assert torch.equal(*steps)


def test_pieces_attend_exactly_however_short():
    sequence = Sequence.of(Case(), 30)
    layer = AttentionLayer(Case().index("exact"), k=1, search_up_to=4, **SIZES)
    output = pieces(layer, sequence, steps_of(10, 1, 4, 3, 12))
    sequence.assert_equals(output, sequence.dense(), 0)
    assert layer.traffic.steps == 0


@pytest.mark.parametrize("padded", [False, True])
def test_an_index_appends_beside_until_the_next_piece_or_settle(padded):
    case, pads = (Case(batch=3), [0, 7, 16] if padded else None)
    sequence, layer, held = Sequence.of(case, 60, pads), beside(case), []
    for step in PIECES:
        pieces(layer, sequence, [step])
        held.append(len(layer.index))
    assert held == [0, 13, 13, 13, 27]  # the rows of a chunk are stored when the next chunk arrives
    layer.settle()
    assert len(layer.index) == 40
    alone = beside(case)
    for start, stop in PIECES:
        sequence.feed(alone, start, stop)
    assert_same(layer, alone)


@pytest.mark.parametrize("count", [3, 20])
def test_a_sink_of_tokens_that_are_all_real_is_known_without_asking(count):
    keys, values = torch.randn(2, 2, 3, count, 8)
    rows, size, start = Rows(keys, values), 5, 7
    new = joining(None, size, rows, None)
    want, mine = joined(None, new, rows, start), first_of(min(count, size), rows, start)
    assert torch.equal(mine.ids, want.ids)
    assert torch.equal(mine.rows.keys, want.rows.keys)
    assert torch.equal(mine.rows.values, want.rows.values)
    assert mine.fewest == want.fewest
    keys.zero_()
    assert mine.rows.keys.abs().min() > 0  # the layer has copied the rows


class Fails(Beside):
    def start_append(self, *given, **named):
        if len(self):
            raise MemoryError
        return super().start_append(*given, **named)


def test_a_piece_that_fails_leaves_the_layer_as_it_was():
    case = Case()
    sequence = Sequence.of(case, 60)
    sizes = dict(q_heads=case.q_heads, kv_heads=case.kv_heads, head_dim=case.head_dim)
    layer = AttentionLayer(Fails(**sizes, value_dim=case.value_dim), **SIZES)
    assert layer.index.capability(AppendsAsync) is not None
    pieces(layer, sequence, [(0, 17)])
    layer.settle()
    before = layer.state_dict()
    with pytest.raises(MemoryError):
        pieces(layer, sequence, [(17, 40)])
    after = layer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    want = sequence.dense()
    sequence.assert_equals(pieces(layer, sequence, [(17, 19)]), want, 17)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda rows: Rows(rows.keys[:, :, 1:], rows.values[:, :, 1:]), r"rows\.keys: got shape"),
        (lambda rows: Rows(rows.keys, rows.values[:, :, 1:]), r"rows\.values: got shape"),
        (lambda rows: Rows(rows.keys.double(), rows.values), r"rows\.keys: got dtype"),
        (lambda rows: Rows(rows.keys * float("nan"), rows.values), "keys: got"),
    ],
)
def test_rows_that_are_not_of_all_tokens_are_refused(change, match):
    sequence = Sequence.of(Case(), 30)
    layer = AttentionLayer(Case().index("exact"), **SIZES)
    pieces(layer, sequence, [(0, 17)])
    queries, *_ = sequence.parts(17, 20)
    _, *rows = sequence.parts(0, 20)
    with pytest.raises((ValueError, TypeError), match=match):
        layer.read_chunk(queries, change(Rows(*rows)))
    assert len(layer) == 17


def test_rows_of_the_index_are_not_read(monkeypatch):
    """They may be on the host, where reading is slow."""
    sequence, layer = Sequence.of(Case(), 60), beside(Case())
    monkeypatch.setattr(Beside, "fetch", lambda *_: pytest.fail("a row is fetched"))
    monkeypatch.setattr(dense, "GATHERED_BYTES", 0)
    pieces(layer, sequence)


def test_the_prompt_ends_after_its_last_append(monkeypatch):
    """A decode step follows a chunk whose append is still running."""
    sequence, layer = Sequence.of(Case(), 40), beside(Case(), local_window=4)
    lengths = []
    monkeypatch.setattr(layer.index, "end_prompt", lambda: lengths.append(len(layer.index)))
    pieces(layer, sequence, steps_of(14, 16))
    assert layer._window.leaving
    sequence.assert_equals(sequence.feed(layer, 30, 31), sequence.dense(), 30)
    assert lengths == [26]

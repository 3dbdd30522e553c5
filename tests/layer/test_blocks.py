"""Whole blocks move from the window into an index that encodes blocks; other tokens wait."""

import pytest
import torch

from kvindex.core.protocol import EncodesBlocks
from kvindex.layer import AttentionLayer
from kvindex.layer.updates import LAG
from tests.support.beside import Beside, beside, feed, singles
from tests.support.helpers import Case, sampled
from tests.support.sequences import Sequence, steps_of

CASE = Case(batch=2)
OPTIONS = dict(center=8, refine_factor=1)
PLANS = {
    "at once": steps_of(90),
    "chunks": steps_of(7, 30, 2, 51),
    "decoding": steps_of(21, *[1] * 69),
    "token by token": steps_of(*[1] * 90),
}


def layer(**sizes):
    index = CASE.index("pariskv", **OPTIONS)
    return AttentionLayer(
        index, k=5, **{**dict(sink=3, local_window=4, update_every=8, dense_below=0), **sizes}
    )


def played(steps, pads=None, **sizes):
    sequence, made = Sequence.of(CASE, 100, pads), layer(**sizes)
    for start, stop in steps:
        sequence.feed(made, start, stop)
        assert len(made) == stop
        if made.update_every % 8 == 0:
            assert len(made.index) % 8 == 0
        assert len(made) - len(made.index) < 4 + made.update_every + 8
    return made


@pytest.mark.parametrize(("plan", "pads"), sampled(PLANS, [[0, 11], None]), ids=str)
def test_codes_are_the_same_however_the_text_came(plan, pads):
    once, made = played(PLANS["at once"], pads), played(PLANS[plan], pads)
    held = min(len(once.index), len(made.index))
    assert held >= 72
    for name in ("signs", "magnitudes", "weights", "fractions"):
        parts = [each.index._codes[name][:, :, :held] for each in (once, made)]
        assert torch.equal(*parts), name
    parts = [each.index._codes["centers"][:, :, : held // 8] for each in (once, made)]
    assert torch.equal(*parts)


def test_with_updates_of_another_size_a_block_stays_open():
    made = played(PLANS["decoding"], update_every=5)
    assert len(made.index) % 8
    assert len(made.index) - len(made.index._codes) == len(made.index) % 8


def test_after_a_truncation_blocks_are_whole_again():
    sequence, made = Sequence.of(CASE, 100), played(steps_of(60))
    made.truncate(45)
    assert len(made.index) == 45
    for start, stop in singles(45, 70):
        sequence.feed(made, start, stop)
    assert len(made.index) % 8 == 0
    want = played(steps_of(45, *[1] * 25))
    assert torch.equal(made.index._codes["signs"][:, :, :48], want.index._codes["signs"][:, :, :48])


class Blocks(Beside):
    """Exact search that reports that it encodes blocks."""

    block_tokens = 8

    def _offers(self, wanted):
        return wanted is EncodesBlocks or super()._offers(wanted)


@pytest.mark.parametrize(("prompt", "phase"), sampled([20, 27, 2], [None, 0.0, 0.25, 0.875]))
def test_every_step_is_dense_attention_and_layers_take_their_turns(phase, prompt, monkeypatch):
    """A full block waits for the layer's turn, and the window has room for it."""
    monkeypatch.setattr("tests.support.beside.Beside", Blocks)
    made, sequence, begun = (
        beside(Case(), local_window=4, update_every=8, update_phase=phase),
        Sequence.of(Case(), 80),
        [],
    )
    begin = made.index.start_append

    def noted(*args, **options):
        begun.append(len(made))
        return begin(*args, **options)

    feed(made, sequence, [(0, prompt)])
    made.index.start_append = noted
    room = made._window._room
    for start, stop in singles(prompt, 80):
        feed(made, sequence, [(start, stop)])
        assert len(made.index) % 8 == 0
        assert len(made) - len(made.index) <= room
    later = [length for length in begun if length > prompt + 16]
    assert later == list(range(later[0], 81, 8))
    if phase is not None:
        assert {length % 8 for length in later} == {int(phase * 8)}
        assert room == 4 + 16 + LAG


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.875])
def test_a_block_that_waits_for_its_turn_costs_nothing_and_each_update_has_its_lag(
    phase, monkeypatch
):
    """This holds however many tokens remain in the buffer when the update begins."""
    monkeypatch.setattr("tests.support.beside.Beside", Blocks)
    made, sequence, called = (
        beside(Case(), local_window=4, update_every=8, update_phase=phase),
        Sequence.of(Case(), 80),
        [],
    )
    update = made._updates.update
    made._updates.update = lambda *given: (called.append(len(made)), update(*given))
    feed(made, sequence, [(0, 20), *singles(20, 80)])
    called = [length for length in called if length > 40]
    begun = called[0] if called[0] % 8 == int(phase * 8) else called[0] - LAG
    assert called == [length for length in range(called[0], 81) if (length - begun) % 8 in (0, LAG)]

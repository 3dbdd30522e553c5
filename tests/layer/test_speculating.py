"""Inside `speculating`, tokens can be removed again, and none moves into the index."""

import random
from copy import deepcopy
from threading import Event, Thread

import pytest
import torch

from kvindex.core.protocol import AttendsToAll
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend_blocks
from kvindex.storage.store import TensorStore
from tests.support.helpers import Case
from tests.support.sequences import Sequence

PROMPT = 60
SIZES = dict(sink=3, local_window=0, update_every=4, dense_below=0)


def layer_with(case, name="exact", store="device", **options):
    return AttentionLayer(case.index(name, store=store), k=9, **{**SIZES, **options})


@pytest.mark.parametrize("name", ["exact", "pariskv", "quest"])
@pytest.mark.parametrize("phase", [None, 0.5])
def test_no_token_moves_until_the_end(name, phase):
    case, draw, kept = Case(batch=2), random.Random(0), PROMPT
    sequence, other = Sequence.of(case, 150), Sequence.of(case, 150, seed=1)
    layer = layer_with(case, name, update_phase=phase)
    sequence.feed(layer, 0, PROMPT)
    while kept < 120:
        drafted, right = draw.randint(1, 6), draw.randint(1, 6)
        right = min(right, drafted)
        speculated = sequence.then(kept + right, other)
        indexed = len(layer.index)
        with layer.speculating(drafted):
            for place in range(kept, kept + drafted):  # one by one, then at once
                speculated.feed(layer, place, place + 1)
            layer.truncate(kept)
            speculated.feed(layer, kept, kept + drafted)
            layer.truncate(kept + right)
            assert len(layer.index) <= max(indexed, kept)
        kept += right
        assert len(layer) == kept
    layer.settle()
    assert len(layer.index) > PROMPT
    with layer.attending_fully():
        got = sequence.feed(layer, kept, kept + 1)
    sequence.assert_equals(got, sequence.dense(), kept)


@pytest.mark.parametrize("options", [{}, {"search_up_to": 5}])
def test_steps_that_attend_fully(options):
    case = Case()
    sequence, layer = Sequence.of(case, 80), layer_with(case, **options)
    sequence.feed(layer, 0, PROMPT)
    with layer.speculating(5):
        with layer.attending_fully():
            assert layer.capture_refusal() is not None
            got = sequence.feed(layer, PROMPT, PROMPT + 5)
        assert layer.traffic.steps == 0
        layer.truncate(PROMPT)
        searched = sequence.feed(layer, PROMPT, PROMPT + 5)
        assert layer.traffic.steps == 5
    sequence.assert_equals(got, sequence.dense(), PROMPT)
    assert not torch.allclose(got, searched, atol=1e-3)
    sequence.feed(layer, PROMPT + 5, PROMPT + 7)  # now a chunk of a prompt again
    assert layer.decodes(5) == ("search_up_to" in options)


class AttendingStore(TensorStore):
    """A store that attends to all of its rows itself, for up to 4 tokens."""

    calls, most_tokens = 0, 4

    def attend_all(self, queries):
        self.calls += 1
        ids = torch.arange(len(self)).expand(*self._columns["rows"].shape[:2], -1)
        rows = self.gather(ids)
        blocks = [(rows.keys, rows.values, None)]
        return attend_blocks(queries, blocks, scale=self._geometry.scale, return_lse=True)


def test_a_store_attends_to_all_rows_for_few_tokens():
    case = Case(batch=2)
    store = AttendingStore(case.index("exact").geometry)
    sequence, layer = Sequence.of(case, 80), layer_with(case, store=store)
    sequence.feed(layer, 0, PROMPT)
    for first, count, calls in ((PROMPT, 1, 1), (PROMPT + 1, 4, 2), (PROMPT + 5, 5, 2)):
        with layer.speculating(5), layer.attending_fully():
            got = sequence.feed(layer, first, first + count)
        sequence.assert_equals(got, sequence.dense(), first)
        assert layer.index._store.calls == calls
    queries = torch.zeros(2, case.q_heads, 5, case.head_dim)
    assert layer.index.capability(AttendsToAll) is layer.index
    with pytest.raises(ValueError, match="queries: got 5 tokens, allowed are up to 4"):
        layer.index.attend_all(queries)
    with pytest.raises(ValueError, match="queries: got shape"):
        layer.index.attend_all(queries[:1])
    assert case.index("exact").capability(AttendsToAll) is None
    assert case.index("shadowkv", store=AttendingStore(store._geometry)).most_tokens == 0


@pytest.mark.parametrize("window", [0, 1, 3, 4])
def test_queries_of_tokens_that_have_moved_see_no_later_token(window):
    """A prompt's last tokens move into the index, and another layer's queries attend again."""
    case = Case(batch=2)
    store = AttendingStore(case.index("exact").geometry)
    sequence, layer = Sequence.of(case, 80), layer_with(case, store=store, local_window=window)
    for first, end in ((0, PROMPT), (PROMPT, PROMPT + 4)):
        sequence.feed(layer, first, end)
    assert len(layer) - len(layer.index) == window
    got = layer.attend(sequence.queries[:, :, PROMPT : PROMPT + 4])
    sequence.assert_equals(got, sequence.dense(), PROMPT)
    assert layer.index._store.calls == 1 + (window == 4)  # one for the prompt


def test_an_exception_postpones_the_move():
    case = Case()
    sequence, layer = Sequence.of(case, 80), layer_with(case)
    sequence.feed(layer, 0, PROMPT)
    want = deepcopy(layer)
    with pytest.raises(KeyboardInterrupt):
        interrupted(layer, sequence)
    for place in range(PROMPT, 80):
        got = sequence.feed(layer, place, place + 1)
        assert torch.equal(got, sequence.feed(want, place, place + 1))
        assert len(layer.index) == len(want.index)


def interrupted(layer, sequence):
    with layer.speculating(6):
        sequence.feed(layer, PROMPT, PROMPT + 6)
        layer.truncate(PROMPT)
        raise KeyboardInterrupt


def test_refusals():
    layer = layer_with(Case())
    with pytest.raises(ValueError, match="tokens: got 0"), layer.speculating(0):
        pass
    with layer.speculating(2), pytest.raises(ValueError, match="inside another"):
        layer.speculating(2).__enter__()
    assert not layer.decodes(2)


def test_a_copy_is_outside_of_the_context():
    case = Case()
    sequence, layer = Sequence.of(case, 120), layer_with(case)
    sequence.feed(layer, 0, PROMPT)
    with layer.speculating(4), layer.attending_fully():
        sequence.feed(layer, PROMPT, PROMPT + 2)
        other = deepcopy(layer)
    for each in (layer, other):
        for place in range(PROMPT + 2, 110):
            sequence.feed(each, place, place + 1)
        each.settle()
    assert len(other.index) == len(layer.index) > 100
    assert other.traffic.steps == layer.traffic.steps > 40


def test_a_chunk_of_a_prompt_stays_in_the_window():
    case = Case()
    sequence, layer = Sequence.of(case, 120), layer_with(case)
    sequence.feed(layer, 0, PROMPT)
    indexed = len(layer.index)
    with layer.speculating(2):
        sequence.feed(layer, PROMPT, PROMPT + 20)
        layer.settle()
        assert len(layer.index) == indexed
        layer.truncate(PROMPT)
    assert len(layer) == PROMPT


def test_a_layer_in_use_or_broken_is_refused():
    case = Case()
    layer, sequence = layer_with(case), Sequence.of(case, PROMPT)
    sequence.feed(layer, 0, PROMPT)
    layer._access.enter("step", alone=True)  # of this thread
    refused = []

    def speculate():
        try:
            layer.speculating(2).__enter__()
        except RuntimeError as error:
            refused.append(str(error))

    other = Thread(target=speculate)
    other.start()
    other.join()
    layer._access.leave(alone=True)
    layer._broken = "step"
    speculate()
    assert len(refused) == 2
    assert "another thread" in refused[0]
    assert "call reset() first" in refused[1]
    assert not layer._updates.deferred
    assert not layer._speculated


class Busy:
    """A call of another thread, which is running inside this context."""

    def __init__(self, layer):
        self._layer, self._begun, self._over = layer, Event(), Event()
        self._thread = Thread(target=self._call)

    def _call(self):
        self._layer._access.enter("step", alone=True)
        self._begun.set()
        self._over.wait()
        self._layer._access.leave(alone=True)

    def __enter__(self):
        self._thread.start()
        self._begun.wait()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def test_a_context_ends_whatever_happens():
    case = Case()
    layer, sequence = layer_with(case), Sequence.of(case, PROMPT)
    sequence.feed(layer, 0, PROMPT)
    context = layer.speculating(2)
    context.__enter__()
    with Busy(layer), pytest.raises(RuntimeError, match="another thread"):
        context.__exit__(None, None, None)
    assert not layer._speculated
    assert not layer._updates._held
    context = layer.speculating(2)
    context.__enter__()
    with Busy(layer):  # the error of the block is not replaced
        assert not context.__exit__(KeyError, KeyError("mine"), None)
    assert not layer._speculated
    layer._speculated = 2
    layer.reset()
    assert not layer._speculated

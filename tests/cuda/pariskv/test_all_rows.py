"""Steps of several tokens with full attention in a caller's graph.

On a CPU, the graph is recorded work (`graphs.py`), and torch attends to the pages (`pages.py`).
"""

from itertools import product

import pytest
import torch

from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import AttendsToAll, CapturesAll
from kvindex.core.resident import ResidentRows
from tests.cuda.pages import reads_pages  # noqa: F401  # a fixture
from tests.cuda.pariskv.test_captured_step import graphs  # noqa: F401  # a fixture
from tests.cuda.pariskv.test_several_tokens import (
    BATCH,
    CASE,
    PADS,
    PROMPT,
    UNEVEN,
    Several,
    near,
)
from tests.support.helpers import Case, slow

pytestmark = pytest.mark.usefixtures("reads_pages")


class Full(Several):
    """A layer whose steps with full attention go through a graph for each number of tokens."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self._graphs, self._outputs = {}, {}

    def replay(self, count, kept=None):
        """Return the output of a step of `count` tokens, of which `kept` stay, and the attention of
        these tokens in float64."""
        start, kept = self.length, count if kept is None else kept
        parts = self.parts(count)
        sinks = None if self.sinks is None else self.sinks.cpu().double()[None, :, None]
        dense = self.sequence.dense(sinks=sinks)[:, :, start : start + count].float()
        with self.layer.attending_fully():
            reads = self.layer.prepare_next(count) or self.layer.prepare_replay(count)
            assert reads is not None, self.layer.capture_refusal(count)
            known, graph, own = self._graphs.get(count, (None, None, ()))
            if reads is not known:
                self._parts = own = [one.clone() for one in parts]
                where = torch.device(self.device)
                graph = GRAPHS[where.type](where, self._capture)
                self._graphs[count] = reads, graph, own
                self._outputs[count], self.captures = self._output, self.captures + 1
            for one, given in zip(own, parts, strict=True):
                one.copy_(given)
            graph.replay()
            mine = self._outputs[count].clone()
            self.keep(kept, count)
        return mine.cpu(), dense


def ready(device, **options):
    layer = Full(device, **options)
    layer.feed(PROMPT, 1)
    return layer


@pytest.mark.parametrize(
    ("count", "case"), [(1, CASE), (4, CASE), (3, BATCH), slow(7, CASE), slow(1, BATCH)]
)
def test_the_step_is_full_attention(device, count, case):
    layer = ready(device, case=case)
    before = layer.layer.traffic.steps
    for _ in range(3):
        near(*layer.replay(count))
    assert layer.captures == 1
    assert layer.layer.traffic.steps == before  # no step has searched
    assert layer.layer.index.capability(AttendsToAll) is not None


def test_rejected_tokens_leave_no_trace(device):
    """Each number of accepted tokens, while tokens move into the index."""
    layer, kept = ready(device), [1, 4, 2, 3, 1, 4, 4, 2]
    for count in kept:
        near(*layer.replay(4, count))
    assert len(layer.layer) == layer.length == PROMPT + 1 + sum(kept)
    assert len(layer.layer.index) > PROMPT
    assert layer.captures == 1


def test_sequences_of_a_padded_batch(device):
    """Padding is left out, in the index and in the window, and each sequence has its own sink."""
    layer = ready(device, case=BATCH, pads=PADS)
    for kept in (3, 1, 2, 3, 3, 1, 3):
        near(*layer.replay(3, kept))
    assert layer.captures == 1
    assert len(layer.layer.index) > PROMPT


@pytest.mark.parametrize("pads", [None, slow(PADS)])
def test_sequences_that_keep_different_numbers_of_tokens(device, pads):
    layer = ready(device, case=BATCH, pads=pads)
    for kept in 2 * UNEVEN:
        near(*layer.replay(3, kept))
    assert layer.captures == 1
    inside = layer.sequence.valid[:, PROMPT + 1 : len(layer.layer.index)]
    assert not inside.all()


@pytest.mark.slow
def test_every_pattern_of_a_batch(device):
    """Each number of accepted tokens of each sequence, at several phases of a window update."""
    layer = ready(device, case=BATCH)
    for kept in product([1, 2, 3], repeat=3):
        near(*layer.replay(3, list(kept)))
    assert layer.captures == 1
    valid = layer.sequence.valid[:, : layer.length]
    assert torch.equal(layer.layer.valid.cpu(), valid)


def test_padding_that_is_still_in_the_window(device):
    layer = ready(device, case=BATCH, pads=[0, 88, 4], local_window=40)
    for kept in (3, 1, 3):
        near(*layer.replay(3, kept))


def test_steps_that_search_take_turns_with_it(device):
    few = dict(update_every=80)  # no tokens move into an index meanwhile
    layer, other = ready(device, **few), Several(device, **few)
    other.feed(PROMPT, 1)
    for _ in range(4):
        near(*layer.replay(3, 2))
        other.feed(1, 1)
        mine, theirs = layer.layer, other.layer
        assert layer.length == other.length
        parts = other.parts(1)
        near(mine.step(*parts), theirs.step(*parts))
        layer.length += 1
    assert layer.captures == 1


def test_learned_sinks(device):
    layer = ready(device, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    for kept in (4, 2):
        near(*layer.replay(4, kept))


def test_what_no_graph_can_capture_is_said(device):
    layer = Full(device)
    layer.feed(PROMPT)
    with layer.layer.attending_fully():
        assert "allowed are some in the index, after a decode step" in layer.layer.capture_refusal(
            4
        )
        layer.feed(1)
        assert layer.layer.capture_refusal(4) is None
    latents = Case(q_heads=4, kv_heads=1, head_dim=64, value_dim=48, value_in_key=True)
    other = Full(device, latents)
    other.feed(PROMPT, 1)
    with other.layer.attending_fully():
        why = other.layer.capture_refusal(4)
        assert "whose steps with full attention no CUDA graph can capture" in why
        assert other.layer.prepare_replay(4) is None
    index = other.layer.index
    with pytest.raises(ValueError, match="captured_all: got an index with backend="):
        index.prepare_all(other.layer._window.resident(len(index)), tokens=2, skip=0)


def test_it_must_be_prepared(device):
    layer = ready(device)
    index, resident = layer.layer.index, layer.layer._window.resident(len(layer.layer.index), 9)
    assert index.capability(CapturesAll) is index
    queries = torch.zeros(2, CASE.q_heads, CASE.head_dim, device=device)
    with pytest.raises(RuntimeError, match="call prepare_all"):
        index.captured_all(queries, None, resident)
    for numbers, name in ((dict(tokens=0, skip=0), "tokens"), (dict(tokens=2, skip=-1), "skip")):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            index.prepare_all(resident, **numbers)
    with pytest.raises(ValueError, match=r"^skip: got 3 with masked=True, allowed is 0"):
        index.prepare_all(resident, tokens=2, skip=3, masked=True)
    pair = ready(device, case=BATCH)
    index, resident = pair.layer.index, pair.layer._window.resident(len(pair.layer.index), 9)
    index.prepare_all(resident, tokens=2, skip=0)
    with pytest.raises(ValueError, match=r"^queries: got 4 tokens, allowed is a multiple of 3"):
        index.captured_all(torch.zeros(4, 4, 64, device=device), None, resident)


def test_drafts_are_removed_without_writing_the_window_again(device, monkeypatch):
    layer = ready(device, update_every=80)
    replaced, replace = [], ResidentRows.replace
    monkeypatch.setattr(ResidentRows, "replace", lambda *it: replaced.append(it[0]) or replace(*it))
    near(*layer.replay(3))
    replaced.clear()
    for _ in range(3):
        for _ in range(2):
            near(*layer.replay(1))
        layer.length -= 2
        assert layer.layer.undo_replays(layer.length)
        near(*layer.replay(3, 2))
        with layer.layer.attending_fully():  # both kinds of steps stay prepared
            assert layer.layer.prepare_next(1) is not None
    assert not replaced
    rows, (_, *parts) = layer.layer._window.rows, layer.sequence.parts(0, layer.length)
    window = len(layer.layer) - len(layer.layer.index)
    for own, one in zip((rows.keys, rows.values), parts, strict=True):
        assert torch.equal(own.cpu(), one[:, :, -window:])

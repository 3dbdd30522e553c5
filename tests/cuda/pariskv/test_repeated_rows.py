"""A captured step can attend to the rows that the step before has selected.

On a CPU, the graph is recorded work (`graphs.py`).
"""

import pytest
import torch

from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import Hits
from tests.cuda.devices import mostly_slow_on_cpu
from tests.cuda.pariskv.test_captured_step import (  # `graphs` is a fixture
    CASE,
    PADDED,
    PROMPT,
    Replayed,
    graphs,  # noqa: F401
)
from tests.support.helpers import Case

LATENTS = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=32, value_in_key=True)
LONGER = dict(local_window=16, update_every=16)


class Repeated(Replayed):
    """A pair of layers, the first of which reuses rows. The second one only appends tokens."""

    def select(self):
        """Let both layers search for a token, and note the rows that they select."""
        layer, other = self.layers
        queries = self.sequence.parts(self.length, self.length + 1)[0].to(self.device)
        before = self.replays
        if other.error is None:
            self.hits = other.index.search(queries[:, :, 0], k=other.k)
            self.feed()
        else:  # the number of rows also depends on sink and window
            self.feed()
            self.hits = selected(layer)
        assert self.replays > before, "the token was no replay"

    def repeat(self):
        """Return the output of a token that reuses rows, and what it should be."""
        start, self.length = self.length, self.length + 1
        parts = [one.to(self.device) for one in self.sequence.parts(start, self.length)]
        layer, other = self.layers
        reads = layer.prepare_next() or layer.prepare_replay()
        assert reads is self._reads
        own, device = [one.clone() for one in parts], torch.device(self.device)

        def capture():
            with layer.repeating():
                self._repeated = layer.captured_step(*own)

        graph = GRAPHS[device.type](device, capture)
        graph.replay()
        mine = self._repeated.clone()
        layer.count_replay()
        other.step(*parts)
        resident = other._window.resident(len(other.index))
        wanted = other.index.attend_hits(parts[0][:, :, 0], self.hits, resident)
        return mine[:, :, 0], wanted.output


def selected(layer):
    """Return the rows that the last captured step of a layer has selected."""
    g, executor = layer.index.geometry, layer.index._executor
    found = executor._newest(layer.k, True).selection
    ids = found.ids.view(-1, g.kv_heads, layer.k)
    used = torch.arange(layer.k, device=ids.device) < found.found.view(-1, g.kv_heads, 1)
    most = int(used.sum(-1).max())
    ids = ids.masked_fill(~used, 0)[..., :most]
    weights = found.weights.view_as(used).masked_fill(~used, float("-inf"))[..., :most]
    weights = weights.repeat_interleave(g.group_size, dim=1)
    return Hits(ids=ids, scores=torch.zeros_like(ids, dtype=torch.float32), log_weight=weights)


def ready(device, **options):
    pair = Repeated(device, **options)
    pair.feed(PROMPT)
    pair.feed(times=4)
    return pair


@mostly_slow_on_cpu(
    "options",
    [
        {},
        dict(preset="fast"),
        dict(preset="precise"),
        dict(case=PADDED, pads=[0, 5]),
        dict(row_codec="int8"),
        dict(preset="paper"),
        dict(case=LATENTS),
        dict(error=0.3),
    ],
    {},
    dict(preset="fast"),
    dict(error=0.3),
)
def test_rows_are_those_of_the_step_before(device, options):
    pair = ready(device, **LONGER, **options)
    for _ in range(2):
        pair.select()
        for _ in range(3):
            mine, wanted = pair.repeat()
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)


def test_a_repeated_step_differs_from_a_search(device):
    """Otherwise the test above would not notice a search."""
    pair = ready(device, **LONGER)
    pair.select()
    pair.sequence.queries[:, :, pair.length] *= -1
    mine, _ = pair.repeat()
    start = pair.length - 1
    queries = pair.sequence.parts(start, start + 1)[0].to(device)
    searched = pair.layers[1].index.search(queries[:, :, 0], k=pair.layers[1].k)
    assert set(searched.ids.flatten().tolist()) != set(pair.hits.ids.flatten().tolist())
    assert torch.isfinite(mine).all()


def test_rows_read_are_counted(device):
    pair = ready(device, **LONGER)
    before = pair.layers[0].traffic
    pair.select()
    pair.repeat()
    pair.repeat()
    mine, theirs = (layer.traffic for layer in pair.layers)
    assert mine.steps == before.steps + 3 == theirs.steps
    assert float(mine.rows_read) == float(theirs.rows_read)


def test_removed_drafts_leave_no_trace(device):
    pair = ready(device, **LONGER)
    start, layers = pair.length, pair.layers
    with layers[0].speculating(4), layers[1].speculating(4):
        pair.select()
        pair.repeat()
        for layer in layers:
            layer.truncate(start)
    pair.length = start
    pair.feed(times=3)  # compares both layers


def test_without_a_prepared_step(device):
    pair = ready(device, **LONGER)
    layer = pair.layers[0]
    parts = [one.to(device) for one in pair.sequence.parts(pair.length, pair.length + 1)]
    layer.k = 7
    with layer.repeating(), pytest.raises(RuntimeError, match=r"prepare_replay.*k=7"):
        layer.captured_step(*parts)


def test_buffers_that_were_replaced_contain_no_rows(device):
    pair = ready(device, **LONGER)
    pair.select()
    layer = pair.layers[0]
    layer.index.reserve(100_000)
    assert layer.prepare_replay() is not None
    parts = [one.to(device) for one in pair.sequence.parts(pair.length, pair.length + 1)]
    with layer.repeating(), pytest.raises(RuntimeError, match="has selected rows"):
        layer.captured_step(*parts)


def test_only_an_index_with_kernels_can_repeat(device):
    pair = ready(device, **LONGER)
    assert pair.layers[0].can_repeat
    plain = Replayed("cpu", case=CASE, backend="torch")
    plain.layers[0].step(*plain.sequence.parts(0, PROMPT))
    assert not plain.layers[0].can_repeat

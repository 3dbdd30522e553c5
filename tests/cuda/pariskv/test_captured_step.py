"""A layer's step in a caller's graph returns what `step` returns, whatever happens in between.

On a CPU, the graph is recorded work (`graphs.py`).
"""

from copy import deepcopy

import pytest
import torch

from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import Rows
from kvindex.layer import AttentionLayer
from kvindex.pariskv.index import ParisKV
from kvindex_cuda.pariskv.steps import sign_votes
from kvindex_cuda.runtime.resolve import NamedLaunch
from tests.cuda.devices import slow_on_cpu
from tests.cuda.graphs import WholeGraph, recorded
from tests.cuda.launches import Launches
from tests.support.helpers import Case, Operations, mostly_slow, slow
from tests.support.sequences import Sequence

CASE = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
PADDED = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64, batch=2)
SIZES = dict(k=20, sink=4, local_window=8, update_every=8, dense_below=40, graphs=False)
PROMPT = 60


@pytest.fixture(autouse=True)
def graphs(device, monkeypatch):
    """Graphs of tensors on a CPU, with delayed checks as on a GPU."""
    if device != "cpu":
        yield
        return
    monkeypatch.setattr(ParisKV, "_defers", True)
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    with recorded(WholeGraph):
        yield


class Replayed:
    """A layer whose single tokens go through a graph where possible, and one whose tokens
    do not.
    """

    def __init__(self, device, case=CASE, pads=None, sinks=None, **options):
        self.device, self.sequence = device, Sequence.of(case, 400, pads)
        store = "host" if device == "cuda" else "device"
        sizes = {name: options.pop(name, value) for name, value in SIZES.items()}
        sizes |= {name: options.pop(name, None) for name in ("update_phase", "error")}
        made = dict(backend="cuda", device=device, store=store) | options
        self.layers = [AttentionLayer(case.index("pariskv", **made), **sizes) for _ in range(2)]
        self.sinks = None if sinks is None else sinks.to(device)
        self.length = self.made = self.replays = 0
        self._reads = self._graph = None

    def feed(self, count=1, times=1):
        for _ in range(times):
            start, self.length = self.length, self.length + count
            parts = [one.to(self.device) for one in self.sequence.parts(start, self.length)]
            valid = None
            if start <= max(self.sequence.pads) > 0:
                valid = self.sequence.valid[:, start : self.length].to(self.device)
            mine = self._replay(parts) if count == 1 and self.made >= 0 else None
            if mine is None:
                mine = self.layers[0].step(*parts, valid=valid, sink_logits=self.sinks)
            theirs = self.layers[1].step(*parts, valid=valid, sink_logits=self.sinks)
            assert torch.equal(mine, theirs)

    def _replay(self, parts):
        """Return the output of a graph, or None if the token needs a normal step."""
        layer = self.layers[0]
        reads = layer.prepare_replay()
        if reads is None:
            return None
        if reads is not self._reads:
            self._parts = [one.clone() for one in parts]
            where = torch.device(self.device)
            self._graph = GRAPHS[where.type](where, self._capture)
            self._reads, self.made = reads, self.made + 1
        for own, given in zip(self._parts, parts, strict=True):
            own.copy_(given)
        self._graph.replay()
        layer.count_replay()
        self.replays += 1
        return self._output.clone()

    def _capture(self):
        self._output = self.layers[0].captured_step(*self._parts, sink_logits=self.sinks)

    def each(self, change):
        for layer in self.layers:
            change(layer)


def replayed(device, tokens=6, **options):
    """Feed a prompt, a step that ends it, and then tokens through a graph."""
    pair = Replayed(device, **options)
    pair.feed(PROMPT)
    pair.feed(times=1 + tokens)
    return pair


def test_codes_are_read_early_in_a_graph_alone(device, monkeypatch):
    """Outside of a graph, the previous kernel may be the one that writes the codes."""
    found, launch = [], NamedLaunch.__call__

    def noted(self, *namespaces, overlap=False, **named):
        if "token_keys" in named:  # `prepare_query`
            found.append((overlap, named["token_keys"] is not None))
        launch(self, *namespaces, overlap=overlap, **named)

    pair = replayed(device, tokens=1)
    monkeypatch.setattr(NamedLaunch, "__call__", noted)
    layer, parts = pair.layers[0], pair._parts
    layer.step(*parts)
    for captured in (False, True):
        layer.prepare_replay()
        monkeypatch.setattr(sign_votes, "capturing", lambda device, found=captured: found)
        layer.captured_step(*parts)
        layer.count_replay()
    assert found == [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("beside", mostly_slow([True, False], True))
def test_over_updates_there_is_one_graph_and_traffic_is_the_same(device, monkeypatch, beside):
    monkeypatch.setattr(ParisKV, "supports_async_append", beside)
    tokens = 20 if device == "cpu" else 40
    pair = replayed(device, tokens=tokens, update_phase=0.5)
    assert (pair.made, pair.replays) == (1, tokens)
    mine, theirs = (layer.traffic for layer in pair.layers)
    for name in ("steps", "rows_read", "rows_full", "bytes_fetched"):
        assert float(getattr(mine, name)) == float(getattr(theirs, name))
    assert pair.layers[0].nbytes() == pair.layers[1].nbytes()
    assert len(pair.layers[0].index) == len(pair.layers[1].index) > PROMPT


MOST = {"cpu": [6, 9, 5, 120, 10, 5], "cuda": [7, 12, 5, 120, 10, 5]}
"""Operations of torch and launches of two updates of a block (docs/pipeline/regions.md): at the
start, at the end, and before the next token. The second update makes the index 4 blocks long, at
which the regression of signs is fitted. Operations on the host's own tensors are counted too,
although they launch nothing on a GPU. On a GPU, `record_stream` is counted as well, and three more
when the first update ends.
"""


@pytest.mark.slow  # 450 tokens
def test_an_update_of_a_block_is_few_launches_and_other_tokens_need_none(device):
    """This holds also while a full block waits for the layer's turn."""
    made = Replayed(device, local_window=8, update_every=256, update_phase=0.1)
    layer, sequence, costs = made.layers[0], Sequence.of(CASE, 1100), []
    for start, stop in ((0, 600), (600, 601), *((n, n + 1) for n in range(601, 1060))):
        parts = [one.to(device) for one in sequence.parts(start, stop)]
        if start < 601:
            layer.step(*parts)
            # with more, candidates would need larger buffers and another graph
            layer.index.reserve(1100)
            continue
        if start == 602:  # from here on, the host launches nothing that is in the graph
            for name in ("prepare_replay", "count_replay"):
                setattr(layer, name, noted(getattr(layer, name), costs))
        assert made._replay(parts) is not None
    assert made.made == 1
    names = [name for name, cost in costs if cost]
    assert names == ["count_replay", "count_replay", "prepare_replay"] * 2
    found = [cost for _, cost in costs if cost]
    assert all(cost <= most for cost, most in zip(found, MOST[device], strict=True)), found


def noted(call, costs):
    """Return a function that makes the call and counts its launches and its operations that are not
    views.
    """

    def counted():
        with Operations() as operations, Launches() as launches:
            result = call()
        costs.append((call.__name__, len(operations.names) + len(launches.names)))
        return result

    return counted


@slow_on_cpu
@pytest.mark.parametrize("preset", ["fast", slow("precise"), "paper"])
def test_every_presets_step(device, preset):
    assert replayed(device, preset=preset).made == 1


@pytest.mark.slow
def test_several_heads_and_sequences_of_values_of_another_size(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=32, batch=2)
    assert replayed(device, tokens=20, case=case).made == 1


@slow_on_cpu
def test_a_token_beyond_the_room_is_written_nowhere_and_not_counted(device):
    """The first launch of a step stages the token.

    A graph that is replayed too often must not write past the buffer.
    """
    pair = replayed(device)
    layer = pair.layers[0]
    resident = layer._window.resident(len(layer.index))
    rows = resident.rows.clone()
    for held in (resident.room - 1, resident.room):
        resident.count.fill_(held)
        pair._graph.replay()
        assert resident.count.item() == resident.room
        assert torch.equal(resident.rows[:, :, : resident.room - 1], rows[:, :, :-1])
        rows = resident.rows.clone()


@slow_on_cpu
def test_a_token_of_another_size_is_refused(device):
    pair = replayed(device)
    layer = pair.layers[0]
    queries, keys, values = pair._parts
    resident, index = layer._window.resident(len(layer.index), more=1), layer.index
    for name, token in (("keys", (keys[..., 1:], values)), ("values", (keys, values.double()))):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            index.captured_step(queries[:, :, 0], Rows(*token), resident, k=20)


@slow_on_cpu
def test_a_padded_batch(device):
    pair = replayed(device, tokens=12, case=PADDED, pads=[0, 13])
    assert pair.made == 1
    assert torch.equal(pair.layers[0].valid, pair.layers[1].valid)
    assert float(pair.layers[0].traffic.rows_full) == float(pair.layers[1].traffic.rows_full)


@pytest.mark.slow
def test_with_learned_sinks(device):
    """Sinks of the model's dtype, with a batch, add a term to every step, also in a graph."""
    mine = replayed(device, case=PADDED, sinks=torch.tensor([0.5, -2], dtype=torch.bfloat16))
    assert mine.made == 1
    plain = replayed(device, case=PADDED)
    assert not torch.allclose(mine._output, plain._output)


@slow_on_cpu
@pytest.mark.parametrize("cut", mostly_slow([1, 3, 10, 30], 3))
def test_after_a_cut_it_goes_on(device, cut):
    """Truncate staged tokens, tokens of the window, and tokens of the index."""
    pair = replayed(device, tokens=9)
    length = pair.length - cut
    pair.each(lambda layer: layer.truncate(length))
    pair.length = length
    pair.feed(times=8)
    assert pair.made == 1


@slow_on_cpu
def test_tokens_by_steps_and_several_at_once_in_between(device):
    pair = replayed(device)
    for count in (1, 3, 1, 20, 2):
        made, pair.made = pair.made, -1  # these layers get no graph
        pair.feed(count)
        pair.made = made
        pair.feed(times=4)
    assert pair.made == 1


@slow_on_cpu
def test_another_order_of_the_batch_and_a_reset_are_other_graphs(device):
    pair = replayed(device, case=PADDED)
    pair.each(lambda layer: layer.reorder(torch.tensor([1, 0])))
    pair.sequence = pair.sequence.rows([1, 0])
    pair.feed(times=3)
    assert pair.made == 2
    pair.each(lambda layer: layer.reset())
    pair.length = 0
    pair.feed(PROMPT)
    pair.feed(times=4)
    assert pair.made == 3


@pytest.mark.slow
def test_back_to_a_checkpoint(device):
    """A checkpoint includes tokens that only the resident rows have, and counters."""
    pair = replayed(device, tokens=3)
    marks, length = [layer.checkpoint() for layer in pair.layers], pair.length
    read = float(pair.layers[0].traffic.rows_read)
    pair.feed(times=12)
    for layer, mark in zip(pair.layers, marks, strict=True):
        layer.rollback(mark)
    pair.length = length
    assert float(pair.layers[0].traffic.rows_read) == read
    pair.feed(times=12)


@pytest.mark.slow
def test_a_deep_copy_has_what_was_staged_and_a_graph_of_its_own(device):
    pair = replayed(device, tokens=3)
    first, length = pair.layers, pair.length
    twins = [deepcopy(layer) for layer in first]
    pair.feed(times=6)
    pair.layers, pair.length = twins, length
    pair.feed(times=12)
    pair.layers, pair.length = first, length + 6
    pair.feed(times=3)
    assert pair.made >= 2


@slow_on_cpu
def test_an_update_that_fails_leaves_the_token_and_comes_again(device, monkeypatch):
    pair = replayed(device, tokens=0)
    while (
        pair.layers[0]._window.buffer < SIZES["update_every"] - 1 or pair.layers[0]._updates.pending
    ):
        pair.feed()
    parts = [one.to(device) for one in pair.sequence.parts(pair.length, pair.length + 1)]
    with monkeypatch.context() as patch:
        patch.setattr("kvindex.layer.updates.AsyncAppend", _no_memory)
        patch.setattr(pair.layers[1]._updates, "update_if_due", lambda _: None)
        with pytest.raises(MemoryError):
            pair._replay(parts)
        pair.layers[1].step(*parts)
    pair.length += 1
    assert len(pair.layers[0]) == len(pair.layers[1]) == pair.length
    pair.feed(times=12)
    assert pair.made == 2  # the window has outgrown its buffer


def _no_memory(*_, **__):
    raise MemoryError("rows")


def test_a_replay_without_room_made_for_it_is_an_error_in_words(device):
    pair = replayed(device)
    pair.layers[0].truncate(pair.length - 1)
    with pytest.raises(RuntimeError, match=r"graph: got a replay before prepare_replay\(\)"):
        pair.layers[0].count_replay()

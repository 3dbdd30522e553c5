"""Layers that capture their decode steps automatically:

when they do, and that outputs do not change.

On a CPU, graphs are recorded launches (`graphs.py`). This is one file because every test feeds the
same pair of layers (`Two`), one with graphs and one without.
"""

import gc
import weakref
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch

from kvindex.core import graphs as replaying
from kvindex.layer import AttentionLayer
from kvindex.pariskv.index import ParisKV
from kvindex_cuda.pariskv.steps.graph import WARM
from tests.cuda.devices import slow_on_cpu
from tests.cuda.graphs import counted
from tests.cuda.launches import Launches
from tests.support.helpers import Case, Operations, mostly_slow, slow
from tests.support.sequences import Sequence

CASE = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64)
PADDED = Case(q_heads=2, kv_heads=1, head_dim=64, value_dim=64, batch=2)
SIZES = dict(k=20, sink=4, local_window=8, update_every=4, dense_below=40)
PROMPT = 60


@pytest.fixture
def graphs(device):
    """Count graphs and replays."""
    with counted(device) as counting:
        yield counting


def layer_of(device, case=CASE, graphs=True, **options):
    store = "host" if device == "cuda" else "device"
    sizes = {name: options.pop(name, value) for name, value in SIZES.items()}
    made = case.index("pariskv", backend="cuda", device=device, **dict(store=store) | options)
    return AttentionLayer(made, graphs=graphs, **sizes)


class Two:
    """A layer with graphs and one without, with the same input.

    Their outputs must be equal bit by bit.
    """

    def __init__(self, device, case=CASE, pads=None, **options):
        self.layers = [layer_of(device, case, on, **options) for on in (True, False)]
        self.device, self.sequence = device, Sequence.of(case, 300, pads)
        self.length = 0

    def feed(self, count=1, times=1):
        for _ in range(times):
            start, self.length = self.length, self.length + count
            parts = [one.to(self.device) for one in self.sequence.parts(start, self.length)]
            valid = None
            if start <= max(self.sequence.pads) > 0:
                valid = self.sequence.valid[:, start : self.length].to(self.device)
            mine, theirs = (layer.step(*parts, valid=valid) for layer in self.layers)
            assert torch.equal(mine, theirs)
            assert mine.isfinite().all()
        return mine

    def each(self, change):
        for layer in self.layers:
            change(layer)


def two(device, steps=WARM + 2, **options):
    """Feed a prompt, and enough steps to have a graph."""
    pair = Two(device, **options)
    pair.feed(PROMPT)
    pair.feed(times=steps)
    return pair


@pytest.mark.parametrize(("case", "pads"), [(CASE, None), (PADDED, [0, 13])], ids=str)
def test_a_step_is_few_operations_and_launches(device, graphs, monkeypatch, case, pads):
    """Operations cost the host most of its time: about 5 µs each, and 1 µs for a view."""
    monkeypatch.setattr(ParisKV, "_defers", True)
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)  # as on a GPU
    pair = two(device, update_every=40, case=case, pads=pads)
    step = pair.sequence.parts(pair.length, pair.length + 1)
    parts, found = [one.to(device).contiguous() for one in step], []
    for layer in pair.layers:
        with Launches() as launches, Operations() as operations:
            layer.step(*parts)
        found.append((launches.names, operations.names))
        assert operations.count <= 18
    resident = pair.layers[1]._window.resident(len(pair.layers[1].index))
    with Launches() as alone:
        pair.layers[1].index.attend(parts[0][:, :, 0], resident, k=SIZES["k"])
    assert found[0] == (["stage_token"], ["aten.clone.default"])  # in addition to the replay
    assert found[1] == (["stage_token", *alone.names], ["aten.empty_like.default"] * 3)


def test_steps_are_captured_once_and_replayed_over_updates_of_the_window(
    device, graphs, monkeypatch
):
    monkeypatch.setattr(ParisKV, "supports_async_append", True)
    pair = two(device, steps=WARM)
    assert (graphs.made, graphs.replays) == (0, 0)
    pair.feed(times=12)
    assert (graphs.made, graphs.replays) == (1, 12)
    assert len(pair.layers[0].index) > PROMPT - 4
    mine, theirs = (layer.traffic for layer in pair.layers)
    assert mine.steps == WARM + 12
    for name in ("rows_read", "rows_full", "bytes_fetched"):
        assert float(getattr(mine, name)) == float(getattr(theirs, name))


@slow_on_cpu
@pytest.mark.parametrize(
    "case",
    [
        slow(Case(q_heads=4, kv_heads=2, head_dim=64, softcap=3.0)),
        slow(Case(q_heads=3, kv_heads=1, head_dim=120, dtype=torch.float16, batch=2)),
        Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_other_shapes_and_dtypes(device, graphs, case):
    two(device, case=case)
    assert graphs.made == 1


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_rows_as_codes(device, graphs, rows):
    two(device, row_codec=rows)
    assert graphs.replays == 2


@pytest.mark.parametrize("preset", ["precise", "paper"])
def test_every_presets_step(device, graphs, preset):
    two(device, preset=preset).feed(times=2)
    assert (graphs.made, graphs.replays) == (1, 4)


@slow_on_cpu
def test_a_padded_batch(device, graphs):
    pair = two(device, case=PADDED, pads=[0, 13])
    pair.feed(times=6)
    assert graphs.made == 1
    mine, theirs = (layer.traffic for layer in pair.layers)
    assert float(mine.rows_full) == float(theirs.rows_full)
    assert float(mine.rows_read) == float(theirs.rows_read)


def test_results_are_the_callers(device, graphs):
    pair = two(device)
    first = pair.feed()
    kept_of_it = first.clone()
    second = pair.feed()
    assert torch.equal(first, kept_of_it)
    assert not torch.equal(first, second)


def test_what_a_caller_does_to_its_tensors_afterwards_does_not_matter(device, graphs):
    pair = two(device)
    parts = [one.to(device).clone() for one in pair.sequence.parts(pair.length, pair.length + 1)]
    for layer in pair.layers:
        own = [one.clone() for one in parts]
        layer.step(*own)
        for one in own:
            one.fill_(float("nan"))
    pair.length += 1
    pair.feed(times=5)


def test_queries_keys_and_values_of_other_strides(device, graphs):
    """Tensors as transformers passes them: values are a view of `[B, 1, G · Dv]`."""
    pair = two(device)
    for _ in range(3):
        parts = pair.sequence.parts(pair.length, pair.length + 1)
        turned = [one.to(device).transpose(1, 2).contiguous().transpose(1, 2) for one in parts]
        spread = [one.to(device).mT.contiguous().mT for one in parts]
        spread = [torch.stack([one, one], dim=-1)[..., 0] for one in spread]
        mine, theirs = pair.layers[0].step(*turned), pair.layers[1].step(*spread)
        assert torch.equal(mine, theirs)
        pair.length += 1


@pytest.mark.parametrize("length", mostly_slow([PROMPT + 3, PROMPT, 40], PROMPT))
def test_after_a_cut(device, graphs, length):
    """Tokens go to the window or to the index; the graph stays valid."""
    pair = two(device)
    pair.each(lambda layer: layer.truncate(length))
    pair.length = length
    pair.feed(times=5)
    assert graphs.made == 1


@slow_on_cpu
def test_after_another_order_of_the_batch_it_is_captured_again(device, graphs):
    pair = two(device, case=PADDED)
    pair.each(lambda layer: layer.reorder(torch.tensor([1, 0])))
    pair.sequence = pair.sequence.rows([1, 0])
    pair.feed(times=WARM)
    assert graphs.made == 1
    pair.feed(times=3)
    assert graphs.made == 2


@slow_on_cpu
def test_a_batch_of_another_size(device, graphs):
    pair = two(device, case=PADDED)
    pair.each(lambda layer: layer.reorder(torch.tensor([1])))
    pair.sequence = pair.sequence.rows([1])
    pair.feed(times=WARM + 3)
    assert graphs.made == 2


@slow_on_cpu
def test_after_reset(device, graphs):
    pair = two(device)
    pair.each(lambda layer: layer.reset())
    pair.length, pair.sequence = 0, Sequence.of(CASE, 300, seed=3)
    pair.feed(PROMPT)
    pair.feed(times=WARM + 2)
    assert graphs.made == 2


@slow_on_cpu
def test_several_tokens_in_between_are_exact_and_the_graph_goes_on(device, graphs):
    pair = two(device)
    pair.feed(3)
    pair.feed(times=2)
    pair.feed(20)
    pair.feed(times=3)
    assert graphs.made == 1


@slow_on_cpu
def test_another_k_is_another_graph(device, graphs):
    pair = two(device)
    for layer in pair.layers:
        layer.k = 9
    pair.feed(times=WARM + 3)
    assert graphs.made == 2


@slow_on_cpu
def test_candidates_that_outgrow_their_buffers(device, graphs):
    """More than twice the candidates of the first search need new buffers and a new graph."""
    pair = two(device, k=2, beta=0.2)
    assert graphs.made == 1
    before = pair.layers[0].index._executor._newest(2).step
    more = CASE.tokens(500, seed=7)
    for layer in pair.layers:
        layer._updates.finish()  # of a pending update
        layer.index.append(*(one.to(device) for one in more))
    mine, theirs = pair.layers
    assert mine.index._executor._newest(2).outgrown
    parts = [one.to(device) for one in pair.sequence.parts(280, 281)]
    for _ in range(WARM + 3):
        assert torch.equal(mine.step(*parts), theirs.step(*parts))
    assert mine.index._executor._newest(2).step is not before
    assert graphs.made == 2
    assert (
        mine.index._executor._replays.replay.reads.wanted is mine.index._executor._newest(2).wanted
    )


@slow_on_cpu
def test_a_step_that_fails_after_a_replay_is_undone(device, graphs, monkeypatch):
    pair = two(device)
    traffic = float(pair.layers[0].traffic.rows_read)
    with monkeypatch.context() as patch:
        patch.setattr(pair.layers[0]._updates, "update_if_due", lambda _: 1 / 0)
        parts = [one.to(device) for one in pair.sequence.parts(pair.length, pair.length + 1)]
        with pytest.raises(ZeroDivisionError):
            pair.layers[0].step(*parts)
    assert len(pair.layers[0]) == pair.length
    assert float(pair.layers[0].traffic.rows_read) == traffic
    pair.feed(times=5)
    assert graphs.made == 1


@slow_on_cpu
def test_a_query_that_is_not_finite_is_an_error_later(device, graphs, monkeypatch):
    monkeypatch.setattr(ParisKV, "_defers", True)
    monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    pair = two(device)
    layer = pair.layers[0]
    queries, keys, values = (
        one.to(device).clone() for one in pair.sequence.parts(pair.length, pair.length + 1)
    )
    queries[0, 1] = torch.nan
    replays = graphs.replays
    layer.step(queries, keys, values)
    assert graphs.replays == replays + 1
    with pytest.raises(ValueError, match=r"queries: got \(in an earlier call\) what is not"):
        layer.index.raise_pending()


@slow_on_cpu
def test_layers_share_a_steps_buffers_and_what_graphs_read_and_write(device, graphs):
    pairs = [two(device) for _ in range(2)]
    for _ in range(3):
        for pair in pairs:
            pair.feed()
    replays = [pair.layers[0].index._executor._replays.replay for pair in pairs]
    assert graphs.made == 2
    assert len({replay.asked.data_ptr() for replay in replays}) == 1
    assert len({replay._answer.data_ptr() for replay in replays}) == 1


def test_a_layers_step_is_not_for_a_callers_capture(device, graphs, monkeypatch):
    pair = two(device, steps=1)
    parts = [one.to(device) for one in pair.sequence.parts(pair.length, pair.length + 1)]
    monkeypatch.setattr(
        import_module("kvindex_cuda.pariskv.executor"), "capturing", lambda device: True
    )
    with pytest.raises(
        RuntimeError, match=r"graph: decode_step cannot be captured, .* capture captured_step"
    ):
        pair.layers[0].step(*parts)
    assert len(pair.layers[0]) == pair.length


def test_graphs_can_be_turned_off(device, graphs):
    layer = layer_of(device, graphs=False)
    sequence = Sequence.of(CASE, 100)
    for start, stop in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, PROMPT + 5))]:
        layer.step(*(one.to(device) for one in sequence.parts(start, stop)))
    assert graphs.made == 0


@pytest.mark.parametrize("graphs", [1, None, "yes"])
def test_graphs_must_be_a_flag(graphs):
    with pytest.raises(ValueError, match=f"graphs: got {graphs!r}, allowed is True or False"):
        AttentionLayer(CASE.index("exact"), graphs=graphs)


@slow_on_cpu
def test_an_index_in_a_wrapper_and_a_share_of_the_mass_go_without(device, graphs):
    for options in (dict(name="pariskv:preset=fast+sample"), dict(coverage=0.9)):
        name = options.pop("name", "pariskv")
        index = CASE.index(name, backend="cuda", device=device)
        layer = AttentionLayer(index, **SIZES, **options)
        sequence = Sequence.of(CASE, 100)
        for start, stop in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, PROMPT + 4))]:
            layer.step(*(one.to(device) for one in sequence.parts(start, stop)))
    assert graphs.made == 0


@slow_on_cpu
def test_a_driver_that_refuses_is_said_once_and_steps_go_on(device, graphs, monkeypatch):
    def refuse(*given):
        raise RuntimeError("out of graphs")

    with monkeypatch.context() as patch:
        patch.setitem(replaying.GRAPHS, device, refuse)
        pair = Two(device)
        pair.feed(PROMPT)
        pair.feed(times=WARM)
        said = r"graphs: .* refuses to capture a step \(out of graphs\)"
        with pytest.warns(UserWarning, match=said):
            pair.feed()
        patch.setattr("warnings.warn", lambda *_, **__: 1 / 0)
        pair.feed(times=2)


@slow_on_cpu
def test_an_index_that_is_used_between_the_steps(device, graphs):
    """Searches with another k, and attention with other rows in addition, share the step's
    buffers.
    """
    pair = two(device)
    queries = CASE.queries().to(device)
    for _ in range(3):
        found = [layer.index.search(queries, k=7).ids for layer in pair.layers]
        assert torch.equal(*found)
        pair.feed()
    assert graphs.made == 1


@slow_on_cpu
def test_it_ends_with_the_index(device, graphs):
    pair = two(device)
    replay = weakref.ref(pair.layers[0].index._executor._replays.replay)
    pair.each(lambda layer: layer.reset())
    assert replay() is None


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_captured_is_ended_whatever_happens(monkeypatch, fails):
    """Record the calls of torch in order. Garbage is not collected in between."""
    done = []

    class Stream:
        def wait_stream(self, other):
            done.append("wait")

    class Made:
        replay = None

        def capture_begin(self, capture_error_mode):
            done.append(capture_error_mode)

        def capture_end(self):
            done.append("end")

    def work():
        done.append(("work", gc.isenabled()))
        if fails:
            raise RuntimeError("no")

    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(replaying, "_capturing_stream", lambda device: Stream())
    with pytest.raises(RuntimeError, match="no") if fails else nullcontext():
        replaying.CudaGraph(torch.device("cuda:0"), work)
    assert done == ["wait", "thread_local", ("work", False), "end"]
    assert gc.isenabled()

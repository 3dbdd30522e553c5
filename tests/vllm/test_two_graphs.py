"""Two full CUDA graphs for each batch size: one that searches, and one with FlashAttention.

There is no GPU here, so a graph only remembers what it contains.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kvindex.ops.attention import attend
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.options import Options
from tests.cuda import emulator
from tests.vllm.gpu_layers import D, G, H, builder_of, common, entered, layers_of, slots_of

pytest.importorskip("vllm")

from kvindex_adapters.vllm import two_graphs

__all__ = ["entered"]  # a fixture

ASKED = {"index": "pariskv:preset=fast", "k": 1, "sink": 0, "local_window": 1}

TWO, ONE = ASKED, ASKED | {"dense_graphs": False}


class Graph:
    """A graph that remembers whether FlashAttention or a search was captured."""

    replayed = ()

    def replay(self):
        Graph.replayed += (self.contains,)


@pytest.fixture
def captured(monkeypatch):
    """Replace what needs a GPU in vLLM's modules. Returns a function that takes a module."""

    @contextlib.contextmanager
    def capture(graph, pool=None, stream=None):
        yield
        graph.contains = "full" if two_graphs.full() else "search"

    def replace(module):
        values = dict(
            capture_pool=lambda pool, config: contextlib.nullcontext(pool),
            current_stream=lambda: None,
            get_offloader=lambda: SimpleNamespace(
                sync_prev_onload=lambda: None, join_after_forward=lambda: None
            ),
            validate_cudagraph_capturing_enabled=lambda: None,
            weak_ref_tensors=lambda output: output,
            graph_capture=lambda device: contextlib.nullcontext(),
            is_global_first_rank=lambda: False,
        )
        for name, value in values.items():
            monkeypatch.setattr(module, name, value, raising=False)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Graph, "replayed", ())
    two_graphs.install()
    yield replace
    two_graphs.choose(False)


@pytest.mark.parametrize("asked", [TWO, ONE, ASKED | {"dense_graphs": True}])
def test_the_first_model_runner(entered, captured, monkeypatch, asked):
    from vllm.compilation import cuda_graph
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context

    captured(cuda_graph)
    monkeypatch.setattr(cuda_graph.current_platform, "get_global_graph_pool", lambda: None)
    config, calls = entered(asked), []

    def model():
        calls.append(two_graphs.full())

    wrapper = cuda_graph.CUDAGraphWrapper(model, config, CUDAGraphMode.FULL)

    def run(mode, batch, full):
        two_graphs.choose(full)
        size = BatchDescriptor(num_tokens=batch)
        options = dict(cudagraph_runtime_mode=mode, batch_descriptor=size)
        with set_forward_context(None, config, **options):
            wrapper()

    run(CUDAGraphMode.NONE, 1, True)  # no graph
    assert calls == [True]
    run(CUDAGraphMode.FULL, 1, True)
    run(CUDAGraphMode.FULL, 2, False)
    two = asked is not ONE
    assert calls[1:] == ([True, True, False] * 2 if two else [True, False])
    for batch, full in ((1, True), (2, False), (2, True), (1, False)):
        run(CUDAGraphMode.FULL, batch, full)
    if two:
        assert Graph.replayed == ("full", "search", "full", "search")
    assert len(Graph.replayed) == 4
    assert len(calls) == (7 if two else 3)


def test_graphs_that_only_measure_memory_are_never_replayed(entered, captured, monkeypatch):
    """The first model runner captures some graphs before there is a KV cache, and removes them."""
    from vllm.compilation import cuda_graph
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context

    captured(cuda_graph)
    monkeypatch.setattr(cuda_graph.current_platform, "get_global_graph_pool", lambda: None)
    config, calls = entered(TWO), []
    wrapper = cuda_graph.CUDAGraphWrapper(lambda: calls.append(1), config, CUDAGraphMode.FULL)
    batch = BatchDescriptor(num_tokens=1)
    for _ in range(2):
        how = dict(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=batch)
        with set_forward_context(None, config, **how):
            wrapper()
        assert len(calls) == 3  # one run before the captures of both graphs
        calls.clear()
        cuda_graph.CUDAGraphWrapper.clear_all_graphs()
    assert Graph.replayed == ()


@pytest.mark.parametrize(
    ("asked", "drafts"),
    [(TWO, False), (ONE, False), (ASKED | {"dense_graphs": True}, False), (TWO, True)],
)
def test_the_second_model_runner(entered, captured, asked, drafts):
    """The graphs of a draft model (`drafts`) are captured once."""
    from vllm.config import CUDAGraphMode

    utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    captured(utils)
    base = utils.CudaGraphManager
    kind = base if drafts else utils.ModelCudaGraphManager
    sizes = [
        utils.BatchExecutionDescriptor(CUDAGraphMode.FULL, count, count, 1) for count in (2, 1)
    ]
    chunk = utils.BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 8, None)
    manager, made = object.__new__(kind), []
    known = {CUDAGraphMode.FULL: sizes, CUDAGraphMode.PIECEWISE: [chunk]}
    for name, value in dict(
        vllm_config=entered(asked),
        device=torch.device("cpu"),
        ubatch_runner=None,
        use_breakable_cg=False,
        pool=None,
        graphs={},
        _capture_descs=known,
        _max_full_descs_to_capture=None,
        _capture_mem_samples=None,
    ).items():
        setattr(manager, name, value)

    def forward_of(size, warmup):
        two_graphs.choose(True)  # as the builder might
        made.append(size)
        return lambda mode: None

    base.capture(manager, forward_of)
    two = asked is not ONE and not drafts
    assert made == [chunk, *[size for size in sizes for _ in range(2)] * (2 if two else 1)]
    assert list(manager.graphs) == sizes
    assert manager._capture_descs is known
    for full in (True, False):
        two_graphs.choose(full)
        for size in sizes:
            base.run_fullgraph(manager, size)
    if two:
        assert Graph.replayed == ("full", "full", "search", "search")
    assert len(Graph.replayed) == 4


def test_an_estimate_of_memory_includes_both_graphs(entered, captured, monkeypatch):
    """vLLM takes the second sample as the memory of each further batch size."""
    from vllm.config import CUDAGraphMode

    utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    captured(utils)
    free = [1000]

    def forward_of(size, warmup):
        def forward(mode):
            free[0] -= 0 if warmup else (size.num_tokens + 10 * two_graphs.full())

        return forward

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free[0], 1000))
    manager, samples = object.__new__(utils.ModelCudaGraphManager), []
    for name, value in dict(
        vllm_config=entered(TWO),
        device=torch.device("cpu"),
        ubatch_runner=None,
        use_breakable_cg=False,
        pool=None,
        graphs={},
        _capture_descs={
            CUDAGraphMode.FULL: [
                utils.BatchExecutionDescriptor(CUDAGraphMode.FULL, count, count, 1)
                for count in (4, 2, 1)
            ]
        },
        _max_full_descs_to_capture=2,
        _capture_mem_samples=samples,
    ).items():
        setattr(manager, name, value)
    utils.CudaGraphManager.capture(manager, forward_of)
    if not samples:
        pytest.skip("this version of vLLM does not estimate the memory of graphs here")
    assert samples == [4 + 14, 2 + 12]


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_the_builder_chooses_and_prepares_both(entered):
    from vllm.config import CUDAGraphMode

    from tests.vllm.on_a_cpu import Attention

    config = entered(TWO | {"dense_below": "auto"})
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    layers = layers_of(config, Attention)
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1, 4, 5, 6, 2, 8, 9, 10]]).int()
    slots = slots_of(tables, [(0, 2559)])
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D))
    builder.build(0, common(tables, [2559], [2559], slots))
    assert not two_graphs.full()
    slots = slots_of(tables, [(2559, 2560)])
    layer = layers["layers.0"]
    queries, output = torch.randn(1, H, D), torch.empty(1, H, D)
    rows = pages.read_rows(layer.kv_cache, tables[0], 0, 2560)
    found = {}
    for bound in (2560, 3_000_000):  # the host knows an upper bound for the length
        known = dict(seq_lens_cpu_upper_bound=torch.tensor([bound]))
        metadata = builder.build(0, common(tables, [2560], [1], slots, **known))
        assert metadata.searching is not None
        assert two_graphs.full() is (bound == 2560)
        layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
        found[bound] = output.clone()
        with two_graphs.capturing(bound != 2560):  # the other graph reads the same buffers
            layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
        found[bound, "other"] = output.clone()
    expected = attend(queries, rows.keys, rows.values, scale=D**-0.5)
    torch.testing.assert_close(found[2560], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[2560], found[3_000_000, "other"])
    assert torch.equal(found[3_000_000], found[2560, "other"])
    assert (found[3_000_000] - expected).abs().max() > 0.01
    short = dict(seq_lens_cpu_upper_bound=torch.tensor([2560]))
    given = common(tables, [2560], [1], slots, **short)
    builder.build(0, given)
    builder_of(config, {}).build(0, given)  # that of layers with a sliding window
    assert two_graphs.full()
    chunk = dict(seq_lens_cpu_upper_bound=torch.tensor([2560]))
    builder.build(0, common(tables, [2560], [100], slots_of(tables, [(2460, 2560)]), **chunk))
    assert not two_graphs.full()


def test_the_option():
    assert Options.of({"dense_graphs": True}).dense_graphs is True
    with pytest.raises(ValueError, match="dense_graphs: got 1, allowed is True, False or 'auto'"):
        Options.of({"dense_graphs": 1})

"""Steps by tiers (the preset `paper`) over an engine's pages: keys are counted in each step."""

from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED
from kvindex.ops import coarse
from kvindex.ops.attention import attend
from kvindex.pariskv.block_layout import SubspaceLayout, words_of
from kvindex.pariskv.step_state import State
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.pariskv.steps.tiered_votes import TieredVotesStep
from tests.cuda.buffers import addressed
from tests.cuda.devices import on, on_devices
from tests.cuda.graphs import WholeGraph
from tests.cuda.pariskv.steps.test_paged import LAYERS, LENGTHS, D, Engine, G, H, assert_close

PAPER = "pariskv:preset=paper"

FEW = f"{PAPER}:beta=.03:rho=.3"
"""So few candidates that points decide which rows there are."""


class BesideAnIndex(Engine):
    """Expects what an index finds that has a sequence's searched tokens, the sink's left out."""

    backend = "torch"

    def expected(self, layer, queries, lengths):
        found = super().expected(layer, queries, lengths)
        for b, length in enumerate(lengths):
            if indexed := self.paged.searched(length):
                found[b] = self.by_an_index(layer, queries[b, None], b, length, indexed)[0]
        return found

    def by_an_index(self, layer, queries, b, length, indexed):
        sink, g = self.options.sink, self.geometry
        shape = dict(q_heads=H, kv_heads=G, head_dim=D, dtype=g.dtype, device=self.device)
        rows = pages.read_rows(self.rows[layer], self.tables[b], 0, length)
        with on(self.device):
            index = kvindex.create(self.options.index, backend=self.backend, **shape)
            index.append(rows.keys[:, :, sink:indexed], rows.values[:, :, sink:indexed])
            hits = index.search(queries, k=self.options.k)
            fetched = index.fetch(hits)
        assert (hits.ids != UNUSED).all()
        resident = [*range(sink), *range(indexed, length)]
        keys = torch.cat([rows.keys[:, :, resident], fetched.keys], dim=2)
        values = torch.cat([rows.values[:, :, resident], fetched.values], dim=2)
        return attend(queries, keys, values, scale=g.scale)


@on_devices
@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_rows_are_those_of_an_index_of_the_same_keys(backend, device):
    """Its codes are op by op, an engine's by the kernel: each a function of its key."""
    engine = BesideAnIndex(device, index=FEW, k=6)
    engine.backend = backend
    engine.prefill()
    assert_close(engine.decode())


@on_devices
def test_points_decide(device):
    """With other bounds of tiers the rows are others: a comparison that can fail."""
    engine = Engine(device, index=FEW, k=6)
    engine.prefill()
    others = replace(engine.options, index=f"{PAPER}:beta=.03:rho=.9")
    engine.paged = PagedAttention.of(others, engine.geometry)
    with pytest.raises(AssertionError):
        assert_close(engine.decode())


def of_the_last_step(engine, rows):
    """Counts `[R, G, M, 256]` and bounds of tiers `[R, tiers]` as the kernels have them."""
    step, states = engine.steps._steps[rows]
    return step.own_histogram.view(rows, G, -1, 256), states[-1].tiers[:rows]


@on_devices
@pytest.mark.parametrize("tokens", [256, 512])
def test_each_sequence_has_counts_and_bounds_of_its_own(tokens, device):
    engine = Engine(device, index=PAPER, k=6, tokens=tokens)
    engine.prefill()
    for count in (len(LENGTHS), 2):
        list(engine.decode(LENGTHS[:count]))
        histogram, tiers = of_the_last_step(engine, count)
        for b, length in enumerate(LENGTHS[:count]):
            indexed = engine.paged.searched(length)
            n = max(indexed - engine.options.sink, 0)
            assert tiers[b].tolist() == engine.options.config.tier_bounds(n)
            if not n:
                assert not histogram[b].any()
                continue
            records = engine.codes[LAYERS - 1][..., : engine.paged.layout.head_bytes]
            records = pages.read_records(records, engine.tables[b], indexed // BLOCK)[None]
            signs = engine.paged.layout.unpack(records, indexed)["signs"]
            want = coarse.histogram(signs[:, :, engine.options.sink :])
            assert torch.equal(histogram[b].cpu(), want[0].cpu())


@on_devices
@pytest.mark.parametrize("multiprocessors", [1, 9])
def test_thread_blocks_add_up(multiprocessors, device):
    """Of long sequences several count, each many chunks of tokens, of which some are not valid."""
    lengths, geometry = (9000, 0, 4500), Geometry.of(q_heads=H, kv_heads=G, head_dim=D)
    layout, S = SubspaceLayout(D, 3), -(-max(lengths) // BLOCK)
    generator = torch.Generator().manual_seed(0)
    shape = len(lengths), S, G, layout.head_bytes
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    blocks[..., ::3] &= 3  # centroids that many keys have
    flags = torch.rand(len(lengths), S * BLOCK, generator=generator) < 0.9
    none = torch.zeros(0)
    state = State(
        codes=blocks,
        rows=blocks,
        valid=words_of(flags, S),
        length=torch.tensor(lengths),
        wanted=none,
        counted=none,
        weight_scale=none,
        resident=none,
        resident_mask=none,
        resident_count=none,
    )
    read, _, _blocks = addressed(state, device)
    options = dict(batch=len(lengths), k=4, most=max(lengths), ragged=True, counts=True)
    geometry = replace(geometry, device=torch.device(device))
    step = TieredVotesStep(geometry, layout, multiprocessors=multiprocessors, **options)
    step.own_histogram.fill_(-9)
    with on(device):
        step._count(read, step.own_histogram)
    found = step.own_histogram.cpu().view(len(lengths), G, D // 8, 256)
    for b, length in enumerate(lengths):
        signs = layout.fields(blocks[b, None], length)["signs"]
        assert torch.equal(found[b], coarse.histogram(signs, flags[b, None, :length])[0])


def grown(step):
    return tuple(length + step if length else 0 for length in LENGTHS)


@on_devices
def test_a_captured_step_counts_anew(device):
    """As sequences grow into the next block, and one goes; on a CPU the graph is a recording."""
    engine = Engine(device, index=FEW, k=6, sink=0, local_window=1, dense_below=0)
    engine.tables[3, 4] = 0  # a page that nobody has
    engine.prefill()
    queries = [engine.normal(len(LENGTHS), H, D) for _ in range(LAYERS)]
    outputs = [torch.full_like(part, torch.nan) for part in queries]

    def attend_all():
        for layer in range(LAYERS):
            engine.steps.attend(layer, queries[layer], outputs[layer])

    assert_close(engine.decode())  # makes the step
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            attend_all()
    else:
        with on(device):
            graph = WholeGraph(torch.device(device), attend_all)
    gone = (*LENGTHS[:1], 0, *LENGTHS[2:])
    for lengths in (grown(1), grown(2), gone):
        slots = [engine.write(b, length - 1, length) for b, length in enumerate(lengths) if length]
        engine.begin(torch.cat(slots), rows=len(lengths), lengths=lengths)
        for part in queries:
            part.copy_(engine.normal(*part.shape))
        with on(device):
            graph.replay()
        for layer, (asked, output) in enumerate(zip(queries, outputs, strict=True)):
            assert_close([(output, engine.expected(layer, asked, lengths))])

"""Over an engine's pages, a limit of the error leads to as many rows as in plain torch."""

import math
from dataclasses import replace

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.layer.output_scale import FEWEST, LAST
from kvindex_adapters.vllm.row_budget import RowBudget
from kvindex_cuda.pariskv.steps import page_limits
from kvindex_cuda.pariskv.steps.page_limits import INTERVAL, PageLimits
from tests.cuda.devices import on, on_devices
from tests.cuda.graphs import KeptGraph
from tests.cuda.memory.test_host_pages import HostEngine
from tests.cuda.pariskv.steps.test_paged import FP8, LAYERS, LENGTHS, Engine, assert_close
from tests.support.helpers import mostly_slow

AUTO = dict(index="pariskv:sign_decoder=mean", k="auto", error=0.5)

SEARCHED = [True, True, False, True, False, False]
"""Which sequences of `LENGTHS` search: those of at least 400 tokens."""


class Counting(RowBudget):
    """Limits that remember the number of rows of each search."""

    def __init__(self, error, dense_below):
        super().__init__(error, dense_below)
        self.rows = []

    def count(self, hits):
        self.rows.append((hits.ids >= 0).sum(-1)[0])


def limited(kind, device, **options):
    """Return an engine with limits. Its layers have measured prompts, the second one larger
    outputs."""
    engine = kind(device, **{**AUTO, **options})
    budgets = [Counting(engine.options.allowed_error, 400) for _ in range(LAYERS)]
    pairs = zip(engine.layers, budgets, strict=True)
    engine.layers = [replace(layer, budget=budget) for layer, budget in pairs]
    engine.prefill()
    return engine


def measure(engine, chunks, sizes=(1.0, 1.5)):
    """Measure chunks of prompts, (length of the sequence, number of new tokens), by kernels and by
    torch. Outputs have the given size in each layer."""
    limits, g = engine.limits, engine.geometry
    lengths, counts = torch.tensor(chunks, device=engine.device).int().T
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    assert limits.begin_batch(starts, lengths, range(len(chunks)))
    for layer in range(LAYERS):
        total = int(starts[-1])
        both = engine.normal(total, g.kv_heads, 3 * g.value_dim)  # with gaps, as vLLM's values
        values = both[..., : g.value_dim]
        outputs = engine.normal(total, g.q_heads, g.value_dim) * 0.3 * sizes[layer]
        with on(engine.device):
            limits.measure(layer, values, outputs)
        budget = engine.layers[layer].budget
        for b, (length, count) in enumerate(chunks):
            if places := budget.places(length, count):
                own = slice(int(starts[b + 1]) - len(places), int(starts[b + 1]))
                given = (part[own].transpose(0, 1)[None] for part in (values, outputs))
                budget.measure(*given, length)


def rows_of(engine):
    """Return the numbers of rows that the last step has found for each sequence and KV head."""
    step, _ = engine.steps._steps[len(LENGTHS)]
    return step.found.view(len(LENGTHS), -1)


def check_step(engine, **bounds):
    """Compare a step with plain torch, and return the numbers of rows of each layer."""
    found, pairs = [], []
    for pair in engine.decode():
        found.append(rows_of(engine).clone())
        pairs.append(pair)
    assert_close(pairs, **bounds)
    for layer, rows in zip(engine.layers, found, strict=True):
        expected, layer.budget.rows = layer.budget.rows, []
        assert torch.equal(rows[SEARCHED].cpu(), torch.stack(expected).int().cpu())
        assert not rows[[not one for one in SEARCHED]].any()
    return torch.stack(found)


@on_devices
def test_the_numbers_of_rows_are_those_of_plain_torch(device):
    engine = limited(Engine, device)
    measure(engine, [(1100, 900), (700, 300), (300, 300)])
    found = check_step(engine)
    assert len({*found[:, SEARCHED].flatten().tolist()}) > 3
    assert found.max() < 200
    assert torch.equal(engine.limits.found.cpu(), found.cpu().long())
    assert engine.limits.table.min() > 0
    while not engine.limits.searches:  # until then, each step computes new limits
        if device == "cuda":
            torch.cuda.synchronize()
        list(engine.decode())
    engine.limits.table.mul_(0)  # no number of rows is within the limit
    list(engine.decode())
    indexed = [1024, 512, 0, 768, 0, 0]
    every = torch.tensor([[max(n - 4, 0)] * 2 for n in indexed], dtype=torch.int32)
    assert torch.equal(rows_of(engine).cpu(), every)


@on_devices
@pytest.mark.parametrize(
    ("kind", "scales", "dtype"),
    mostly_slow(
        [
            (Engine, FP8, torch.float32),
            (HostEngine, None, torch.float32),
            (HostEngine, FP8, torch.bfloat16),
            (HostEngine, None, torch.bfloat16),
            (Engine, None, torch.float16),
        ],
        (Engine, FP8, torch.float32),
        (HostEngine, None, torch.float32),
    ),
)
def test_rows_on_the_host_and_in_fp8(kind, scales, dtype, device):
    """The second step reads sink and window from the row cache."""
    bounds = {} if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    engine = limited(kind, device, scales=scales, dtype=dtype)
    measure(engine, [(1100, 200), (700, 200)])
    for _ in range(2):
        check_step(engine, **bounds)


@on_devices
def test_learned_sinks_have_a_part_of_the_attention_weight(device):
    found = []
    for sinks in (None, torch.tensor([6.0, 7.0, 8.0, 6.0], device=device)):
        engine = limited(Engine, device)
        engine.sinks = sinks
        measure(engine, [(1100, 200)])
        found.append(check_step(engine)[:, SEARCHED].sum())
    assert found[1] < found[0]


@on_devices
@pytest.mark.parametrize(
    ("kind", "scales"),
    mostly_slow([(Engine, None), (Engine, FP8), (HostEngine, FP8)], (Engine, FP8)),
)
def test_full_attention_until_every_layer_has_measured_enough(kind, scales, device):
    """Decode steps are measured, too: a token of each of three sequences."""
    engine = limited(kind, device, scales=scales)
    measure(engine, [(1100, FEWEST - 4)])
    before = engine.limits
    for found in (False, False, True):
        pairs = list(engine.decode())
        assert bool(before.found.any()) is found
        assert_close(pairs)
        assert bool(engine.layers[0].budget.rows) is found
        before.update()
        budget = engine.layers[0].budget
        for length in (700, 1100):
            for layer in range(LAYERS) if budget.known else ():
                expected = engine.layers[layer].budget.limit(torch.zeros(1, 4), length).variance[0]
                digits = length.bit_length()
                torch.testing.assert_close(before.table[layer, digits].cpu(), expected.cpu())


@on_devices
def test_empty_pages_are_not_measured(device):
    """An engine warms up with them."""
    limits = limits_of(device)
    for value in (0.0, 1.0):
        limits.begin_step(torch.tensor([5000] * 3, device=device).int())
        limits.squares.fill_(1.0)
        limits.squares[..., :2] = value
        limits.update()
        assert limits._seen.sum().item() == 3 * LAYERS * value
    limits.begin_step(torch.tensor([0, 599, 5000], device=device).int())
    assert limits._chunks[0].counts.tolist() == [0, 0, 1]
    limits._dense_below = 0
    limits.begin_step(torch.tensor([0, 599, 5000], device=device).int())
    assert limits._chunks[0].counts.tolist() == [0, 1, 1]


@on_devices
@pytest.mark.parametrize("kind", mostly_slow([Engine, HostEngine], Engine))
def test_decode_steps_are_measured_with_their_learned_sinks(kind, device):
    engine = limited(kind, device)
    engine.sinks = torch.tensor([1.0, 7.0, 8.0, 6.0], device=device)
    measure(engine, [(1100, FEWEST - 2)])
    for _ in range(2):
        assert_close(list(engine.decode()))
    engine.limits.update()
    assert engine.limits.known.item()
    for layer, own in zip(engine.layers, engine.limits.table, strict=True):
        for length in (700, 1100):
            expected = layer.budget.limit(torch.zeros(1, 4), length).variance[0]
            torch.testing.assert_close(own[length.bit_length()].cpu(), expected.cpu())


@on_devices
def test_sequences_that_are_too_short_do_not_count(device):
    """Not even for longer ones of the same class."""
    limits = limits_of(device)
    for longest in (None, 700):
        lengths = torch.tensor([599, 700, 0], device=device).int()
        limits.begin_step(lengths, longest=longest)
        limits.squares[:, 0], limits.squares[:, 1] = 5.0, 1.0
        limits.update()
    assert limits._seen.sum(1).tolist() == [2] * LAYERS
    assert limits._means.sum(1).eq(1).all()
    limits.begin_step(lengths.clamp_max(599), longest=599)
    assert not limits._chunks


@on_devices
def test_decode_steps_and_prompts_of_a_batch_are_measured(device):
    limits = limits_of(device)
    for prompts in ([], [1]):
        limits.begin_step(torch.tensor([700], device=device).int())
        starts, lengths = torch.tensor([0, 1, 9]).int(), torch.tensor([700, 5000]).int()
        limits.begin_batch(starts.to(device), lengths.to(device), prompts)
        limits.squares[:, 0] = 1.0
        for layer in range(LAYERS) if prompts else ():
            values, outputs = torch.ones(9, 2, 8, device=device), torch.ones(9, 4, 8, device=device)
            with on(device):
                limits.measure(layer, values, outputs)
        limits.update()
    assert limits._seen[:, 10].tolist() == [2] * LAYERS
    assert limits._seen[:, 13].tolist() == [8] * LAYERS
    assert limits._means[:, 10].eq(1).all()
    assert limits._means[:, 13].eq(8).all()


def test_large_batches_are_added_up_in_parts(monkeypatch):
    found = []
    for at_once in (page_limits.AT_ONCE, 1):
        monkeypatch.setattr(page_limits, "AT_ONCE", at_once)
        limits = limits_of("cpu")
        limits.begin_step(torch.tensor([700, 5000, 900]).int())
        limits.squares.copy_(torch.arange(1.0, limits.squares.numel() + 1).view_as(limits.squares))
        limits.update()
        found.append(limits._means)
    assert torch.equal(*found)


@on_devices
def test_a_graph_reads_limits_that_have_changed(device, monkeypatch):
    engine = limited(Engine, device)
    measure(engine, [(1100, 200), (700, 200)])
    nowhere = torch.tensor([-1], device=device)
    queries = engine.normal(len(LENGTHS), engine.geometry.q_heads, engine.geometry.head_dim)
    output, found = torch.empty_like(queries), []

    def work():
        engine.steps.attend(0, queries, output)

    engine.begin(nowhere, rows=len(LENGTHS))
    with on(device):
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        else:
            graph = KeptGraph(torch.device(device), work)
        for size in (1.0, 4.0):
            measure(engine, [(1100, LAST)] * 5, (size, size))
            engine.begin(nowhere, rows=len(LENGTHS))
            graph.replay()
            found.append(rows_of(engine).clone())
            expected = engine.expected(0, queries, LENGTHS)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            budget = engine.layers[0].budget
            assert torch.equal(found[-1][SEARCHED].cpu(), torch.stack(budget.rows).int().cpu())
            budget.rows = []
    assert found[1].sum() < found[0].sum()


def limits_of(device, error=1.0):
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=8, device=torch.device(device))
    sizes = dict(layers=LAYERS, error=error, dense_below=600, most_rows=3)
    return PageLimits(geometry, **sizes)


def feed(limits, *chunks, bad=None):
    """Measure chunks, (length, number of tokens, size of outputs), in one batch, and in the same
    way by `RowBudget`."""
    counts = torch.tensor([count for _, count, _ in chunks])
    device = limits.table.device
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
    lengths = torch.tensor([length for length, *_ in chunks]).int().to(device)
    sizes = torch.tensor([float(size) for *_, size in chunks])
    outputs = sizes.repeat_interleave(counts)[:, None, None].expand(-1, 4, 8).contiguous()
    values = torch.ones(len(outputs), 2, 8)
    if bad is not None:
        (outputs if bad[0] == "outputs" else values)[3, 1, 5] = bad[1]
    limits.begin_batch(starts, lengths, range(len(chunks)))
    for layer in range(LAYERS):
        with on(device.type):
            limits.measure(layer, values.to(device), outputs.to(device))
    limits.update()


def table_of(limits, budget):
    """Check that all layers have the limits of a `RowBudget`, and return those of each class."""
    for digits in range(1, 18):
        expected = budget.limit(torch.zeros(1, 4), 2**digits - 1).variance[0]
        for layer in range(LAYERS):
            torch.testing.assert_close(limits.table[layer, digits].cpu(), expected)
    return limits.table[0, :, 0].tolist()


@on_devices
def test_limits_are_those_of_similar_lengths(device):
    limits, budget = limits_of(device), RowBudget(1.0, 600)
    chunks = [(700, 300, 3), (8000, 100, 1), (100_000, FEWEST - 1, 5)]
    for _ in range(6):
        feed(limits, *chunks)
        for length, count, size in chunks:
            count = len(budget.places(length, count))
            given = torch.ones(1, 2, count, 8), torch.full((1, 4, count, 8), float(size))
            budget.measure(*given, length)
        assert limits.known.item()
        found = table_of(limits, budget)
        chunks[1] = (*chunks[1][:2], chunks[1][2] + 1)  # a moving average
    assert found[9] == found[10] != found[13] != found[16] == found[17]
    assert min(found[1:]) > 0


@on_devices
def test_which_tokens_are_measured(device):
    """The newest ones, where the sequence is long enough to be searched."""
    limits = limits_of(device)
    starts = torch.tensor([0, 599, 649, 654, 4654, 4655], device=device).int()
    lengths = torch.tensor([599, 601, 900, 5000, 1023], device=device).int()
    assert limits.begin_batch(starts, lengths, [0, 1, 2, 3, 4])
    (chunks,) = limits._chunks
    assert chunks.counts.tolist() == [0, 2, 5, LAST, 1]
    assert chunks.stops.tolist() == starts[1:].tolist()
    assert chunks.digits.tolist() == [10, 10, 10, 13, 10]
    assert not limits.begin_batch(starts, lengths, [])
    limits.update()  # no layer has measured them, so they are ignored
    assert limits._chunks == []
    assert not limits.known.item()


@on_devices
@pytest.mark.parametrize("part", ["values", "outputs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_chunk_that_is_not_finite_is_ignored(value, part, device):
    limits = limits_of(device)
    feed(limits, (8000, LAST, 1), bad=(part, value))
    assert not limits.known.item()
    feed(limits, (8000, 40, 1), (8000, 40, 7))
    assert limits.known.item()
    others = limits.table.clone()
    feed(limits, (8000, LAST, 3), bad=(part, value))
    assert torch.equal(limits.table, others)
    assert others.isfinite().all()


@on_devices
def test_rows_that_were_found_are_reported_later(device):
    limits = limits_of(device)

    def taken(steps):
        for _ in range(steps):
            limits.begin_step(torch.empty(0, device=device).int())
            if device == "cuda":
                torch.cuda.synchronize()
        return limits.take_found()

    assert taken(3) == 0
    assert not limits.searches
    feed(limits, (8000, LAST, 1))
    limits.found[:, 0] = torch.tensor([30, 50], device=device)
    assert taken(3) == 40
    assert limits.searches
    limits.found[1, 2, 0] += 8
    assert taken(2) == 0
    assert taken(2 * INTERVAL) == 2
    assert taken(2 * INTERVAL) == 0


def test_measured_tensors_must_fit():
    limits = limits_of("cpu")
    limits.begin_batch(torch.tensor([0, 40]).int(), torch.tensor([700]).int(), [0])
    with pytest.raises(ValueError, match="values"):
        limits.measure(0, torch.zeros(40, 3, 8), torch.zeros(40, 4, 8))
    with pytest.raises(ValueError, match="outputs"):
        limits.measure(0, torch.zeros(40, 2, 8), torch.zeros(40, 4, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="values: got strides"):
        limits.measure(0, torch.zeros(40, 8, 2).mT, torch.zeros(40, 4, 8))

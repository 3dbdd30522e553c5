"""The plug-in's GPU backend in vLLM's own classes, with kernels emulated on a CPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvindex.layer.output_scale import FEWEST
from kvindex.ops.attention import attend
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.fp8 import Scales
from tests.cuda import emulator
from tests.vllm.conftest import answers, kernels_on_a_cpu, prompt, tokens
from tests.vllm.gpu_layers import (
    BLOCKS,
    EVERY,
    LENGTHS,
    D,
    G,
    H,
    builder_of,
    common,
    entered,
    flash_fp8,
    layers_of,
    slots_of,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")

__all__ = ["entered", "flash_fp8"]  # fixtures


def test_prompts_are_flash_attentions_and_decoded_tokens_search(entered):
    config = entered({**EVERY, "index": "pariskv:preset=fast"})
    layers = layers_of(config)
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [4, 2, 0], [9, 0, 0], [0, 0, 0]]).int()
    before = [(0, max(length - 1, 0)) for length in LENGTHS]
    slots, torch_rows = slots_of(tables, before), {}
    for name, layer in layers.items():
        torch_rows[name] = torch.randn(len(slots), G, D), torch.randn(len(slots), G, D)
        pages.write_rows(layer.kv_cache, slots, *torch_rows[name])
    counts = [max(stop, 1) for _, stop in before]
    metadata = builder.build(0, common(tables, counts, counts, slots))
    assert metadata.searching is None
    slots = slots_of(tables, [(max(length - 1, 0), length) for length in LENGTHS])
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, 4, G, D))
    metadata = builder.build_for_cudagraph_capture(common(tables, LENGTHS, [1] * 4, slots))
    for layer in layers.values():
        assert layer.impl.codes.records.any()  # encoded in the previous step
        queries, output = torch.randn(6, H, D), torch.full((6, H, D), 9.0)  # padded by vLLM
        layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
        for b, length in enumerate(LENGTHS[:3]):
            rows = pages.read_rows(layer.kv_cache, tables[b], 0, length)
            expected = attend(queries[b, None], rows.keys, rows.values, scale=D**-0.5)
            torch.testing.assert_close(output[b, None], expected, rtol=1e-4, atol=1e-5)
        assert not output[3].any()
        assert (output[4:] == 9).all()


def test_the_last_token_of_a_prompt_in_a_batch_of_decode_steps(entered):
    """It attends to all tokens. A decode step of a sequence of the same length searches."""
    config = entered({**EVERY, "k": 1, "dense_below": 0, "local_window": 1})
    layers = layers_of(config)
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [0, 0, 0]]).int()
    lengths = [600, 600, 0]
    before = [(0, 599), (0, 599)]
    slots = slots_of(tables[:2], before)
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D))
    builder.build(0, common(tables[:2], [599] * 2, [599] * 2, slots))
    slots = slots_of(tables, [(599, 600)] * 2 + [(0, 0)])
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots[:2], *torch.randn(2, 2, G, D))
    reading = torch.tensor([False, True])  # without an entry for padding
    given = common(tables, lengths, [1, 1, 0], slots, is_prefilling=reading)
    metadata = builder.build(0, given)
    for layer in layers.values():
        queries, output = torch.randn(3, H, D), torch.empty(3, H, D)
        layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
        for b in range(2):
            rows = pages.read_rows(layer.kv_cache, tables[b], 0, 600)
            expected = attend(queries[b, None], rows.keys, rows.values, scale=D**-0.5)[0]
            same = torch.allclose(output[b], expected, rtol=1e-4, atol=1e-5)
            assert same is (b == 1)


def test_a_graph_of_several_tokens_serves_later_batches(entered):
    """A graph is captured with a dummy batch, and replayed after a batch has been prepared. In that
    batch, one sequence verifies drafts, another reads the last tokens of its prompt, and there is
    padding."""
    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    asked = {**EVERY, "k": 1, "dense_below": 0, "local_window": 3}
    config = entered(asked, speculative_config=speculation)
    layers = layers_of(config)
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [0, 0, 0]]).int()
    slots = slots_of(tables[:2], [(0, 597)] * 2)
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D))
    builder.build(0, common(tables[:2], [597] * 2, [597] * 2, slots))
    unused = torch.full((9,), -1)
    dummy = common(torch.zeros_like(tables), [3] * 3, [3] * 3, unused)
    captured = builder.build_for_cudagraph_capture(dummy)
    slots = slots_of(tables[:2], [(597, 600)] * 2)
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D))
    slots = torch.cat([slots, unused[:3]])
    reading = torch.tensor([False, True])
    batch = common(tables, [600, 600, 0], [3, 3, 0], slots, is_prefilling=reading)
    builder.build(0, replace(batch, num_actual_tokens=9))
    for layer in layers.values():
        queries, output = torch.randn(9, H, D), torch.empty(9, H, D)
        layer.impl.forward(layer, queries, None, None, layer.kv_cache, captured, output)
        assert not output[6:].any()
        for token in range(6):
            rows = pages.read_rows(layer.kv_cache, tables[token // 3], 0, 598 + token % 3)
            expected = attend(queries[token, None], rows.keys, rows.values, scale=D**-0.5)[0]
            same = torch.allclose(output[token], expected, rtol=1e-4, atol=1e-5)
            assert same is (token >= 3)


def connector():
    """Return the configuration of a KV connector."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


@pytest.mark.parametrize("captured", [False, True])
def test_loaded_blocks_are_encoded_after_the_step_that_admits_them(entered, monkeypatch, captured):
    """A KV connector has loaded 512 tokens of each of two sequences, of which one continues with a
    single token of its answer. This token gets full attention, and so does the token of a sequence
    with the same prefix. The next ones search."""
    from kvindex_adapters.vllm import gpu_batch

    asked = {**EVERY, "k": 1, "dense_below": 0, "sink": 0, "local_window": 1}
    config = entered(asked, kv_transfer_config=connector())
    layers = layers_of(config)
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [6, 0, 0], [3, 7, 8], [9, 10, 11]]).int()
    for layer in layers.values():
        rows = layer.impl.codes.rows(layer.kv_cache)
        rows.copy_(torch.randn(rows.shape))
        layer.impl.codes.records.fill_(85)

    def attended(lengths, counts):
        """Build a step, and return whether each sequence has the results of full attention."""
        monkeypatch.setattr(gpu_batch, "admitted", lambda: counts)
        slots = slots_of(tables, [(length - 1, length) for length in lengths])
        make = builder.build_for_cudagraph_capture if captured else partial(builder.build, 0)
        reading, new = torch.zeros(5, dtype=torch.bool), [1] * 5
        metadata = make(common(tables, lengths, new, slots, is_prefilling=reading))
        found = []
        for layer in layers.values():
            queries, output = torch.randn(5, H, D), torch.empty(5, H, D)
            layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
            kept = layer.impl.codes.rows(layer.kv_cache)
            for b, length in enumerate(lengths):
                rows = pages.read_rows(kept, tables[b], 0, length)
                expected = attend(queries[b, None], rows.keys, rows.values, scale=D**-0.5)[0]
                found.append(torch.allclose(output[b], expected, rtol=1e-4, atol=1e-5))
        assert found[:5] == found[5:]
        return found[:5]

    admitting = attended([513, 600, 20, 700, 700], [512, 512, 0, 0, 0])
    assert admitting == [True, True, True, True, False]
    for layer in layers.values():
        assert (layer.impl.codes.records == 85).all()
    assert attended([514, 601, 21, 701, 701], []) == [False, False, True, False, False]
    found = [layer.impl.codes.records.clone() for layer in layers.values()]
    for layer in layers.values():
        layer.impl.codes.records.fill_(85)
    filled = torch.tensor([3, 7, 4, 2]) * 256 + 255
    for slots in (filled, torch.tensor([-1])):  # as if a step had filled these blocks
        builder.build(0, common(tables[:1], [20], [1], slots))
    for records, layer in zip(found, layers.values(), strict=True):
        assert torch.equal(records, layer.impl.codes.records)
        changed = (records != 85).flatten(1).any(1).nonzero()[:, 0]
        assert changed.tolist() == [2, 3, 4, 7]


def test_all_blocks_of_all_sequences_may_have_been_loaded(entered, monkeypatch):
    """They are more than the tokens of a step can fill."""
    from kvindex_adapters.vllm import gpu_batch

    config = entered(kv_transfer_config=connector(), max_num_batched_tokens=256, max_num_seqs=4)
    layers = layers_of(config)
    builder = builder_of(config, layers)
    for layer in layers.values():
        layer.impl.codes.rows(layer.kv_cache).normal_()
    tables = torch.arange(BLOCKS).view(3, 4).int()
    for counts in ([1024] * 3, []):
        monkeypatch.setattr(gpu_batch, "admitted", lambda counts=counts: counts)
        builder.build(0, common(tables, [1024] * 3, [1, 1, 1], torch.tensor([-1, -1, -1])))
    for layer in layers.values():
        assert layer.impl.codes.records.flatten(1).any(1).all()


def test_flash_attention_computes_batches_in_which_a_search_does_not_pay(entered):
    from vllm.config import CUDAGraphMode

    index = {"index": "pariskv:preset=fast", "k": 6}
    tables, slots = torch.tensor([[3, 7, 1], [4, 2, 0]]).int(), torch.tensor([300, 301])

    def searches(asked, mode, **more):
        config = entered(index | asked)
        config.compilation_config.cudagraph_mode = mode
        builder = builder_of(config, layers_of(config))
        given = common(tables, [700, 300], [1, 1], slots, **more)
        return builder.build(0, given).searching is not None

    known = dict(seq_lens_cpu_upper_bound=torch.tensor([700, 300]).int())
    assert not searches({}, CUDAGraphMode.NONE, **known)
    assert not searches({}, CUDAGraphMode.PIECEWISE, **known)
    assert searches({}, CUDAGraphMode.FULL_DECODE_ONLY, **known)  # a graph has been captured
    assert searches({}, CUDAGraphMode.NONE)  # the host does not know the lengths
    assert searches({"dense_below": 2048}, CUDAGraphMode.NONE, **known)
    long = dict(seq_lens_cpu_upper_bound=torch.tensor([300_000, 300]).int())
    assert searches({}, CUDAGraphMode.NONE, **long)


def test_a_layer_estimates_searches_of_its_number_of_rows(entered):
    def limit_of(asked):
        config = entered({"index": "pariskv:sign_decoder=mean"} | asked)
        return next(iter(layers_of(config).values())).impl.codes.limit

    few, usual, many = (limit_of({"k": k}) for k in (100, 256, 512))
    assert limit_of({}) == usual
    assert few.costs.head_us < usual.costs.head_us < many.costs.head_us
    assert few.dense_below < usual.dense_below < many.dense_below
    for asked in ({"k": "auto"}, {"error": 0.1}):  # the number is not known before
        assert limit_of(asked) == few


@pytest.mark.parametrize("dense_graphs", [False, "auto"])
def test_a_batch_with_fewer_drafts_is_no_graph(entered, dense_graphs):
    """So FlashAttention computes it if it is faster. A graph searches in any case, unless there is
    a second one with FlashAttention."""
    from vllm.config import CUDAGraphMode

    from kvindex_adapters.vllm import two_graphs

    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    asked = {"index": "pariskv:preset=fast", "k": 6, "dense_graphs": dense_graphs}
    config = entered(asked, speculative_config=speculation)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    builder = builder_of(config, layers_of(config))
    tables = torch.tensor([[3, 7, 1], [4, 2, 0], [0, 0, 0]]).int()

    def searches(bounds, counts):
        known = dict(seq_lens_cpu_upper_bound=torch.tensor(bounds).int())
        slots = torch.full((sum(counts),), -1)
        given = common(tables, [700, 300, 0], counts, slots, **known)
        return builder.build(0, given).searching is not None and not two_graphs.full()

    short, long = [700, 300, 0], [300_000, 300, 0]
    assert searches(short, [3, 3, 0]) is (dense_graphs is False)  # with padding
    assert searches(short, [1, 1, 0]) is (dense_graphs is False)
    assert not searches(short, [3, 1, 0])
    assert searches(long, [3, 1, 0])


@pytest.mark.parametrize(("most", "rows"), [(None, 24), (16, 24), (32, 32)])
def test_buffers_have_room_for_all_tokens_of_a_batch(entered, most, rows):
    """The size of the largest graph is its number of tokens."""
    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    config = entered(speculative_config=speculation)
    assert config.scheduler_config.max_num_seqs == 8
    config.compilation_config.max_cudagraph_capture_size = most
    builder = builder_of(config, layers_of(config))
    tables = torch.zeros(rows, 3).int()
    given = tables, tables[:, 0], torch.full((rows,), -1)
    builder._opened().begin(*given, rows=rows)
    with pytest.raises(ValueError, match=f"allowed are up to {rows}"):
        builder._opened().begin(*given, rows=rows + 1)


@pytest.mark.parametrize(
    ("dense_graphs", "graphs"), [(False, False), ("auto", False), ("auto", True), (True, True)]
)
def test_layers_with_other_limits_decide_for_themselves(entered, dense_graphs, graphs):
    """Full attention of layers with FP8 is faster. But a graph contains all layers."""
    from vllm.config import CUDAGraphMode

    config = entered({"index": "pariskv:preset=fast", "k": 6, "dense_graphs": dense_graphs})
    config.compilation_config.cudagraph_mode = (
        CUDAGraphMode.FULL_DECODE_ONLY if graphs else CUDAGraphMode.NONE
    )
    layers = layers_of(config)
    costs = [layer.impl.codes.limit.costs for layer in layers.values()]
    second = layers["layers.1"].impl.codes
    second.limit = replace(second.limit, costs=replace(costs[1], full_bytes=1e12))
    known = dict(seq_lens_cpu_upper_bound=torch.tensor([300_000, 300]).int())
    tables, slots = torch.tensor([[3, 7, 1], [4, 2, 0]]).int(), torch.tensor([300, 301])
    given, found = common(tables, [700, 300], [1, 1], slots, **known), []
    for name in layers:
        builder = builder_of(config, {name: layers[name]})
        found.append(builder._may_search(given))
    assert found == [True, graphs]


@pytest.mark.parametrize("scales", [None, (0.37, 0.02)])
def test_a_batch_of_sparse_prompts_and_others(entered, flash_fp8, monkeypatch, scales):
    """FlashAttention computes a decode step, a prompt without whole blocks, and padding."""
    from kvindex_adapters.vllm import gpu_batch
    from kvindex_adapters.vllm.attention import PagedAttention, Sequence
    from kvindex_adapters.vllm.engine import options_of
    from kvindex_adapters.vllm.reading import Prompt, attend_prompt
    from tests.vllm.on_a_cpu import Attention

    config = entered({**EVERY, **SPARSE})
    layers = layers_of(config, Attention, scales)
    convert = Scales(*scales, torch.float32) if scales else None
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1], [4, 2, 0], [9, 0, 0], [5, 6, 8], [0, 0, 0]]).int()
    lengths, counts = (640, 300, 20, 600, 0), (384, 1, 20, 88, 0)
    reading = options_of(config).reading
    plans = [Prompt(1000, reading), Prompt(290, reading), None, Prompt(600, reading)]
    monkeypatch.setattr(gpu_batch, "sparse_prompts", lambda: plans)
    slots = slots_of(tables[:4], [(0, length) for length in lengths[:4]])
    for layer in layers.values():
        pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D), convert)
    news = [(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    metadata = builder.build(0, common(tables, lengths, counts, slots_of(tables[:4], news[:4])))
    queries = torch.randn(sum(counts), H, D)
    for layer in layers.values():
        output = torch.full((sum(counts) + 3, H, D), 9.0)
        given = queries, queries[:, :G], queries[:, :G], layer.kv_cache, metadata, output
        layer.impl.forward(layer, *given)
        plain = PagedAttention.of(options_of(config), layer.impl.geometry)
        start = 0
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = slice(start, start := start + count)
            sequence = Sequence(layer.kv_cache, None, tables[b], length, convert)
            if b == 0:
                rows = pages.read_rows(layer.kv_cache, tables[b], 0, length, scales=convert)
                expected = attend_prompt(queries[own], rows, plans[0], layer.impl.geometry)
                dense = plain.attend_dense(queries[own], sequence)
                assert (dense - expected).abs().max() > 0.01
            elif count:
                expected = plain.attend_dense(queries[own], sequence)
            torch.testing.assert_close(output[own], expected[:count])
        assert (output[start:] == 9).all()


@pytest.mark.parametrize("scales", [None, (0.37, 0.02)])
def test_kernels_for_sparse_prompts_are_compiled_once_before_the_first_prompt(
    entered, flash_fp8, monkeypatch, scales
):
    from kvindex_adapters.vllm import gpu_batch
    from tests.vllm.on_a_cpu import Attention

    config, read = entered({**EVERY, **SPARSE}), []
    layers = layers_of(config, Attention, scales)
    monkeypatch.setattr(
        gpu_batch, "prompt_kernels", lambda device: SimpleNamespace(compiled_lengths=lambda n: [n])
    )
    attend = gpu_batch.attend_prompt

    def counting(queries, rows, prompt, geometry):
        first = rows.keys.shape[2] - len(queries)
        assert prompt.has_blocks(first, rows.keys.shape[2])
        output = attend(queries, rows, prompt, geometry)
        assert output.shape == queries.shape
        read.append(rows.keys.shape[2])
        return output

    monkeypatch.setattr(gpu_batch, "attend_prompt", counting)
    builder = builder_of(config, layers)
    for _ in range(2):
        builder.build(0, common(torch.tensor([[3]]).int(), [20], [1], torch.tensor([3 * 256 + 19])))
    assert read == [config.model_config.max_model_len]


def test_too_little_memory_for_the_longest_prompt_is_a_warning(entered, monkeypatch):
    from kvindex_adapters.vllm import gpu_batch
    from tests.vllm.on_a_cpu import Attention

    def full(*given):
        raise torch.OutOfMemoryError("no memory")

    said = []
    monkeypatch.setattr(gpu_batch, "attend_prompt", full)
    monkeypatch.setattr(gpu_batch.logger, "warning", lambda text, *given: said.append(text % given))
    config = entered({**EVERY, **SPARSE})
    builder_of(config, layers_of(config, Attention))._opened()
    (text,) = said
    length = config.model_config.max_model_len
    assert f"too little GPU memory for prompts of {length} tokens" in text


AUTO = {"index": "pariskv:sign_decoder=mean", "k": "auto", "error": 0.5, "dense_below": 400}


class Batches:
    """Layers that choose the number of rows, and the limits that they have in plain torch."""

    def __init__(self, config, scales):
        from kvindex_adapters.vllm.attention import PagedAttention
        from kvindex_adapters.vllm.engine import options_of
        from tests.vllm.on_a_cpu import Attention

        self.layers = layers_of(config, Attention, scales)
        self.convert = Scales(*scales, torch.float32) if scales else None
        self.builder = builder_of(config, self.layers)
        self.plain = [
            PagedAttention.of(options_of(config), layer.impl.geometry)
            for layer in self.layers.values()
        ]

    def run(self, tables, lengths, counts, **more):
        """Run a step of all layers, and return queries, values and outputs of each layer."""
        bounds = [(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        slots, found, total = slots_of(tables, bounds), [], sum(counts)
        metadata = self.builder.build(0, common(tables, lengths, counts, slots, **more))
        for number, layer in enumerate(self.layers.values()):
            queries, output = 2 * torch.randn(total, H, D), torch.empty(total, H, D)
            keys, values = torch.randn(total, G, D), (1 + number) * torch.randn(total, G, D)
            if self.convert is None or layer.impl.host is not None:
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            else:
                pages.write_rows(layer.kv_cache, slots, keys, values, self.convert)
            given = queries, keys, values, layer.kv_cache, metadata, output
            layer.impl.forward(layer, *given)
            found.append((queries, values, output))
        return found

    def measure(self, found, length, own):
        """Let the limits in plain torch measure a chunk of a prompt: some tokens of a batch."""
        for plain, (_, values, output) in zip(self.plain, found, strict=True):
            count = len(plain.budget.places(length, own.stop - own.start))
            some = slice(own.stop - count, own.stop)
            given = (part[some].transpose(0, 1)[None] for part in (values, output))
            plain.budget.measure(*given, length)

    def check(self, tables, lengths, found, **bounds):
        """Compare decode steps with plain torch, which has the same limits."""
        from kvindex_adapters.vllm.attention import Sequence

        for layer, plain, (queries, _, output) in zip(
            self.layers.values(), self.plain, found, strict=True
        ):
            rows, records = layer.kv_cache, layer.impl.codes.records
            if layer.impl.host is not None:
                rows = layer.impl.host.pages.rows[layer.impl.number]
            for b, length in enumerate(lengths):
                sequence = Sequence(rows, records, tables[b], length, self.convert)
                expected = plain.attend(queries[b, None], sequence)[0]
                torch.testing.assert_close(output[b], expected, **bounds)


@pytest.mark.parametrize(
    ("more", "scales"),
    [({}, None), ({}, (0.37, 0.02)), ({"rows": "host", "cached_rows": 1024}, None)],
)
def test_as_many_rows_as_the_error_asks_for(entered, flash_fp8, more, scales):
    """Limits follow from prompts, not from decode steps in the same batch."""
    config = entered({**EVERY, **AUTO, **more})
    batches = Batches(config, scales)
    tables = torch.tensor([[3, 7, 1], [4, 2, 0], [9, 0, 0]]).int()
    reading = torch.tensor([True, True, True])
    found = batches.run(tables, (500, 300, 5), (500, 300, 5), is_prefilling=reading)
    batches.measure(found, 500, slice(0, 500))
    # a decode step, and the rest of a prompt
    mixed = torch.tensor([False, True])
    order = tables[[1, 0]]
    found = batches.run(order, (301, 690), (1, 190), is_prefilling=mixed)
    batches.measure(found, 690, slice(1, 191))
    errors = batches.builder._errors
    errors.update()
    for number, plain in enumerate(batches.plain):
        for length in (500, 690, 5000):
            limit = plain.budget.limit(torch.zeros(1, H), length).variance[0]
            bounds = dict(rtol=1e-5, atol=0)
            torch.testing.assert_close(errors.table[number, length.bit_length()], limit, **bounds)
    assert batches.layers["layers.0"].impl.codes.errors is errors
    lengths = (691, 302, 6)
    for step in range(2):
        now = tuple(length + step for length in lengths)
        found = batches.run(tables, now, (1, 1, 1), is_prefilling=~reading)
        batches.check(tables, now, found, rtol=1e-4, atol=1e-5)
        few = errors.found[:, :3].clone()
        assert (few[:, 0] > 0).all()
        assert not few[:, 1:].any()
    assert few.max() < 2 * (512 - 4)  # fewer than all rows of the index


def test_steps_attend_to_all_tokens_until_enough_outputs_are_measured(entered):
    """A graph of a decode step is captured before that."""
    batches = Batches(entered({**EVERY, **AUTO}), None)
    tables = torch.tensor([[3, 7, 1], [4, 2, 5]]).int()
    batches.run(tables, (395, 395), (395, 395))
    for length in range(396, 400):  # too short to be searched
        batches.run(tables, (length, length), (1, 1))
        assert not batches.builder._errors._chunks  # the host knows that nothing is measured
    batches.builder._capturing = True
    batches.run(tables, (399 + 300, 399 + 300), (300, 300))  # not measured
    batches.builder._capturing = False
    errors = batches.builder._errors
    for step in range(FEWEST // 2 + 1):
        known = step == FEWEST // 2
        lengths = (700 + step,) * 2
        found = batches.run(tables, lengths, (1, 1))
        assert errors.known.item() is known
        assert bool(errors.found.any()) is known
        assert {plain.budget.known for plain in batches.plain} == {known}
        batches.check(tables, lengths, found, rtol=1e-4, atol=1e-5)


def test_steps_that_verify_drafts_are_measured(entered):
    """Each drafted token counts, as long as no limit is known."""
    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    batches = Batches(entered({**EVERY, **AUTO}, speculative_config=speculation), None)
    tables, reading = torch.tensor([[3, 7, 1], [4, 2, 5]]).int(), torch.tensor([True, True])
    batches.run(tables, (395, 395), (395, 395), is_prefilling=reading)
    errors = batches.builder._errors
    for step in range(FEWEST // 6 + 2):
        batches.run(tables, (700 + step,) * 2, (3, 3), is_prefilling=~reading)
        assert errors.known.item() is (step * 6 >= FEWEST)
    assert errors.found.any()


def test_the_last_tokens_of_a_prompt_among_drafts_are_measured_once(entered):
    """A graph does not measure prompts, and they must not change limits without a graph either."""
    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    batches = Batches(entered({**EVERY, **AUTO}, speculative_config=speculation), None)
    tables, reading = torch.tensor([[3, 7, 1], [4, 2, 5]]).int(), torch.tensor([False, True])
    batches.run(tables, (395, 395), (395, 395))
    errors = batches.builder._errors
    for step in range(FEWEST // 6 + 2):
        batches.run(tables, (700 + step,) * 2, (3, 3), is_prefilling=reading)
        assert errors._seen.sum(1).tolist() == [6 * step] * 2
    assert errors.searches
    limits = errors.table.clone()
    for _ in range(2):
        batches.run(tables, (720,) * 2, (3, 3), is_prefilling=reading)
    assert torch.equal(errors.table, limits)


def test_which_sequences_are_measured():
    from kvindex_adapters.vllm.gpu_batch import prompt_chunks

    def chosen(lengths, counts, decoded=1, **more):
        given = common(torch.zeros(len(lengths), 1).int(), lengths, counts, None, **more)
        return prompt_chunks(given, 400, decoded)

    lengths = torch.tensor([700, 300, 900, 500]).int()
    assert chosen(lengths.tolist(), (1, 300, 2, 1)) == [1, 2]
    assert chosen(lengths.tolist(), (1, 300, 2, 4), decoded=2) == [1, 3]
    reading = torch.tensor([False, True, False])
    assert chosen([*lengths.tolist(), 0], (1, 1, 2, 1, 0), is_prefilling=reading) == [1, 2]
    known = dict(seq_lens_cpu_upper_bound=lengths)
    assert chosen(lengths.tolist(), (1, 300, 2, 1), **known) == [2]


def test_a_layer_that_reads_the_rows_of_another(entered):
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    config = entered({**EVERY, "index": "pariskv:preset=fast"})
    layers = layers_of(config)
    given = H, D, D**-0.5, G, None, None, "auto", None, "decoder", "layers.1"
    impl, source = SearchingFlashAttention(*given), layers["layers.1"]
    layers["layers.2"] = SimpleNamespace(impl=impl, kv_cache=source.kv_cache)
    config.compilation_config.static_forward_context.update(layers)
    assert impl.codes is source.impl.codes
    builder = builder_of(config, layers)
    tables = torch.tensor([[3, 7, 1]]).int()
    for bounds in ((0, 699), (699, 700)):
        slots = slots_of(tables, [bounds])
        for layer in list(layers.values())[:2]:
            pages.write_rows(layer.kv_cache, slots, *torch.randn(2, len(slots), G, D))
        count = bounds[1] - bounds[0]
        metadata = builder.build(0, common(tables, [bounds[1]], [count], slots))
    queries, output = torch.randn(1, H, D), torch.empty(1, H, D)
    impl.forward(layers["layers.2"], queries, None, None, source.kv_cache, metadata, output)
    rows = pages.read_rows(source.kv_cache, tables[0], 0, 700)
    expected = attend(queries, rows.keys, rows.values, scale=D**-0.5)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_caches_that_vllm_gives_anew_are_read(entered):
    config = entered()
    layers = layers_of(config)
    builder = builder_of(config, layers)
    tables, slots = torch.tensor([[1]]).int(), torch.tensor([256 + 9])
    for _ in range(2):
        for layer in layers.values():
            layer.kv_cache = torch.randn(BLOCKS, G, 256, 2 * D)
        metadata = builder.build(0, common(tables, [10], [1], slots))
        layer, queries, output = layers["layers.1"], torch.randn(1, H, D), torch.empty(1, H, D)
        layer.impl.forward(layer, queries, None, None, layer.kv_cache, metadata, output)
        rows = pages.read_rows(layer.kv_cache, tables[0], 0, 10)
        expected = attend(queries, rows.keys, rows.values, scale=D**-0.5)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_graphs_are_of_decoded_tokens_alone(entered):
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvindex_adapters.vllm.engine import CodesBuilder
    from kvindex_adapters.vllm.gpu import SearchingFlashBuilder

    config = entered()
    found = SearchingFlashBuilder.get_cudagraph_support(config, None)
    assert found is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    speculation = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    drafts = entered(speculative_config=speculation)
    found = SearchingFlashBuilder.get_cudagraph_support(drafts, None)
    assert found is AttentionCGSupport.UNIFORM_BATCH
    assert CodesBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"index": "pariskv"},
            "index: on a GPU: sign_decoder: got 'regression', allowed is 'mean'",
        ),
        (
            {"index": "pariskv:preset=paper"},
            "index: on a GPU: coarse: got 'tiered_votes', allowed is 'sign_votes'",
        ),
        (
            {"index": "pariskv:preset=scan"},
            "index: on a GPU: coarse: got 'none', allowed is 'sign_votes'",
        ),
        ({**EVERY, "local_window": 0}, "local_window: got 0, allowed is at least 1 on a GPU"),
    ],
)
def test_what_no_fused_step_serves_is_refused(entered, asked, said):
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    entered(asked)
    with pytest.raises(ValueError, match=f"kvindex: {said}"):
        SearchingFlashAttention(H, D, 1.0, G, None, None, "auto")


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"k": "auto"}, "k: got 'auto' in a model"), ({"error": 0.1}, "error: got 0.1 in a model")],
)
def test_layers_that_share_rows_do_not_choose_their_number(entered, asked, said):
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    layers_of(entered(asked))
    given = H, D, 1.0, G, None, None, "auto", None, "decoder", "layers.1"
    with pytest.raises(ValueError, match=f"kvindex: {said} whose layers share keys and values"):
        SearchingFlashAttention(*given)


def test_a_gpu_that_cannot_run_the_kernels(entered, monkeypatch):
    import kvindex_cuda
    from kvindex_adapters.vllm.gpu import SearchingFlashAttention

    def fail(device):
        raise ImportError("CuPy is not installed")

    entered({"index": "pariskv:preset=fast"})
    monkeypatch.setattr(kvindex_cuda, "ready", fail)
    with pytest.raises(ValueError, match=r"^kvindex: kernels for GPUs: CuPy is not installed$"):
        SearchingFlashAttention(H, D, 1.0, G, None, None, "auto")


def test_layers_of_different_shapes(entered):
    config = entered()
    layers = layers_of(config)
    other = next(iter(layers.values())).impl
    other.geometry = replace(other.geometry, head_dim=64)
    builder = builder_of(config, layers)
    with pytest.raises(ValueError, match="kvindex: model: got full-attention layers of different"):
        builder.build(0, common(torch.tensor([[1]]).int(), [1], [1], torch.tensor([256])))


def test_the_backend_has_a_name_of_its_own(entered):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvindex_adapters.vllm.gpu import SearchingFlashAttention, SearchingFlashBackend

    assert AttentionBackendEnum.KVINDEX.get_class() is SearchingFlashBackend
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is FlashAttentionBackend
    assert SearchingFlashBackend.supports_kv_cache_update_bypass is False
    entered(None)
    assert SearchingFlashBackend.get_impl_cls() is FlashAttentionImpl
    entered()
    assert SearchingFlashBackend.get_impl_cls() is SearchingFlashAttention


ASKED = {**EVERY, "index": "pariskv:preset=fast", "dense_below": 350, "local_window": 40}

SPARSE = {"prefill": "sparse", "prefill_mass": 0.4, "prefill_last": 64}


@pytest.fixture
def emulated(stock, engine, model):
    """Make engines on a CPU whose decode steps search with the GPU kernels."""
    with kernels_on_a_cpu():
        yield lambda asked: engine(model, asked)


def test_prompts_are_read_sparsely(stock, engine, model, emulated):
    """The torch backend, which reads prompts in the same chunks, writes the same tokens."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    prompts = [prompt(length, seed) for seed, length in enumerate((1000, 300, 20, 508))]
    prompts += [prompts[0][:600] + prompt(300, 9)]
    asked = ASKED | SPARSE
    mine = emulated(asked)
    found = tokens(mine, prompts, 8)
    own = registry.AttentionBackendEnum.CPU_ATTN
    before = own.get_path()
    registry.register_backend(own, "kvindex_adapters.vllm.backend.SearchingBackend")
    selector._cached_get_attn_backend.cache_clear()
    theirs = engine(model, asked)
    registry.register_backend(own, before)
    assert found == tokens(theirs, prompts, 8)
    assert found == [tokens(mine, [ids], 8)[0] for ids in prompts]  # with cached prefixes
    assert found[0] != tokens(stock, prompts[:1], 8)[0]


@pytest.mark.parametrize("more", [{}, SPARSE])
def test_the_engine_takes_as_many_rows_as_the_error_asks_for(engine, model, emulated, more):
    """The torch backend, which measures the same prompts, writes the same tokens."""
    from prometheus_client import REGISTRY
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    names = [f"vllm:kvindex_{kind}_total" for kind in ("searched_steps", "dense_steps")]
    names.append("vllm:kvindex_rows_read_total")

    def counted():
        return [REGISTRY.get_sample_value(name, {"engine": "0"}) or 0 for name in names]

    asked, results = ASKED | AUTO | more, []
    prompts = [prompt(length, seed) for seed, length in enumerate((1000, 300, 700, 508))]
    own = registry.AttentionBackendEnum.CPU_ATTN
    before = own.get_path()
    for mine in (True, False):
        if not mine:
            registry.register_backend(own, "kvindex_adapters.vllm.backend.SearchingBackend")
            selector._cached_get_attn_backend.cache_clear()
        llm, start = emulated(asked), counted()
        written = [tokens(llm, [ids], 34)[0] for ids in prompts]
        results.append((written, [new - old for new, old in zip(counted(), start, strict=True)]))
    registry.register_backend(own, before)
    (found, steps), (expected, others) = results
    assert found == expected
    assert sum(steps[:2]) == sum(others[:2])
    # on a GPU, rows and the first searches are counted some steps later
    assert 0.7 * others[0] < steps[0] <= others[0]
    assert 0.8 * others[2] < steps[2] < 1.2 * others[2]


def test_a_tiny_error_gives_the_tokens_of_full_attention(emulated, stock):
    """Sequences are shorter than the largest number of rows."""
    mine = emulated(ASKED | AUTO | {"error": 1e-6})
    prompts = [prompt(length, seed) for seed, length in enumerate((1000, 300, 508))]
    assert tokens(mine, prompts, 8) == tokens(stock, prompts, 8)


def test_a_single_token_that_is_left_of_a_prompt_is_read_by_the_kernels(emulated, stock):
    few = emulated(ASKED | {"k": 1, "sink": 0, "local_window": 1})
    ids = [prompt(513, seed=60)]
    expected = tokens(stock, ids, 1, logprobs=1)
    for cached in (False, True):
        (mine,), (theirs,) = (answers(llm, ids, 1, logprobs=1) for llm in (few, stock))
        assert (mine.num_cached_tokens == 512) is cached
        ours, own = (one.outputs[0] for one in (mine, theirs))
        assert [list(ours.token_ids)] == expected[0]
        assert ours.cumulative_logprob == pytest.approx(own.cumulative_logprob, rel=1e-4)


def test_by_default_short_sequences_do_not_search(emulated, stock):
    from prometheus_client import REGISTRY

    from tests.vllm.on_a_cpu import Attention

    mine = emulated({"index": "pariskv:preset=fast", "k": 1})
    names = [f"vllm:kvindex_{kind}_steps_total" for kind in ("searched", "dense")]
    before = [Attention.searched, *(REGISTRY.get_sample_value(n, {"engine": "0"}) for n in names)]
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300))]
    assert tokens(mine, prompts, 8) == tokens(stock, prompts, 8)
    after = [Attention.searched, *(REGISTRY.get_sample_value(n, {"engine": "0"}) for n in names)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 0, 2 * 7]


def test_the_engine_decodes_by_the_kernels(emulated, stock):
    """The batch has mixed lengths, blocks that fill, cached prefixes, and preempted sequences."""
    from tests.vllm.on_a_cpu import Attention

    emulated_engine = emulated(ASKED)
    prompts = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]
    before = Attention.searched
    assert tokens(emulated_engine, prompts, 8) == tokens(stock, prompts, 8)
    assert Attention.searched - before >= 2 * 4
    start = prompt(600, seed=10)
    for length in (5, 164):  # the second sequence fills a block and searches it
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(emulated_engine, ids, 46 if length > 5 else 4)
        expected = tokens(stock, ids, 46 if length > 5 else 4)[0]
        assert [list(outcome.outputs[0].token_ids)] == expected
        assert outcome.num_cached_tokens == (512 if length > 5 else 0)
    lengths = 1010, 1000, 750  # these fill all 11 blocks; each needs one more soon
    prompts = [prompt(length, seed=20 + length) for length in lengths]
    expected = [tokens(stock, [ids], 20)[0] for ids in prompts]
    assert tokens(emulated_engine, prompts, 20) == expected

"""Prefill layer by layer gives the same as chunks through all layers, with one layer's rows."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvindex.indexes.exact import Exact
from kvindex.indexes.snapkv import SnapKV
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt_chunks import chunks
from kvindex_adapters.decoder import Decoder, prefill
from kvindex_adapters.decoder.recording import Recording
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.tiny import LAYERS
from tests.support.beside import Beside

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
CHUNK = 16


@pytest.fixture(scope="module")
def decoder():
    return Decoder.of(model_of("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2))


def started(decoder, prompts, index="pariskv", **regions):
    options = None if index is None else {**REGIONS, **regions}
    return decoder.start(prompts, index=index, k=10, chunk=CHUNK, attach_options=options)


def by_layer(run):
    return run.session.read_prompt(run.ids, CHUNK, run.ids.shape[1] + 8)


def by_chunk(run):
    """Read a prompt as if tokens came before it: each chunk through all layers."""
    stop = max(run.ids.shape[1] - CHUNK, 0)
    for start, end in [*chunks(stop, CHUNK), (stop, run.ids.shape[1])]:
        logits = run.session._read(run.ids[:, start:end])
        run.session._observe(run.ids[:, start:end])
    return logits


PROMPTS = {"one": [60], "a token and a chunk": [17], "short": [3], "padded": [60, 41, 1]}


@pytest.mark.parametrize("index", [None, "pariskv", "quest", Beside])
@pytest.mark.parametrize("lengths", PROMPTS.values(), ids=PROMPTS)
def test_logits_and_state_are_those_of_chunks_to_the_bit(decoder, index, lengths):
    prompts = [ids_of(length) for length in lengths]
    mine, theirs = (started(decoder, prompts, index) for _ in range(2))
    assert torch.equal(by_layer(mine), by_chunk(theirs))
    for ours, other in zip(mine.session._attentions, theirs.session._attentions, strict=True):
        if index is not None:
            other.settle()
            first, second = (one.state_dict() for one in (ours, other))
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)
    for token in range(4):
        tokens = torch.full((len(prompts),), token)
        assert torch.equal(mine.session.step(tokens), theirs.session.step(tokens))


def test_dense_layers_beside_those_with_an_index(decoder):
    mine, theirs = (started(decoder, [ids_of(60)], dense_layers=(1,)) for _ in range(2))
    assert torch.equal(by_layer(mine), by_chunk(theirs))


LEARNING = [(name, {}) for name in ("snapkv", "h2o", "doublesparsity")]
"""Indexes that learn from the queries of a prompt."""


@pytest.mark.parametrize("lengths", PROMPTS.values(), ids=PROMPTS)
def test_a_recorded_prompt_leaves_the_logits_and_states_of_a_read_one(decoder, lengths):
    prompts = [ids_of(length) for length in lengths]
    recording = Recording(queries=True, outputs=True)
    for index, more in [(None, {}), ("pariskv", {}), ("pariskv", dict(k="auto")), *LEARNING]:
        options = None if index is None else REGIONS
        given = dict(index=index, chunk=CHUNK, attach_options=options, **more)
        mine, theirs = (decoder.start(prompts, **given) for _ in range(2))
        mine.session.reader = recording.read
        logits = by_layer(mine)
        assert torch.equal(logits, by_layer(theirs)), index
        for ours, other in zip(mine.session._attentions, theirs.session._attentions, strict=True):
            if index is not None:
                other.settle()
                first, second = (one.state_dict() for one in (ours, other))
                assert first.keys() == second.keys()
                assert all(torch.equal(first[name], second[name]) for name in first), index
        for token in range(4):
            tokens = torch.full((len(prompts),), token)
            assert torch.equal(mine.session.step(tokens), theirs.session.step(tokens)), index


def test_a_recording_without_queries_serves_the_other_indexes(decoder):
    recording, queries = Recording(queries=True, outputs=True), weakref.WeakSet()

    def read(index):
        run = started(decoder, [ids_of(60)], index)
        run.session.reader = recording.read
        return by_layer(run)

    class Keeps(SnapKV):
        def observe_queries(self, given, positions):
            queries.add(given)
            super().observe_queries(given, positions)

    want = read(Keeps)
    gc.collect()
    assert len(queries) > 2
    recording.forget(queries=True)
    gc.collect()
    assert not queries
    assert (recording.queries, recording.outputs) == (False, True)
    assert torch.equal(read("pariskv"), want)
    with pytest.raises(ValueError, match="queries: got None"):
        read("snapkv")


@pytest.mark.parametrize("index", [None, "pariskv", "h2o", "ctkvr"])
def test_copies_of_a_read_batch_answer_as_one_that_reads_the_prompts(decoder, index):
    prompts = [ids_of(length) for length in PROMPTS["padded"]]
    run, other = (replace(started(decoder, prompts, index), max_new_tokens=12) for _ in range(2))
    want = [*other.tokens()]
    logits = run.read()
    run.session.begin_decoding()
    for session in (run.session.duplicate(), run.session.duplicate(), run.session):
        session.set_rows(10)
        tokens = [*replace(run, session=session).tokens(logits=logits)]
        assert all(map(torch.equal, tokens, want))
        assert len(tokens) == len(want) == 12


def test_a_recording_serves_one_prompt_and_full_attention(decoder):
    long, short = Recording(), Recording()

    def read(length, recording=long, chunk=CHUNK, **regions):
        run = started(decoder, [ids_of(length)], **regions)
        run.session.reader = recording.read
        return run.session.read_prompt(run.ids, chunk, length)

    read(60)
    read(10, short)
    for wrong, words in [
        (lambda: read(59), "ids: got another prompt"),
        (lambda: read(60, chunk=CHUNK - 1), "or other chunks"),
        (lambda: read(10, short, prefill="sparse"), "session: got .* with sparse attention"),
        (lambda: read(60, error=0.1), "outputs: got a recording without outputs"),
        (lambda: read(60, index="snapkv"), "queries: got None for the index SnapKV"),
    ]:
        with pytest.raises(ValueError, match=words):
            wrong()


def test_on_a_gpu_a_chunk_is_as_long_as_activations_have_room_for():
    """For Qwen3-8B and Llama 3 70B in bfloat16, a chunk's activations take half a GiB.

    Chunks have 1,024 to 4,096 tokens.
    """
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for shape, chunks_of in {
        (4096, 4096, 1024, 12288): {1: 4096, 2: 2048, 4: 1024, 16: 1024},
        (8192, 8192, 1024, 28672): {1: 2048, 3: 1024},
    }.items():
        weights = sized(*shape)
        assert prefill.token_bytes(weights) == 2 * (
            2 * (shape[1] + shape[2] + shape[0]) + 3 * shape[3]
        )
        assert prefill.default_chunk(weights, 1, cpu) == 1024
        for batch, tokens in chunks_of.items():
            assert prefill.default_chunk(weights, batch, gpu) == tokens


def sized(width, queries, keys, inner):
    """Make weights of the sizes that determine the length of a chunk."""
    query, key, gate = (
        SimpleNamespace(weight=torch.empty(n, 1, device="meta")) for n in (queries, keys, inner)
    )
    layer = SimpleNamespace(query=query, key=key, gate=gate)
    embedding = torch.empty(10, width, dtype=torch.bfloat16, device="meta")
    return SimpleNamespace(embedding=embedding, layers=[layer])


class Last(AttentionLayer):
    """A layer with its own `step`."""

    def step(self, queries, keys, values, **options):
        return super().step(queries, keys, values, **options)[:, :, :] * 2


def test_a_layer_with_steps_of_its_own_reads_by_them(decoder):
    mine, theirs = (started(decoder, [ids_of(60)], layer=Last) for _ in range(2))
    assert torch.equal(by_layer(mine), by_chunk(theirs))


class Live(TorchDispatchMode):
    """Count the bytes of live storages that operations have returned, and their maximum."""

    def __init__(self):
        super().__init__()
        self.bytes = self.most = 0
        self._live = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {one.untyped_storage()._cdata for one in self._tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in self._tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and not self._live[storage._cdata]:
                self._add(storage)
        return made

    def _tensors(self, tree):
        return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = 1
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self._live[key] = 0
        self.bytes -= size


class Elsewhere(Exact):
    """An index whose rows are not in device memory."""

    def start_append(self, keys, values, *, valid=None):
        batch, count = keys.shape[0], keys.shape[2]

        def end():
            self._length += count
            self._batch = batch
            self._counts = torch.full((batch,), self._length)

        return end


def peak(decoder, length, read):
    """Return the largest memory in bytes, without weights and ids."""
    run = started(decoder, [ids_of(length)], Elsewhere)
    gc.collect()
    with Live() as live:
        read(run)
    return live.most


def test_one_layers_rows_are_there_at_a_time():
    """Peak memory is that of a chunk, plus hidden states and one layer's rows."""
    decoder = Decoder.of(model_of("llama"))
    config, width = decoder.config, decoder.weights.embedding.shape[1]
    rest = 40 * CHUNK
    hidden = 4 * rest * width
    rows = 4 * rest * 2 * config.kv_heads * config.head_dim
    weights = sum(weight.nbytes for weight in model_of("llama").parameters())
    allowed = weights + peak(decoder, 2 * CHUNK, by_layer) + hidden + rows
    most = weights + peak(decoder, 2 * CHUNK + rest, by_layer)
    assert most <= 1.1 * allowed
    assert most - weights >= hidden + rows
    assert LAYERS > 1

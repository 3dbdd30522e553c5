"""KV connectors: what they load is searched, and gives the tokens of an engine without a connector.

In these tests, engines save pages without codes, as an engine on a GPU may do. So a search is right
only if loaded blocks are encoded again.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention
from kvindex_adapters.vllm.loaded import Admitted
from kvindex_adapters.vllm.unsupported import can_pack
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, SMALL, answers, kernels_on_a_cpu, prompt, settings, tokens
from tests.vllm.gpu_layers import common
from tests.vllm.processes import printed_tokens, run
from tests.vllm.test_engine import LATENT
from tests.vllm.test_latents import LATENTS
from tests.vllm.test_packed import CONVOLUTIONS, SLIDING, codes_of
from tests.vllm.test_refusals import configured, layer
from tests.vllm.test_speculation import speculated

pytest.importorskip("vllm")
if not can_pack():
    pytest.skip("connectors need vLLM 0.28", allow_module_level=True)

from tests.vllm.connected import Connected, transfer
from tests.vllm.offloading_on_a_cpu import CopyingWorker, replace_copies

__all__ = ["configured"]  # a fixture

FEW = EVERY | {"k": 24, "sink": 0, "local_window": 1}
"""Searches that leave out most rows."""

WHOLE = dict(max_num_batched_tokens=2048, enable_prefix_caching=False)
"""`ExampleConnector` saves only prompts that are read in one step."""

OFFLOADING = dict(
    spec_name="CopyingSpec",
    spec_module_path="tests.vllm.offloading_on_a_cpu",
    cpu_bytes_to_use=1 << 28,
    offload_prompt_only=False,
)


@pytest.fixture
def codes(monkeypatch):
    """Count searches of sequences, and compare their codes with codes of the keys alone.

    While `written` is false, codes are not written.
    """
    seen = SimpleNamespace(searches=[], written=True)
    attend, encode = PagedAttention.attend, PagedAttention.encode

    def watch(self, queries, sequence, sinks=None, **given):
        indexed = self.searched(sequence.length)
        if seen.written and len(queries) == 1 and indexed and not given.get("prompt"):
            keys = sequence.read(0, indexed, self.geometry).keys
            alone, found = dict(self.encoding.encode(keys, None)), self.codes(sequence, indexed)
            assert all(torch.equal(alone[name], found[name]) for name in found)
            seen.searches.append(indexed)
        return attend(self, queries, sequence, sinks, **given)

    def write(self, rows, records, slots, scales=None):
        if seen.written:
            encode(self, rows, records, slots, scales)
            return
        segments = pages.filled(slots)
        parts = records.shape[2]
        records[segments // parts, :, segments % parts] = 0

    monkeypatch.setattr(PagedAttention, "attend", watch)
    monkeypatch.setattr(PagedAttention, "encode", write)
    return seen


def stored(llm, ids, codes, **options):
    """Generate tokens, so that the connector saves the pages of a prompt. They have no codes."""
    codes.written = False
    tokens(llm, ids, **options)
    codes.written = True


@pytest.fixture
def connected(engine, model):
    def make(connector, asked=EVERY, folder=model, extra=None, **options):
        given = transfer(connector, **(extra or {}))
        return Connected(lambda: engine(folder, asked, kv_transfer_config=given, **options))

    return make


@pytest.mark.parametrize("asked", [EVERY, FEW])
@pytest.mark.parametrize("options", [{}, {"block_size": 512}, {"kv_cache_dtype": "fp8"}])
def test_a_second_engine_loads_a_prompt(engine, model, connected, codes, tmp_path, asked, options):
    ids, more = [prompt(1100)], WHOLE | options
    expected = tokens(engine(model, asked, **more), ids)
    if asked is EVERY:
        assert expected == tokens(engine(model, **more), ids)
    extra = dict(shared_storage_path=str(tmp_path))
    first, second = (connected("ExampleConnector", asked, extra=extra, **more) for _ in range(2))
    with first.entered():
        stored(first.llm, ids, codes)
    codes.searches.clear()
    with second.entered():
        (answer,) = answers(second.llm, ids)
    assert answer.num_cached_tokens == 1024
    assert [[list(one.token_ids) for one in answer.outputs]] == expected
    assert len(codes.searches) == 2 * 15  # the prompt gives the first of 16 tokens


def test_prompts_of_a_batch_and_a_prefix(stock, connected, codes, tmp_path):
    """One prompt is loaded, another one is saved, and a third one shares its prefix."""
    extra = dict(shared_storage_path=str(tmp_path))
    options = WHOLE | dict(enable_prefix_caching=True)
    first, second = (connected("ExampleConnector", extra=extra, **options) for _ in range(2))
    start = prompt(600)
    batch = [start, prompt(700, 1), start[:512] + prompt(300, 2), prompt(20, 3)]
    expected = tokens(stock, batch)
    with first.entered():
        stored(first.llm, batch[:1], codes)
    with second.entered():
        assert tokens(second.llm, batch) == expected
        assert tokens(second.llm, batch[2:]) == expected[2:]
    assert codes.searches


def test_pages_of_a_running_sequence_are_loaded_again(engine, model, connected, codes, tmp_path):
    """`ExampleConnector` also loads blocks that the prefix cache has and other sequences read."""
    from vllm import SamplingParams

    start = prompt(600)[:512]
    ids = [start + prompt(300, 1), prompt(20, 2), start + prompt(600, 3)]
    extra = dict(shared_storage_path=str(tmp_path))
    options = WHOLE | dict(enable_prefix_caching=True, max_num_seqs=2, num_gpu_blocks_override=16)
    given = [{"prompt_token_ids": one} for one in ids]
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in (40, 8, 8)  # the third one starts when the second one ends
    ]

    def found(llm):
        made = llm.generate(given, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made], made[2].num_cached_tokens

    plain = engine(model, EVERY, **options)
    expected, _ = found(plain)
    first, second = (connected("ExampleConnector", extra=extra, **options) for _ in range(2))
    with first.entered():
        stored(first.llm, ids[2:], codes)
    codes.searches.clear()
    with second.entered():
        assert found(second.llm) == (expected, 1024)
    assert codes.searches


@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
@pytest.mark.parametrize("asked", [EVERY, FEW])
def test_pages_in_host_memory(engine, model, connected, codes, monkeypatch, name, asked):
    """Prompts are read in chunks, and share a prefix. Loads take more than one step."""
    replace_copies(monkeypatch)
    start = prompt(600, seed=10)
    batch = [start + prompt(length, seed=11 + length) for length in (5, 150, 500)]
    plain = engine(model, asked)
    expected = [tokens(plain, [ids])[0] for ids in batch]
    mine = connected(name, asked, extra=OFFLOADING)
    with mine.entered():
        for ids in batch:
            stored(mine.llm, [ids], codes)
        mine.llm.reset_prefix_cache()
        before = CopyingWorker.loaded
        for number, ids in enumerate(batch):
            codes.searches.clear()
            (answer,) = answers(mine.llm, [ids])
            assert [[list(one.token_ids) for one in answer.outputs]] == expected[number:][:1]
            assert answer.num_cached_tokens == len(ids) // 256 * 256
            assert len(codes.searches) == 2 * 15
        assert CopyingWorker.loaded > before
        mine.llm.reset_prefix_cache()
        together = tokens(mine.llm, batch)
    if asked is EVERY:
        assert together == expected


def test_sequences_that_are_preempted_load_their_blocks(stock, connected, codes, monkeypatch):
    """Loaded pages have wrong codes, also those of tokens that the engine has generated."""
    resumed, update = [], Admitted.update

    def watch(self, scheduled):
        update(self, scheduled)
        some = scheduled.scheduled_cached_reqs
        counts = zip(some.req_ids, some.num_computed_tokens, strict=True)
        resumed.extend(count for name, count in counts if name in some.resumed_req_ids)

    monkeypatch.setattr(Admitted, "update", watch)
    lengths = 1000, 300, 758  # the third one fills its third block before it is preempted
    prompts = [prompt(length, seed=20 + length) for length in lengths]
    expected = [tokens(stock, [ids], count=60)[0] for ids in prompts]
    options = dict(num_gpu_blocks_override=11, enable_prefix_caching=False)
    mine, before = (
        connected("OffloadingConnector", extra=OFFLOADING, **options),
        CopyingWorker.loaded,
    )
    (first, *_) = codes_of(mine.llm)
    monkeypatch.setattr(CopyingWorker, "heads", 2)
    monkeypatch.setattr(CopyingWorker, "lost", 256 * first.token_bytes)
    with mine.entered():
        assert tokens(mine.llm, prompts, count=60) == expected
    assert CopyingWorker.loaded > before
    assert max(resumed) == 768
    assert codes.searches


def test_loads_that_fail_are_computed_again(stock, engine, model, codes, tmp_path, monkeypatch):
    """The second of four blocks is not loaded, and contains other numbers."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    failed = set()

    class Failing(ExampleConnector):
        """A connector that reports a block whose load has failed."""

        def start_load_kv(self, forward_context, **given):
            super().start_load_kv(forward_context, **given)
            for request in self._get_connector_metadata().requests:
                if not request.is_store:
                    block = int(request.slot_mapping[256]) // 256
                    failed.add(block)
                    for name in forward_context.attn_metadata:
                        forward_context.no_compile_layers[name].kv_cache[block] = float("nan")

        def get_block_ids_with_load_errors(self):
            found = set(failed)
            failed.clear()
            return found

    given = transfer("ExampleConnector", shared_storage_path=str(tmp_path))
    ids = [prompt(1100), prompt(300, 1)]
    expected = tokens(stock, ids)
    first = Connected(lambda: engine(model, EVERY, kv_transfer_config=given, **WHOLE))
    with first.entered():
        stored(first.llm, ids[:1], codes)
    monkeypatch.setitem(KVConnectorFactory._registry, "ExampleConnector", lambda: Failing)
    again = transfer("ExampleConnector", shared_storage_path=str(tmp_path))
    again.kv_load_failure_policy = "recompute"
    second = Connected(lambda: engine(model, EVERY, kv_transfer_config=again, **WHOLE))
    with second.entered():
        assert tokens(second.llm, ids) == expected
    assert codes.searches


def test_several_connectors(stock, connected, codes, tmp_path):
    """Prompts come from the first one that has them."""
    extra = {"shared_storage_path": str(tmp_path)}
    parts = [
        dict(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=settings)
        for name, settings in (("OffloadingConnector", OFFLOADING), ("ExampleConnector", extra))
    ]
    ids = [prompt(1100)]
    expected = tokens(stock, ids)
    for _ in range(2):  # the second engine has nothing in host memory
        mine = connected("MultiConnector", extra={"connectors": parts}, **WHOLE)
        with mine.entered():
            if not list(tmp_path.iterdir()):
                stored(mine.llm, ids, codes)
            (answer,) = answers(mine.llm, ids)
        assert answer.num_cached_tokens == 1024
        assert [[list(one.token_ids) for one in answer.outputs]] == expected
    assert codes.searches


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("Olmo3", SLIDING, dict(num_gpu_blocks_override=24)),
        ("Lfm2", CONVOLUTIONS, dict(enable_prefix_caching=True, num_gpu_blocks_override=28)),
        ("DeepseekV3", LATENT, {}),
    ],
)
def test_models_with_other_layers(engine, saved, connected, codes, family, config, options):
    """Layers with sliding windows, convolutions or latents have their own kinds of pages."""
    folder, ids = saved(family, **config), [prompt(1100)]
    expected = tokens(engine(folder, EVERY, **options), ids)
    mine, before = (
        connected("OffloadingConnector", folder=folder, extra=OFFLOADING, **options),
        CopyingWorker.loaded,
    )
    with mine.entered():
        stored(mine.llm, ids, codes)
        mine.llm.reset_prefix_cache()
        (answer,) = answers(mine.llm, ids)
    assert CopyingWorker.loaded > before
    assert answer.num_cached_tokens == 1024
    assert [[list(one.token_ids) for one in answer.outputs]] == expected
    assert codes.searches


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [("Olmo3", SLIDING, dict(num_gpu_blocks_override=24)), ("DeepseekV3", LATENT, {})],
)
def test_a_storage_for_models_with_other_layers(
    engine, saved, connected, codes, tmp_path, family, config, options
):
    """vLLM's own tokens may differ between a cached prefix and a prompt that is read at once."""
    folder, ids = saved(family, **config), [prompt(1100)]
    plain = engine(folder, EVERY, **WHOLE | options | dict(enable_prefix_caching=True))
    expected = [tokens(plain, ids) for _ in range(2)][1]
    extra, options = dict(shared_storage_path=str(tmp_path)), WHOLE | options
    first, second = (
        connected("ExampleConnector", folder=folder, extra=extra, **options) for _ in range(2)
    )
    with first.entered():
        stored(first.llm, ids, codes)
    with second.entered():
        (answer,) = answers(second.llm, ids)
    assert answer.num_cached_tokens == 1024
    assert [[list(one.token_ids) for one in answer.outputs]] == expected
    assert codes.searches


def test_drafts(engine, model, tmp_path):
    """They are verified in a process of their own."""
    ids = [prompt(240) * 4, prompt(100, 1) * 3]
    shared = dict(shared_storage_path=str(tmp_path))
    given = dict(kv_connector="ExampleConnector", kv_role="kv_both")
    options = WHOLE | dict(kv_transfer_config=given | dict(kv_connector_extra_config=shared))
    expected = tokens(engine(model, FEW, **WHOLE), ids, 40)
    for _ in range(2):
        found, drafted, accepted = speculated(tmp_path, model, FEW, 40, ids, **options)
        assert found == expected
        assert drafted > accepted > 0
        files = list(tmp_path.rglob("*.safetensors"))
        assert len(files) == 2 * len(ids)
        for file in files:
            remove_codes(file)


def remove_codes(file):
    """Overwrite the codes in a file of `ExampleConnector`, `[tokens, G, C]`."""
    from safetensors.torch import load_file, save_file

    saved = load_file(file)["kv_cache"]
    parts = saved.view(-1, 256, *saved.shape[1:]).transpose(1, 2).flatten(2)  # [blocks, G, 256 C]
    parts[..., 256 * 2 * SMALL["head_dim"] :] = 0.5
    parts = parts.view(len(parts), saved.shape[1], 256, -1).transpose(1, 2)
    save_file({"kv_cache": parts.reshape(saved.shape).contiguous()}, file)


TWICE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine, prompts = json.loads(sys.argv[1])
    llm = LLM(**engine)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    first = llm.generate(given, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    found = llm.generate(given, params, use_tqdm=False)
    assert [one.num_cached_tokens for one in found] == [len(ids) // 256 * 256 for ids in prompts]
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""
"""Print the answers to prompts whose pages have been loaded."""


def test_two_worker_processes(stock, model, tmp_path):
    """Each worker finds out itself which requests a step admits."""
    given = dict(kv_connector="OffloadingConnector", kv_role="kv_both")
    given |= dict(kv_connector_extra_config=OFFLOADING)
    options = dict(tensor_parallel_size=2, kv_transfer_config=given)
    ids = [prompt(1100), prompt(700, 1)]
    root = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = run(tmp_path, settings(model, EVERY, **options), ids, TWICE, root)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(stock, ids)


def test_a_request_does_not_search_in_the_step_that_admits_it(stock, configured, monkeypatch):
    """A layer may still wait for its rows. They are there before the next step."""
    from vllm.config import get_current_vllm_config

    from kvindex_adapters.vllm import backend

    with configured(kv_transfer_config=transfer("ExampleConnector")):
        config = get_current_vllm_config()
        made = layer()
        made.impl.process_weights_after_loading(torch.float32)
        builder = backend.SearchingBackend.get_builder_cls()
        builder = builder(made.get_kv_cache_spec(config), ["layers.0"], config, "cpu")
    width = 2 * SMALL["head_dim"] + made.impl.codes.token_bytes // 4
    made.kv_cache = torch.randn(8, 2, 256, width)
    records, tables = made.impl.codes.records, torch.tensor([[3, 7, 1], [4, 2, 5], [3, 6, 0]]).int()
    records.zero_()
    encoded, encode = [], made.impl.encode

    def watch(layer, slots):
        encoded.append(slots.tolist())
        encode(layer, slots)

    monkeypatch.setattr(made.impl, "encode", watch)
    monkeypatch.setattr(backend, "AT_ONCE", 2)
    for counts, lengths, prompts in (
        ([512, 0, 512], [513, 600, 513], [True, False, True]),
        ([], [514, 601, 514], [False, False, False]),
    ):
        assert not records.any()
        monkeypatch.setattr(backend, "admitted", lambda counts=counts: counts)
        slots, reading = torch.tensor([300, 600, 5]), torch.zeros(3, dtype=torch.bool)
        given = common(tables, lengths, [1, 1, 1], slots, is_prefilling=reading)
        assert vars(builder.build(0, given))["prompts"] == prompts
    assert encoded == [[1023, 1791], [2047]]  # a few blocks at a time, and shared blocks once
    assert [bool(one.any()) for one in records] == [number in (3, 6, 7) for number in range(8)]


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("name", ["ExampleConnector", "OffloadingConnector"])
def test_the_gpu_backend(engine, model, stock, connected, tmp_path, name):
    """It encodes the blocks of a step before the next one. Pages that are saved in between have no
    codes."""
    from tests.vllm.on_a_cpu import Attention

    ids, asked = [prompt(1024), prompt(300, 1)], {**EVERY, "index": "pariskv:preset=fast"}
    expected = tokens(stock, ids, 8)
    extra = OFFLOADING | dict(shared_storage_path=str(tmp_path))
    with kernels_on_a_cpu():
        mine = [connected(name, asked, extra=extra, **WHOLE)]
        few = asked | {"k": 24, "sink": 0, "local_window": 1}
        mine.append(connected(name, few, extra=extra, **WHOLE))
        exact = tokens(engine(model, few, **WHOLE), ids, 8)
        for llm, wanted in zip(mine, (expected, exact), strict=True):
            with llm.entered():
                for _ in range(2):
                    count = Attention.searched
                    assert tokens(llm.llm, ids, 8) == wanted
                    assert Attention.searched > count


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_the_gpu_backend_for_latents(engine, saved, connected):
    """Loaded blocks are encoded before the next step, which searches them."""
    from tests.vllm.latents_on_a_cpu import kernels_for_latents

    folder, ids = saved("DeepseekV3", **LATENTS), [prompt(1024), prompt(300, 1)]
    asked = {**EVERY, "index": "pariskv:preset=fast", "k": 24, "sink": 0, "local_window": 1}
    options = WHOLE | dict(enable_prefix_caching=True)
    with kernels_for_latents():
        expected = tokens(engine(folder, asked, **options), ids, 8)
        mine = connected("OffloadingConnector", asked, folder, extra=OFFLOADING, **options)
        with mine.entered():
            assert tokens(mine.llm, ids, 8) == expected
            mine.llm.reset_prefix_cache()
            before = CopyingWorker.loaded
            assert tokens(mine.llm, ids, 8) == expected
            assert CopyingWorker.loaded > before

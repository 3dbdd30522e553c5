"""Latent attention by the GPU backend in vLLM's engine, with kernels emulated on a CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm import pages, unsupported
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.unsupported import can_pack
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, answers, prompt, settings, tokens
from tests.vllm.gpu_layers import common, entered, slots_of
from tests.vllm.processes import printed_tokens, run

pytest.importorskip("vllm")

from kvindex_adapters.vllm import packed
from tests.vllm import on_a_cpu
from tests.vllm.test_latents import LATENTS, layers_of

pytestmark = [
    pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with"),
    pytest.mark.skipif(not can_pack(), reason="vLLM before 0.28 has no latents on a CPU"),
]

__all__ = ["entered"]  # a fixture

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]

ASKED = EVERY | {"index": "pariskv:preset=fast", "k": 1024, "dense_below": 350}

FEW = ASKED | {"k": 1, "dense_below": 0, "local_window": 1, "sink": 0}

H, D, LAYERS, BLOCKS = 4, 576, 2, 12


@pytest.fixture(scope="module")
def latents(saved):
    return saved("DeepseekV3", **LATENTS)


@pytest.fixture
def model(latents):
    """The model of the fixture `entered`."""
    return latents


@pytest.fixture(scope="module")
def stock(engine, latents):
    return engine(latents, attention_backend="CPU_MLA", num_gpu_blocks_override=600)  # of 16 tokens


@pytest.fixture
def emulated(stock, engine, latents):
    """Make engines on a CPU whose decode steps search with the GPU kernels."""
    from tests.vllm.latents_on_a_cpu import kernels_for_latents

    with kernels_for_latents():
        yield lambda asked, **options: engine(latents, asked, **options)


def test_the_engine_decodes_by_the_kernels(emulated, stock):
    """The batch has mixed lengths, blocks that fill, cached prefixes, and preempted sequences."""
    from tests.vllm.latents_on_a_cpu import Attention

    mine, before = emulated(ASKED), on_a_cpu.Attention.searched
    assert tokens(mine, PROMPTS, 8) == tokens(stock, PROMPTS, 8)
    assert on_a_cpu.Attention.searched - before >= 3 * 7
    for layer in layers_of(mine).values():
        assert type(layer.impl) is Attention
        assert layer.impl.codes.records.any()
        assert layer.kv_cache.shape[1:] == (256, 576 + layer.impl.codes.token_bytes // 4)
    start = prompt(600, seed=10)
    for length in (5, 164):  # the second sequence fills a block and searches it
        ids = [start + prompt(length, seed=11 + length)]
        (outcome,) = answers(mine, ids, 12 if length > 5 else 4)
        expected = tokens(stock, ids, 12 if length > 5 else 4)[0]
        assert [list(outcome.outputs[0].token_ids)] == expected
        assert outcome.num_cached_tokens == (512 if length > 5 else 0)
    lengths = 1010, 1000, 750  # these fill all 11 blocks; each needs one more soon
    prompts = [prompt(length, seed=20 + length) for length in lengths]
    assert tokens(mine, prompts, 20) == tokens(stock, prompts, 20)


def test_codes_in_pages_of_their_own(emulated, stock, monkeypatch):
    """vLLM 0.26 has no place for codes in the pages of latents, so they have pages of their own."""
    for module in (packed, unsupported):
        monkeypatch.setattr(module, "packs", lambda *given: False)
    mine = emulated(ASKED)
    assert tokens(mine, PROMPTS, 8) == tokens(stock, PROMPTS, 8)
    for layer in layers_of(mine).values():
        assert layer.kv_cache.shape[1:] == (256, 576)
        assert layer.impl.codes.records.any()


def test_few_rows_are_those_of_the_backend_for_cpus(emulated, engine, latents, stock):
    from vllm.v1.attention import selector

    few = ASKED | {"index": "pariskv:sign_decoder=mean", "k": 8, "local_window": 16}
    found = tokens(emulated(few, block_size=512), PROMPTS[:1], 8)
    with pytest.MonkeyPatch.context() as patch:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        own = "kvindex_adapters.vllm.latents.SearchingLatentBackend"
        patch.setattr(AttentionBackendEnum, "get_path", lambda *given: own)
        selector._cached_get_attn_backend.cache_clear()
        theirs = engine(latents, few)
        assert {type(one.impl).__name__ for one in layers_of(theirs).values()} == {
            "LatentAttention"
        }
    selector._cached_get_attn_backend.cache_clear()
    assert found == tokens(theirs, PROMPTS[:1], 8)
    assert found != tokens(stock, PROMPTS[:1], 8)


def test_a_single_token_that_is_left_of_a_prompt_attends_to_all(emulated, stock):
    few, ids = emulated(FEW), [prompt(513, seed=60)]
    expected = tokens(stock, ids, 1, logprobs=1)
    for cached in (False, True):
        (mine,), (theirs,) = (answers(llm, ids, 1, logprobs=1) for llm in (few, stock))
        assert (mine.num_cached_tokens == 512) is cached
        ours, own = (one.outputs[0] for one in (mine, theirs))
        assert [list(ours.token_ids)] == expected[0]
        assert ours.cumulative_logprob == pytest.approx(own.cumulative_logprob, rel=1e-4)


def test_decode_steps_are_counted(emulated):
    from prometheus_client import REGISTRY

    names = [f"vllm:kvindex_{kind}_steps_total" for kind in ("searched", "dense")]

    def counted():
        return [REGISTRY.get_sample_value(name, {"engine": "0"}) or 0 for name in names]

    mine = emulated(ASKED)
    before = counted()
    tokens(mine, PROMPTS[:2], 8)  # one of 700 tokens searches, and one of 300 does not
    assert [new - old for new, old in zip(counted(), before, strict=True)] == [7, 7]


def test_two_processes(emulated, latents, tmp_path):
    """Each has all latents, and half of the query heads."""
    asked = settings(latents, ASKED, tensor_parallel_size=2)
    done = run(tmp_path, asked, PROMPTS, env=on_a_cpu.environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(emulated(ASKED), PROMPTS)
    text = done.stdout + done.stderr
    assert text.count("3 of 3 attention layers search") == 1
    assert "in fused steps over latents" in text


def test_drafts_do_not_change_tokens(stock, latents, tmp_path):
    from tests.vllm import test_speculation as speculation

    prompts = speculation.PROMPTS[1:4]
    found, drafted, accepted = speculation.speculated(
        tmp_path, latents, ASKED, 24, prompts, emulate=True
    )
    assert found == tokens(stock, prompts, 24)
    assert drafted > accepted > 0


def made_layers(config):
    """Make layers with caches, and the builder of their metadata."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from kvindex_adapters.vllm.gpu_latents import LatentsBuilder
    from tests.vllm.latents_on_a_cpu import Attention

    sizes = dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64)
    sizes |= dict(v_head_dim=32)
    given = H, D, D**-0.5, 1, None, None, "auto", None, "decoder", None
    prefill = SimpleNamespace(prepare_metadata=lambda metadata: None)
    made = {}
    for number in range(LAYERS):
        impl = Attention(*given, **sizes, qk_head_dim=96, kv_b_proj=None)
        more = impl.codes.token_bytes // 4
        made[f"layers.{number}"] = layer = SimpleNamespace(
            impl=impl,
            num_heads=H,
            kv_cache=torch.zeros(BLOCKS, 256, D + more),
            prefill_backend=SimpleNamespace(clone=lambda: prefill),
            **sizes,
        )
        impl.codes._layer = layer
    config.compilation_config.static_forward_context.update(made)
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=D, dtype=torch.float32)
    return list(made.values()), LatentsBuilder(spec, list(made), config, torch.device("cpu"))


def write(layers, slots):
    """Write random latents of new tokens."""
    for layer in layers:
        keys = torch.randn(len(slots), 1, D)
        pages.write_rows(layer.impl.codes.rows(layer.kv_cache), slots, keys, None)


def expected(layer, query, table, length):
    """Return full attention of a query `[H, D]`."""
    impl = layer.impl
    paged = PagedAttention.of(impl.options, impl.geometry)
    rows = impl.codes.rows(layer.kv_cache)
    return paged.attend_dense(query[None], Sequence(rows, None, table, length))[0]


def test_a_graph_serves_later_batches_with_padding(entered):
    """A graph is captured with a dummy batch, and replayed after a batch has been prepared. In that
    batch, one sequence reads the last token of its prompt, one is short, and one is padding."""
    layers, builder = made_layers(entered(FEW | {"dense_below": 100}))
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [6, 0, 0], [0, 0, 0]]).int()
    lengths = 600, 600, 90, 0
    slots = slots_of(tables[:3], [(0, length - 1) for length in lengths[:3]])
    write(layers, slots)
    counts = [length - 1 for length in lengths[:3]]
    seen = torch.tensor(counts)
    given = common(tables[:3], counts, counts, slots, seq_lens_cpu_upper_bound=seen)
    assert builder.build(0, given).num_decodes == 0
    dummy = common(torch.zeros_like(tables), [1] * 4, [1] * 4, torch.full((4,), -1))
    captured = builder.build_for_cudagraph_capture(dummy)
    slots = slots_of(tables, [(max(length - 1, 0), length) for length in lengths])
    write(layers, slots)
    reading = torch.tensor([False, True, False])  # without an entry for padding
    batch = common(tables, lengths, [1, 1, 1, 0], slots, is_prefilling=reading)
    builder.build(0, replace(batch, num_actual_tokens=4))
    for layer in layers:
        assert layer.impl.codes.records.any()
        queries = torch.randn(4, H, D)
        split = queries[..., :512], queries[..., 512:]
        output, lse = layer.impl.forward_mqa(split, layer.kv_cache, captured, layer)
        assert lse is None
        assert output.shape == (4, H, 512)
        assert not output[3].any()
        for b, length in enumerate(lengths[:3]):
            want = expected(layer, queries[b], tables[b], length)
            same = torch.allclose(output[b], want, rtol=1e-4, atol=1e-5)
            assert same is (b > 0)


def test_decode_steps_search_in_batches_with_prompts(entered):
    layers, builder = made_layers(entered(FEW | {"k": 1024}))
    tables = torch.tensor([[3, 7, 1], [4, 2, 5]]).int()
    slots = slots_of(tables[:1], [(0, 599)])
    write(layers, slots)
    seen = torch.tensor([599])
    builder.build(0, common(tables[:1], [599], [599], slots, seq_lens_cpu_upper_bound=seen))
    slots = slots_of(tables, [(599, 600), (0, 40)])
    write(layers, slots)
    more = dict(seq_lens_cpu_upper_bound=torch.tensor([600, 40]))
    more |= dict(is_prefilling=torch.tensor([False, True]))
    metadata = builder.build(0, common(tables, [600, 40], [1, 40], slots, **more))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    for layer in layers:
        queries = torch.randn(1, H, D)
        output, _ = layer.impl.forward_mqa(queries, layer.kv_cache, metadata, layer)
        want = expected(layer, queries[0], tables[0], 600)
        torch.testing.assert_close(output[0], want, rtol=1e-4, atol=1e-5)


def test_drafts_of_sequences_before_a_prompt(entered):
    """Each token is a decode step of its own, and each sequence has another number of drafts."""
    ngram = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    asked = FEW | {"k": 1024, "local_window": 3}
    layers, builder = made_layers(entered(asked, speculative_config=ngram))
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [6, 8, 0]]).int()
    slots = slots_of(tables[:2], [(0, 597), (0, 599)])
    write(layers, slots)
    seen = torch.tensor([597, 599])
    before = common(tables[:2], [597, 599], [597, 599], slots, seq_lens_cpu_upper_bound=seen)
    builder.build(0, before)
    slots = slots_of(tables, [(597, 600), (599, 600), (0, 40)])
    write(layers, slots)
    more = dict(seq_lens_cpu_upper_bound=torch.tensor([600, 600, 40]))
    metadata = builder.build(0, common(tables, [600, 600, 40], [3, 1, 40], slots, **more))
    assert metadata.num_decode_tokens == 4
    for layer in layers:
        queries = torch.randn(4, H, D)
        output, _ = layer.impl.forward_mqa(queries, layer.kv_cache, metadata, layer)
        for token, (b, length) in enumerate([(0, 598), (0, 599), (0, 600), (1, 600)]):
            want = expected(layer, queries[token], tables[b], length)
            torch.testing.assert_close(output[token], want, rtol=1e-4, atol=1e-5)


def test_which_batches_are_graphs(entered):
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvindex_adapters.vllm.gpu_latents import LatentsBuilder

    support = LatentsBuilder.get_cudagraph_support
    assert support(entered(), None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    ngram = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    config = entered(EVERY, speculative_config=ngram)
    assert support(config, None) == AttentionCGSupport.UNIFORM_BATCH


def test_the_model_chooses_the_backend(monkeypatch):
    """vLLM asks for the class of the backend while it constructs layers."""
    import vllm.config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvindex_adapters.vllm import register
    from kvindex_adapters.vllm.gpu import SearchingFlashBackend
    from kvindex_adapters.vllm.gpu_latents import SearchingLatentBackend

    register()
    current = None
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: current)
    member = AttentionBackendEnum.KVINDEX
    assert member.get_class() is SearchingFlashBackend
    for latents in (True, False):
        current = SimpleNamespace(model_config=SimpleNamespace(use_mla=latents))
        assert (member.get_class() is SearchingLatentBackend) is latents
    current = SimpleNamespace(model_config=None)
    assert member.get_class() is SearchingFlashBackend
    assert SearchingLatentBackend.is_mla()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"index": "pariskv"}, "sign_decoder: got 'regression', allowed is 'mean'"),
        ({"index": "pariskv:preset=paper"}, "on a GPU: head_dim: got 576, allowed is up to 256"),
        ({"local_window": 0}, "local_window: got 0, allowed is at least 1 on a GPU"),
    ],
)
def test_what_no_fused_step_supports(entered, asked, said):
    config = entered(asked)
    with pytest.raises(ValueError, match=said):
        made_layers(config)


def test_a_gpu_that_cannot_run_the_kernels(entered, monkeypatch):
    import kvindex_cuda

    def fail(device):
        raise ImportError("CuPy is not installed")

    config = entered()
    monkeypatch.setattr(kvindex_cuda, "ready", fail)
    with pytest.raises(ValueError, match=r"^kvindex: kernels for GPUs: CuPy is not installed$"):
        made_layers(config)


def test_all_tokens_of_prompts_use_their_context():
    """vLLM 0.26 counts the tokens that do. Newer versions do not."""
    from kvindex_adapters.vllm.gpu_latents import use_all_context

    counted, newer = SimpleNamespace(prefill_tokens_with_context=12), SimpleNamespace()
    for context in (counted, newer, None):
        use_all_context(SimpleNamespace(chunked_context=context))
    use_all_context(None)
    assert vars(counted) == {"prefill_tokens_with_context": None}
    assert not vars(newer)

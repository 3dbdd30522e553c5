"""Unsupported engines and layers raise an error while vLLM makes its layers."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm import unsupported
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.unsupported import can_pack
from tests.vllm.conftest import EVERY, settings

pytest.importorskip("vllm")


@pytest.fixture
def configured(model):
    """Make the configuration of an engine, and enter it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def enter(asked=EVERY, **options):
        made = EngineArgs(**settings(model, asked, **options)).create_engine_config()
        return set_current_vllm_config(made)

    return enter


def layer(prefix="layers.0", **options):
    from vllm.model_executor.layers.attention import Attention

    return Attention(4, 32, 1.0, 2, prefix=prefix, **options)


def test_a_configuration_of_vllm_has_what_is_asked_of_it(configured):
    from vllm.config import get_current_vllm_config

    with configured():
        assert unsupported.engine_reasons(get_current_vllm_config()) == []


@pytest.mark.skipif(not can_pack(), reason="connectors need vLLM 0.28")
def test_pages_in_host_memory_by_a_setting_of_the_cache(configured):
    """vLLM chooses the connector for it."""
    from vllm.config import get_current_vllm_config

    with configured(kv_offloading_size=1):
        config = get_current_vllm_config()
        assert unsupported.packs(config, Options())
        assert config.kv_transfer_config.kv_connector == "OffloadingConnector"


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ({"kk": 1}, {}, "kvindex: option: got 'kk', allowed is one of"),
        ({}, {"block_size": 128}, "block_size: got 128, allowed is a multiple of 256"),
        ({}, {"block_size": 320}, "block_size: got 320, allowed is a multiple of 256"),
    ],
)
def test_engines(engine, model, asked, options, said):
    with pytest.raises(ValueError, match=said):
        engine(model, asked, **options)


def test_all_settings_of_an_engine_are_in_one_error(configured):
    """vLLM has made no layer and has started no process by then."""
    connector = dict(kv_connector="NixlConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="kvindex: 4 settings are not supported:") as caught:
        configured(
            {"k": 0}, block_size=320, kv_transfer_config=connector, kv_cache_dtype="fp8_e5m2"
        )
    for name in ("k", "block_size", "kv_transfer_config", "kv_cache_dtype"):
        assert f"\n- {name}: got " in str(caught.value)


def test_what_the_user_leaves_out_is_set(configured):
    from vllm.config import get_current_vllm_config

    # the hybrid manager has one page size, so codes need a place in pages of keys and values
    for asked, tokens, disabled in ((EVERY, 256, not can_pack()), (None, 128, False)):
        with configured(asked, block_size=None):
            config = get_current_vllm_config()
            assert config.cache_config.block_size == tokens
            assert config.scheduler_config.disable_hybrid_kv_cache_manager is disabled
    with configured(block_size=512, disable_hybrid_kv_cache_manager=False):
        config = get_current_vllm_config()
        assert config.cache_config.block_size == 512
        assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(alibi_slopes=[0.5] * 4), "alibi_slopes: got "),
        (dict(kv_sharing_target_layer_name="layers.1"), "kv_sharing_target_layer_name: got layers"),
        (dict(attn_type="encoder_only"), "attention: got encoder_only"),
        (dict(per_layer_sliding_window=64), "disable_hybrid_kv_cache_manager: got False"),
    ],
)
def test_layers(stock, configured, options, said):
    with (
        configured(disable_hybrid_kv_cache_manager=False),
        pytest.raises(ValueError, match=f"kvindex: {said}"),
    ):
        layer(**options)


def test_all_reasons_of_a_layer_are_in_one_error(stock, configured):
    with configured({"rows": "host"}), pytest.raises(ValueError, match="3 settings") as caught:
        layer(alibi_slopes=[0.5] * 4, attn_type="encoder_only")
    for name in ("alibi_slopes", "attention", "rows"):
        assert f"\n- {name}: got " in str(caught.value)


def test_attention_in_both_directions(stock, configured):
    with configured():
        made = layer().impl
    metadata = SimpleNamespace(causal=False)
    with pytest.raises(ValueError, match="kvindex: attention: got attention that is not causal"):
        made.forward(None, None, None, None, None, metadata, None)


def test_rows_in_fp8(stock, configured):
    said = r"kv_cache_dtype_skip_layers: got \['0'\] with rows='host', allowed is none"
    skipped = dict(kv_cache_dtype_skip_layers=["0"])
    with pytest.raises(ValueError, match=said):
        configured({"rows": "host"}, kv_cache_dtype="fp8", **skipped)
    with configured({"rows": "host"}, kv_cache_dtype="fp8"):
        pass
    with configured(kv_cache_dtype="fp8", **skipped):
        pass


def test_latents_in_fp8(configured):
    from vllm.config import get_current_vllm_config

    with configured():
        config = get_current_vllm_config()
        model = SimpleNamespace(use_mla=True, dtype=config.model_config.dtype)
        cache = config.cache_config
        given = SimpleNamespace(quant_config=None, model_config=model, cache_config=cache)
        assert unsupported.fp8_reasons(given, Options(), "auto") == []
        (reason,) = unsupported.fp8_reasons(given, Options(), "fp8")
    assert reason.startswith("kv_cache_dtype: got fp8 for a model with latent attention (MLA)")


def test_rows_of_another_dtype(stock, configured):
    with pytest.raises(ValueError, match="kvindex: kv_cache_dtype: got fp8_e5m2, allowed is"):
        configured(kv_cache_dtype="fp8_e5m2")


def implementations():
    """Return the classes of all attention implementations of vLLM that can be imported here."""
    from vllm.v1.attention.backend import AttentionImplBase
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name, member in AttentionBackendEnum.__members__.items():
        if name.startswith(("ROCM", "XPU")):
            continue  # importing the driver's library may end the process
        with contextlib.suppress(Exception):  # a package, a device or a kernel is missing
            member.get_class().get_impl_cls()
    left = [AttentionImplBase]
    while left:
        made = left.pop()
        left += made.__subclasses__()
        yield made


def test_no_other_implementation_is_made(stock, configured):
    """This holds even if vLLM selects it, has cached it, or another plug-in has registered it."""
    from kvindex_adapters.vllm.engine import PluginAttention

    with configured(None):
        others = {kind for kind in implementations() if not issubclass(kind, PluginAttention)}
    assert {"CPUAttentionBackendImpl", "CPUMLAImpl"} < {kind.__name__ for kind in others}
    with configured():
        for kind in others:
            with pytest.raises(ValueError, match=r"kvindex: \w+: got .+, allowed is"):
                kind.__new__(kind)


def test_a_class_that_vllm_caches_serves_engines_that_ask_and_others(stock, configured):
    """vLLM's cross attention subclasses the implementation of the first engine that needs it."""
    from vllm.model_executor.layers.attention.cross_attention import (
        CrossAttention,
        create_cross_attention_backend,
    )

    for first, second in ((None, EVERY), (EVERY, None)):
        create_cross_attention_backend.cache_clear()
        for asked in (first, second):
            with configured(asked):
                if asked is None:
                    CrossAttention(4, 32, 1.0, prefix="layers.0")
                    continue
                with pytest.raises(ValueError, match="kvindex: attention: got "):
                    CrossAttention(4, 32, 1.0, prefix="layers.0")
    create_cross_attention_backend.cache_clear()


def test_every_layer_with_a_cache_is_checked(stock, configured):
    """This includes a layer without an implementation, and a subclass that changes the mask."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from kvindex_adapters.vllm.backend import SearchingBackend

    class Window(Attention):
        """A layer like vLLM's R-SWA, whose mask is not in the implementation's arguments."""

    class Indexer(AttentionLayerBase):
        """A layer like the caches of models with a trained indexer."""

        def get_attn_backend(self):
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

    for other in (Window, Indexer):
        with configured():
            config = get_current_vllm_config()
            spec = layer().get_kv_cache_spec(config)
            builder = SearchingBackend.get_builder_cls()
            builder(spec, ["layers.0"], config, "cpu")
            context = config.compilation_config.static_forward_context
            if other is Window:
                Window(4, 32, 1.0, 2, prefix="layers.1")
            else:
                context["layers.1"] = Indexer()
            with pytest.raises(ValueError, match=f"layer layers.1: got {other.__name__}, allowed"):
                builder(spec, ["layers.0"], config, "cpu")
        with configured(None):
            config = get_current_vllm_config()
            config.compilation_config.static_forward_context["layers.1"] = Indexer()
            builder(spec, ["layers.0"], config, "cpu")


@pytest.mark.parametrize("sliding", [True, False])
def test_a_model_in_which_nothing_searches(stock, configured, sliding):
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder

    from kvindex_adapters.vllm.backend import SearchingBackend

    with configured(disable_hybrid_kv_cache_manager=True):
        config = get_current_vllm_config()
        spec = layer(per_layer_sliding_window=64).get_kv_cache_spec(config)
        made = SearchingBackend.get_builder_cls() if sliding else Mamba1AttentionMetadataBuilder
        if not sliding:
            config.compilation_config.static_forward_context.clear()
        with pytest.raises(ValueError, match="kvindex: model: got no full-attention layer"):
            made(spec, ["layers.0"], config, "cpu")


def test_a_scaled_output(stock, configured):
    with configured():
        made = layer().impl
    given = (None,) * 5
    with pytest.raises(ValueError, match="kvindex: output_scale: got a scale, allowed is None"):
        made.forward(*given, SimpleNamespace(causal=True), None, torch.ones(1))


@pytest.mark.parametrize(
    ("additional", "options", "said"),
    [
        ({"kvindx": {"k": 7}}, {}, "additional_config: got 'kvindx', allowed is 'kvindex'"),
        ({"kvindex": {}}, {}, "attention_backend: got no 'KVINDEX'"),
        ({"kvindex": {}}, {"attention_backend": "CPU_ATTN"}, "attention_backend: got no"),
    ],
)
def test_options_that_are_misspelled_or_without_the_backend(configured, additional, options, said):
    with pytest.raises(ValueError, match=f"^kvindex: {said}"):
        configured(None, additional_config=additional, **options)


def test_nobody_who_does_not_ask_meets_us(stock, configured):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvindex_adapters.vllm.backend import SearchingAttention, SearchingBackend

    with configured(None):
        assert SearchingBackend.get_impl_cls() is CPUAttentionBackendImpl
    with configured():
        assert SearchingBackend.get_impl_cls() is SearchingAttention


def test_a_layer_that_reads_the_rows_of_another_reads_its_codes(stock, configured):
    with configured(EVERY, disable_hybrid_kv_cache_manager=True):
        first, second = layer(), layer(prefix="layers.1", kv_sharing_target_layer_name="layers.0")
        assert first.impl.codes is second.impl.codes is not None
        layer(prefix="layers.2", per_layer_sliding_window=64)
        name = "kv_sharing_target_layer_name: got layers.2, allowed is the name of an earlier layer"
        with pytest.raises(ValueError, match=f"kvindex: {name} with full attention"):
            layer(prefix="layers.3", kv_sharing_target_layer_name="layers.2")

"""What is refused, as vLLM makes its layers: nothing is served as if nobody had asked."""

from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm import unsupported
from tests.vllm.conftest import EVERY, settings

pytest.importorskip("vllm")


@pytest.fixture
def configured(model):
    """Makes the configuration of an engine, and enters it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def enter(asked=EVERY, **options):
        made = EngineArgs(**settings(model, asked, **options)).create_engine_config()
        return set_current_vllm_config(made)

    return enter


def layer(**options):
    from vllm.model_executor.layers.attention import Attention

    return Attention(4, 32, 1.0, 2, prefix="layers.0", **options)


def test_a_configuration_of_vllm_has_what_is_asked_of_it(configured):
    from vllm.config import get_current_vllm_config

    with configured():
        unsupported.check_engine(get_current_vllm_config())


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ({"kk": 1}, {}, "option: got 'kk', allowed is one of"),
        ({}, {"block_size": 128}, "block_size: got 128, allowed is a multiple of 256"),
        ({}, {"block_size": 320}, "block_size: got 320, allowed is a multiple of 256"),
    ],
)
def test_engines(engine, model, asked, options, said):
    with pytest.raises(ValueError, match=said):
        engine(model, asked, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(alibi_slopes=[0.5] * 4), "alibi_slopes: got "),
        (dict(kv_sharing_target_layer_name="layers.1"), "kv_sharing_target_layer_name: got"),
        (dict(attn_type="encoder_only"), "attention: got encoder_only"),
        (dict(per_layer_sliding_window=64), "disable_hybrid_kv_cache_manager: got False"),
    ],
)
def test_layers(stock, configured, options, said):
    with configured(), pytest.raises(ValueError, match=f"kvindex: {said}"):
        layer(**options)


def test_learned_sinks(stock, configured):
    with configured(), pytest.raises(ValueError, match="kvindex: sinks: got learned sinks"):
        layer(sinks=torch.zeros(4))


def test_attention_in_both_directions(stock, configured):
    with configured():
        made = layer().impl
    metadata = SimpleNamespace(causal=False)
    with pytest.raises(ValueError, match="kvindex: attention: got one that is not causal"):
        made.forward(None, None, None, None, None, metadata, None)


def test_rows_of_another_dtype(stock, configured):
    from vllm.config import get_current_vllm_config

    with configured(kv_cache_dtype="fp8"), pytest.raises(ValueError, match="got fp8, allowed is"):
        layer(cache_config=get_current_vllm_config().cache_config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CPU_MLA", "model: got multi-head latent"),
        ("TRITON_MLA", "model: got multi-head latent"),
        ("TRITON_ATTN", "attention_backend: got TRITON_ATTN, allowed is 'FLASH_ATTN'"),
        ("FLEX_ATTENTION", "attention_backend: got FLEX_ATTENTION, allowed is 'FLASH_ATTN'"),
    ],
)
def test_other_backends(stock, configured, name, said):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        pytest.skip(f"this vLLM has no {name}")
    with configured():
        backend = AttentionBackendEnum[name].get_class()
        assert backend.__module__ == "kvindex_adapters.vllm.others"
        with pytest.raises(ValueError, match=f"kvindex: {said}"):
            backend.get_impl_cls()
        assert backend is AttentionBackendEnum[name].get_class()
    with configured(None):
        assert AttentionBackendEnum[name].get_class().__module__.startswith("vllm.")


def test_a_model_of_sliding_layers_alone(stock, configured):
    from vllm.config import get_current_vllm_config

    from kvindex_adapters.vllm.backend import SearchingBackend

    with configured(disable_hybrid_kv_cache_manager=True):
        config = get_current_vllm_config()
        spec = layer(per_layer_sliding_window=64).get_kv_cache_spec(config)
        with pytest.raises(ValueError, match="kvindex: model: got no full-attention layer"):
            SearchingBackend.get_builder_cls()(spec, ["layers.0"], config, "cpu")


@pytest.mark.parametrize(
    ("additional", "options", "said"),
    [
        ({"kvindx": {"k": 7}}, {}, "additional_config: got 'kvindx', allowed is 'kvindex'"),
        ({}, {"attention_backend": "KVINDEX"}, "additional_config: got {}, allowed with"),
    ],
)
def test_options_that_are_misspelled_or_missing(stock, configured, additional, options, said):
    with (
        configured(None, additional_config=additional, **options),
        pytest.raises(ValueError, match=f"kvindex: {said}"),
    ):
        layer()


def test_nobody_who_does_not_ask_meets_us(stock, configured):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvindex_adapters.vllm.backend import SearchingAttention, SearchingBackend

    with configured(None):
        assert SearchingBackend.get_impl_cls() is CPUAttentionBackendImpl
    with configured():
        assert SearchingBackend.get_impl_cls() is SearchingAttention

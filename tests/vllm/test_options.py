"""The values that `additional_config` may have, and the settings that an engine may have."""

from types import SimpleNamespace

import pytest
import torch

from kvindex.pariskv.block_layout import Layout, SubspaceLayout
from kvindex_adapters.vllm import unsupported
from kvindex_adapters.vllm.options import Options


def test_options_and_their_defaults():
    assert Options.of({}) == Options("pariskv:sign_decoder=mean", 100, 64, 256, 2048)
    given = Options.of({"index": "pariskv:preset=fast:beta=.1", "k": 7})
    assert (given.k, given.config.beta, given.config.sampling) == (7, 0.1, "none")
    assert type(given.layout(64)) is Layout
    assert (
        Options.of({"index": "pariskv:preset=fast:sampling=none:coarse=none"}).config.coarse
        == "none"
    )
    assert type(Options.of({"index": "pariskv:preset=paper"}).layout(64)) is SubspaceLayout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pariskv", "kvindex: got 'pariskv', allowed is a mapping"),
        ({"kk": 1}, "option: got 'kk', allowed is one of .*; did you mean 'k'"),
        ({"k": 0}, "k: got 0"),
        ({"sink": -1}, "sink: got -1"),
        ({"local_window": 1.5}, "local_window: got 1.5"),
        ({"dense_below": None}, "dense_below: got None"),
        ({"index": "quest"}, "index: got 'quest', allowed is 'pariskv'"),
        ({"index": "pariskv+reuse"}, "index: got 'pariskv\\+reuse', allowed is 'pariskv'"),
        ({"index": "pariskv:bits=3"}, "option: got 'bits'"),
        ({"index": "pariskv:preset=accurate"}, "but codes are stored per block"),
        ({"index": "pariskv:center=128"}, "but codes are stored per block"),
    ],
)
def test_what_is_not_allowed_is_said(given, said):
    with pytest.raises(ValueError, match=said):
        Options.of(given)


def test_options_of_an_engine():
    assert Options.from_additional_config(
        {"kvindex": {"k": 7}, "gdn_prefill_backend": "triton"}
    ) == Options(k=7)
    assert Options.from_additional_config({"kvindex": {}}, required=True) == Options()
    for nothing in ({}, None, object(), {"index": "of another plug-in", "kv_cache": 1, 5: 5}):
        assert Options.from_additional_config(nothing) is None


@pytest.mark.parametrize(
    "key",
    ["kvindx", "kvidnex", "kv_index", "kv-index", "KVIndex", "kvindexes", "kvindex.k", "kindex"],
)
def test_keys_that_are_misspelled(key):
    for given in ({key: {"k": 7}}, {"kvindex": {}, key: {}}):
        with pytest.raises(
            ValueError, match=f"additional_config: got '{key}', allowed is 'kvindex'"
        ):
            Options.from_additional_config(given)


def test_a_backend_that_is_named_needs_options():
    with pytest.raises(ValueError, match=r"got {'indx': 1}, allowed with attention_backend="):
        Options.from_additional_config({"indx": 1}, required=True)


def engine(**other):
    """Return the fields of a `VllmConfig` that the checks read."""
    values = {
        "block_size": 256,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "attention_chunk_size": None,
        "is_hybrid": False,
        "disable_hybrid_kv_cache_manager": True,
        "speculative_config": None,
        "kv_transfer_config": None,
        **other,
    }
    part = SimpleNamespace(**values)
    names = "parallel_config", "cache_config", "model_config", "scheduler_config"
    return SimpleNamespace(**{name: part for name in names}, **values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 128),
        ("block_size", 384),
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("speculative_config", "ngram"),
        ("kv_transfer_config", "a connector"),
        ("attention_chunk_size", 8192),
    ],
)
def test_engines_that_were_not_tried_are_refused(name, value):
    unsupported.check_engine(engine())
    unsupported.check_engine(engine(block_size=512))
    with pytest.raises(ValueError, match=f"kvindex: {name}.*: got {value}, allowed is "):
        unsupported.check_engine(engine(**{name: value}))


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="model: got state of linear attention"):
        unsupported.check_engine(engine(is_hybrid=True))


def test_sliding_layers_need_one_block_table():
    unsupported.check_sliding(engine())
    with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager: got False"):
        unsupported.check_sliding(engine(disable_hybrid_kv_cache_manager=False))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("attn_type", "encoder_only", "attention: got encoder_only"),
        ("alibi_slopes", [0.5], "alibi_slopes: got "),
        ("sinks", "a tensor", "sinks: got learned sinks"),
        ("kv_sharing_target_layer_name", "layers.0", "kv_sharing_target_layer_name: got layers.0"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype: got fp8, allowed is torch.bfloat16"),
    ],
)
def test_layers_that_need_more_are_refused(option, value, said):
    plain = dict(attn_type="decoder", alibi_slopes=None, sinks=None)
    plain |= dict(kv_sharing_target_layer_name=None, kv_cache_dtype="auto", dtype=torch.bfloat16)
    unsupported.check_layer(**plain)
    unsupported.check_layer(**{**plain, "kv_cache_dtype": "bfloat16"})
    with pytest.raises(ValueError, match=f"kvindex: {said}"):
        unsupported.check_layer(**{**plain, option: value})

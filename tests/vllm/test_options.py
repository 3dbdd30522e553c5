"""The values that `additional_config` may have, and the settings that an engine may have."""

from types import SimpleNamespace

import pytest
import torch

from kvindex.layer.arguments import DEFAULT_K
from kvindex.pariskv.block_layout import Layout, SubspaceLayout
from kvindex_adapters.vllm import reports, unsupported
from kvindex_adapters.vllm.options import Options


def test_options_and_their_defaults():
    assert Options.of({}) == Options("pariskv:sign_decoder=mean", DEFAULT_K, 64, 256, "auto")
    given = Options.of({"index": "pariskv:preset=fast:beta=.1", "k": 7})
    assert (given.k, given.config.beta, given.config.sampling) == (7, 0.1, "none")
    assert type(given.layout(64)) is Layout
    assert (
        Options.of({"index": "pariskv:preset=fast:sampling=none:coarse=none"}).config.coarse
        == "none"
    )
    assert type(Options.of({"index": "pariskv:preset=paper"}).layout(64)) is SubspaceLayout


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, DEFAULT_K),
        ({"k": 512}, 512),
        ({"k": "auto"}, 100),
        ({"error": 0.1}, 100),
        ({"k": 512, "error": 0.05}, 100),
        ({"k": 50, "error": 0.1}, 50),
    ],
)
def test_the_rows_with_which_the_time_of_a_search_is_estimated(given, rows):
    assert Options.of(given).usual_rows == rows


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


def engine(additional=None, backend="KVINDEX", **other):
    """Return the fields of a `VllmConfig` that the checks read."""
    values = {
        "backend": backend and SimpleNamespace(name=backend),
        "backend_per_kind": {},
        "block_size": 256,
        "cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [],
        "quant_config": None,
        "dtype": torch.bfloat16,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "is_moe": False,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "attention_chunk_size": None,
        "is_hybrid": False,
        "get_sliding_window": lambda: None,
        "use_mla": False,
        "hf_text_config": SimpleNamespace(),
        "kv_sharing_fast_prefill": False,
        "disable_hybrid_kv_cache_manager": True,
        "speculative_config": None,
        "kv_transfer_config": None,
        "use_ubatching": False,
        "additional_config": {} if additional is None else additional,
        "pass_config": SimpleNamespace(fuse_rope_kvcache_cat_mla=False),
        "static_forward_context": {},
        **other,
    }
    part = SimpleNamespace(**values)
    names = "attention", "parallel", "cache", "model", "scheduler", "compilation"
    return SimpleNamespace(**{f"{name}_config": part for name in names}, **values)


def connector(name, module=None, **extra):
    """Return the fields of a `KVTransferConfig` that the checks read."""
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra
    )


def test_options_of_an_engine():
    given = {"kvindex": {"k": 7}, "gdn_prefill_backend": "triton"}
    assert Options.of_engine(engine(given)) == Options(k=7)
    for nothing in ({}, None, object(), {"index": "of another plug-in", "kv_cache": 1, 5: 5}):
        assert Options.of_engine(engine(nothing)) == Options()
        assert Options.of_engine(engine(nothing, backend=None)) is None
        assert Options.of_engine(engine(nothing, backend="FLASH_ATTN")) is None


@pytest.mark.parametrize(
    "key",
    ["kvindx", "kvidnex", "kv_index", "kv-index", "KVIndex", "kvindexes", "kvindex.k", "kindex"],
)
def test_keys_that_are_misspelled(key):
    for given in ({key: {"k": 7}}, {"kvindex": {}, key: {}}):
        for backend in ("KVINDEX", None):
            with pytest.raises(
                ValueError, match=f"additional_config: got '{key}', allowed is 'kvindex'"
            ):
                Options.of_engine(engine(given, backend))


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN"])
def test_options_without_the_backend(backend):
    with pytest.raises(ValueError, match=r'attention_backend: .* allowed is "KVINDEX"'):
        Options.of_engine(engine({"kvindex": {}}, backend))


PER_HEAD = {"strategy": "attn_head"}

DRAFT = SimpleNamespace(method="eagle", num_speculative_tokens=3, attention_backend=None)

REFUSED = [
    ({"block_size": 128}, "block_size: got 128, allowed is a multiple of 256; leave out"),
    ({"block_size": 384}, "block_size: got 384"),
    (
        {"decode_context_parallel_size": 2},
        "decode_context_parallel_size: got 2, allowed is 1; leave out",
    ),
    ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size: got 2"),
    (
        {"speculative_config": SimpleNamespace(method="eagle3")},
        "speculative_config: got the method eagle3, allowed is one of the methods ngram, ",
    ),
    (
        {"kv_transfer_config": connector("OffloadingConnector")},
        "kv_transfer_config: got a connector with this version of vLLM, in which codes have pages "
        "of their own, allowed is vLLM 0.28 or newer; or leave out",
    ),
    (
        {"attention_chunk_size": 8192, "block_size": 768},
        "block_size: got 768, allowed is a divisor of 8192",
    ),
    ({"is_hybrid": True}, "model: got state of linear attention"),
    ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill: got True, allowed is False"),
    (
        {
            "cache_dtype": "fp8",
            "kv_cache_dtype_skip_layers": ["0", "5"],
            "additional": {"kvindex": {"rows": "host"}},
        },
        "kv_cache_dtype_skip_layers: got ['0', '5'] with rows='host', allowed is none, "
        "because rows on the host have one dtype in all layers; leave out",
    ),
    (
        {"cache_dtype": "fp8", "quant_config": SimpleNamespace(kv_cache_scheme=PER_HEAD)},
        "kv_cache_dtype: got fp8 with a scale for each head, allowed is bfloat16",
    ),
    ({"cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: got fp8_e5m2, allowed is torch.bfloat16"),
    (
        {"backend_per_kind": {"full_attention": SimpleNamespace(name="KVINDEX")}},
        "backend_per_kind: got {'full_attention': 'KVINDEX'}, allowed is None",
    ),
    ({"additional": {"kvindex": {"k": 0}}}, "k: got 0"),
    ({"additional": {"kvindx": {}}}, "additional_config: got 'kvindx'"),
]


@pytest.fixture
def separate(monkeypatch):
    """Codes have pages of their own, as with vLLM before 0.28, on a GPU."""
    monkeypatch.setattr(unsupported, "on_a_cpu", lambda: False)
    monkeypatch.setattr(unsupported, "can_pack", lambda: False)


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize(("setting", "said"), REFUSED)
def test_engines_that_are_not_supported(setting, said):
    ngram = SimpleNamespace(method="ngram")
    others = engine(block_size=512), engine(cache_dtype="bfloat16"), engine(cache_dtype="fp8")
    skipped = engine(cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])
    host = engine({"kvindex": {"rows": "host"}}, cache_dtype="fp8")
    for fine in (engine(), engine(speculative_config=ngram), *others, skipped, host):
        assert unsupported.engine_reasons(fine) == []
    (reason,) = unsupported.engine_reasons(engine(**setting))
    assert said in reason
    if "additional" not in setting:  # without the backend, nothing is checked
        assert unsupported.engine_reasons(engine(backend=None, **setting)) == []


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize(
    ("asked", "setting", "said"),
    [
        ({"dense_below": 2048}, {}, "dense_below=2048, allowed is False, or dense_below='auto'"),
        ({"rows": "host"}, {}, "rows='host', allowed is False, or rows='device'"),
        ({}, {"use_ubatching": True}, "use_ubatching, allowed is False, or use_ubatching=False"),
        (
            {},
            {"data_parallel_size": 2, "is_moe": True},
            "data_parallel_size=2 for a model with experts, allowed is False, or "
            "data_parallel_size=1",
        ),
    ],
)
def test_two_graphs_are_not_supported_with_all_settings(asked, setting, said):
    given = {"kvindex": {"dense_graphs": True}}
    assert unsupported.engine_reasons(engine(given)) == []
    (reason,) = unsupported.engine_reasons(
        engine({"kvindex": {"dense_graphs": True, **asked}}, **setting)
    )
    assert reason == f"dense_graphs: got True with {said}"
    auto = engine({"kvindex": asked}, **setting)
    assert unsupported.engine_reasons(auto) == []
    assert not unsupported.has_two_graphs(auto, Options.of_engine(auto))


def test_engines_without_experts_choose_a_graph_for_themselves():
    two = engine(data_parallel_size=2)
    assert unsupported.has_two_graphs(two, Options())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"runner_type": "pooling"}, "prefill: got 'sparse' for the runner 'pooling', allowed is"),
        ({"prefix_match_unit": 64}, "prefix_match_unit: got 64, allowed is None or a multiple of"),
        ({"use_ubatching": True}, "use_ubatching: got True, allowed is False with prefill="),
        (
            {"kv_transfer_config": connector("ExampleConnector")},
            "kv_transfer_config: got a connector with prefill='sparse', allowed is prefill='dense'",
        ),
        (
            {"speculative_config": DRAFT},
            "speculative_config: got the method eagle with prefill='sparse', allowed is the method",
        ),
    ],
)
def test_settings_that_sparse_prompts_do_not_support(monkeypatch, setting, said):
    for name in ("can_pack", "names_runner", "can_align", "on_a_cpu"):
        monkeypatch.setattr(unsupported, name, lambda: True)
    sparse = {"kvindex": {"prefill": "sparse"}}
    room = dict(max_num_seqs=8, max_num_batched_tokens=2048, long_prefill_token_threshold=0)
    fine = dict(runner_type="generate", prefix_match_unit=None, **room)
    assert unsupported.engine_reasons(engine(sparse, **fine)) == []
    (reason,) = unsupported.engine_reasons(engine(sparse, **fine | setting))
    assert reason.startswith(said)
    monkeypatch.setattr(unsupported, "can_align", lambda: False)
    (reason,) = unsupported.engine_reasons(engine(sparse, **fine))
    assert reason.startswith("prefill: got 'sparse' with this version of vLLM, whose scheduler")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: got 2, allowed is 1 with a draft"),
        ({"is_hybrid": True}, "speculative_config: got the method eagle for an engine whose codes"),
        (
            {"kv_transfer_config": connector("ExampleConnector")},
            "speculative_config: got the method eagle for an engine whose codes are in the pages",
        ),
    ],
)
def test_settings_that_draft_models_do_not_support(monkeypatch, setting, said):
    for name in ("can_pack", "names_runner", "on_a_cpu"):
        monkeypatch.setattr(unsupported, name, lambda: True)
    assert unsupported.engine_reasons(engine(speculative_config=DRAFT)) == []
    (reason,) = unsupported.engine_reasons(engine(speculative_config=DRAFT, **setting))
    assert reason.startswith(said)
    ngram = SimpleNamespace(method="ngram")
    assert unsupported.engine_reasons(engine(speculative_config=ngram, **setting)) == []


@pytest.mark.usefixtures("separate")
def test_all_reasons_are_in_one_error():
    everything = {}
    for setting, _ in REFUSED:
        everything |= setting
    everything["additional"] = {"kvindx": {}, "kvindex": {"k": 0, "kk": 1}}
    reasons = unsupported.engine_reasons(engine(**everything))
    assert len(reasons) == 12
    options = {"k": 0, "kk": 1, "rows": "disk"}
    assert len(unsupported.engine_reasons(engine({"kvindex": options}))) == 3
    with pytest.raises(ValueError, match="kvindex: 12 settings are not supported:\n- ") as caught:
        unsupported.refuse(*reasons)
    assert reports.split(str(caught.value)) == reasons
    with pytest.raises(ValueError, match=r"^kvindex: one reason$"):
        unsupported.refuse("one reason", "one reason")
    unsupported.refuse()


def test_codes_are_packed_where_vllm_needs_pages_of_one_size(monkeypatch):
    monkeypatch.setattr(unsupported, "can_pack", lambda: True)
    sliding = dict(get_sliding_window=lambda: 64, disable_hybrid_kv_cache_manager=False)
    chunked = dict(attention_chunk_size=512, disable_hybrid_kv_cache_manager=False)
    for setting, packed in (
        ({}, False),
        ({"disable_hybrid_kv_cache_manager": False}, False),
        ({"is_hybrid": True}, True),
        ({"use_mla": True}, True),
        (sliding, True),
        (chunked, True),
        (chunked | {"disable_hybrid_kv_cache_manager": True}, False),
        (sliding | {"disable_hybrid_kv_cache_manager": True}, False),
    ):
        assert unsupported.packs(engine(**setting), Options()) is packed
        assert not unsupported.packs(engine(**setting), Options(rows="host"))
    assert unsupported.engine_reasons(engine(is_hybrid=True)) == []
    (reason,) = unsupported.engine_reasons(engine({"kvindex": {"rows": "host"}}, is_hybrid=True))
    assert "with rows='host', allowed is rows='device'" in reason


def test_connectors_that_are_supported(monkeypatch):
    for name in ("can_pack", "names_runner"):
        monkeypatch.setattr(unsupported, name, lambda: True)
    known = "ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"
    both = connector("MultiConnector", connectors=[{"kv_connector": name} for name in known[:2]])
    for given in (None, connector(None), both, *map(connector, known)):
        setting = dict(kv_transfer_config=given)
        assert unsupported.engine_reasons(engine(**setting)) == []
        packed = given is not None and given.kv_connector is not None
        assert unsupported.packs(engine(**setting), Options()) is packed
    for asked, more, said in (
        ({"rows": "host"}, {}, "with rows='host', allowed is rows='device', because connectors"),
        ({}, {"use_ubatching": True}, "with use_ubatching, allowed is use_ubatching=False"),
    ):
        given = engine({"kvindex": asked}, kv_transfer_config=both, **more)
        (reason,) = unsupported.engine_reasons(given)
        assert reason.startswith(f"kv_transfer_config: got a connector {said}")
        assert reason.endswith("; or leave out --kv-transfer-config and --kv-offloading-size")
    parts = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]
    for given, name in (
        (connector("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (connector("ExampleConnector", "my.module"), "my.module.ExampleConnector"),
        (connector("MultiConnector", "my.module"), "my.module.MultiConnector"),
        (connector("MultiConnector", connectors=parts), "NixlConnector"),
    ):
        (reason,) = unsupported.engine_reasons(engine(kv_transfer_config=given))
        allowed = f"one of {', '.join(known)}, or MultiConnector with these, because others are not"
        said = f"kv_transfer_config: got the connector {name}, allowed is {allowed} tested"
        assert reason.startswith(said)
    monkeypatch.setattr(unsupported, "names_runner", lambda: False)
    (reason,) = unsupported.engine_reasons(engine(kv_transfer_config=both))
    assert "allowed is vLLM 0.28 or newer" in reason


def test_latents_are_searched_on_a_cpu_in_pages_with_codes(monkeypatch):
    monkeypatch.setattr(unsupported, "can_pack", lambda: True)
    monkeypatch.setattr(unsupported, "on_a_cpu", lambda: True)
    assert unsupported.engine_reasons(engine(use_mla=True)) == []
    indexer = SimpleNamespace(index_topk=2048)
    (reason,) = unsupported.engine_reasons(engine(use_mla=True, hf_text_config=indexer))
    assert "with a trained indexer, which selects the rows (index_topk=2048), allowed" in reason
    assert unsupported.engine_reasons(engine(hf_text_config=indexer)) == []
    for asked, said in (
        ({"k": "auto"}, "k: got 'auto', allowed is a number for multi-head latent attention, beca"),
        (
            {"error": 0.2},
            "error: got 0.2, allowed is None for multi-head latent attention, because",
        ),
    ):
        (reason,) = unsupported.engine_reasons(engine({"kvindex": asked}, use_mla=True))
        assert reason.startswith(said)
        assert unsupported.engine_reasons(engine({"kvindex": asked})) == []
    (reason,) = unsupported.engine_reasons(engine(use_mla=True, block_size=16))
    assert reason.startswith("block_size: got 16, allowed is a multiple of 256")
    monkeypatch.setattr(unsupported, "can_pack", lambda: False)
    (reason,) = unsupported.engine_reasons(engine(use_mla=True))
    assert "latent attention on a CPU, allowed is vLLM 0.28 or newer" in reason


@pytest.mark.parametrize("packed", [False, True])
def test_latents_are_searched_on_a_gpu_by_each_version(monkeypatch, packed):
    monkeypatch.setattr(unsupported, "can_pack", lambda: packed)
    monkeypatch.setattr(unsupported, "on_a_cpu", lambda: False)
    assert unsupported.engine_reasons(engine(use_mla=True)) == []
    ngram = SimpleNamespace(method="ngram", num_speculative_tokens=2, attention_backend=None)
    assert unsupported.engine_reasons(engine(use_mla=True, speculative_config=ngram)) == []
    for asked, more, said in (
        ({"rows": "host"}, {}, "rows: got 'host' in a model with multi-head latent attention"),
        ({"dense_graphs": True}, {}, "dense_graphs: got True in a model with multi-head latent"),
        ({"k": "auto"}, {}, "k: got 'auto', allowed is a number for multi-head latent attention"),
        ({}, {"cache_dtype": "fp8"}, "kv_cache_dtype: got fp8 for a model with latent attention"),
        (
            {},
            {"speculative_config": SimpleNamespace(**vars(ngram) | {"method": "mtp"})},
            "speculative_config: got the method mtp in a model with multi-head latent attention",
        ),
    ):
        reasons = unsupported.engine_reasons(engine({"kvindex": asked}, use_mla=True, **more))
        assert any(reason.startswith(said) for reason in reasons)
    fused = dict(pass_config=SimpleNamespace(fuse_rope_kvcache_cat_mla=True))
    reasons = unsupported.engine_reasons(engine(use_mla=True, **fused))
    assert len(reasons) == packed  # only pages with codes have rows at other places
    assert all(one.startswith("fuse_rope_kvcache_cat_mla: got True") for one in reasons)


def test_sliding_layers_need_one_block_table_or_packed_codes(monkeypatch):
    monkeypatch.setattr(unsupported, "can_pack", lambda: False)
    assert unsupported.sliding_reasons(engine(), Options()) == []
    manager = dict(disable_hybrid_kv_cache_manager=False)
    for other in ({}, {"get_sliding_window": lambda: 64}):
        (reason,) = unsupported.sliding_reasons(engine(**manager, **other), Options())
        assert reason.startswith("disable_hybrid_kv_cache_manager: got False")
    monkeypatch.setattr(unsupported, "can_pack", lambda: True)
    assert unsupported.sliding_reasons(engine(**manager, **other), Options()) == []


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("attn_type", "encoder_only", "attention: got encoder_only"),
        ("alibi_slopes", [0.5], "alibi_slopes: got "),
        ("kv_cache_dtype", "int8", "kv_cache_dtype: got int8, allowed is torch.bfloat16"),
    ],
)
def test_layers_that_need_more_are_refused(option, value, said):
    plain = dict(attn_type="decoder", alibi_slopes=None)
    plain |= dict(kv_cache_dtype="auto", dtype=torch.bfloat16)
    assert unsupported.layer_reasons(**plain) == []
    assert unsupported.layer_reasons(**{**plain, "kv_cache_dtype": "bfloat16"}) == []
    (reason,) = unsupported.layer_reasons(**{**plain, option: value})
    assert reason.startswith(said)

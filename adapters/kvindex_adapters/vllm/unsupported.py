"""Checks for engines and layers that are not supported.

Functions whose names end in `_reasons` return one line for each setting that is not supported, with
the value that was found and the values that are allowed. `refuse` reports all of them in one
ValueError, before vLLM generates the first token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.layer.arguments import check_sparse
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm import reports
from kvindex_adapters.vllm.costs import AUTO
from kvindex_adapters.vllm.fp8 import NAMES
from kvindex_adapters.vllm.options import BACKEND, Options
from kvindex_adapters.vllm.reading import ROOM

MOST_WIDE = 256
"""Largest head dimension of the GPU kernels for sparse attention of prompts."""

DRAFT_MODELS = "draft_model", "eagle", "mtp"
"""Methods of speculative decoding with a draft model that are supported."""

CONNECTORS = "ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"
"""KV connectors of vLLM that are tested. They copy whole pages, whatever these contain."""

CONNECTOR_OF_SEVERAL = "MultiConnector"
"""KV connector of vLLM that consists of other connectors."""

ALIGN = "_mamba_block_aligned_split"
"""Method of vLLM's scheduler that shortens a chunk of a prompt. It exists for linear attention."""


def can_align() -> bool:
    """Return True if this version of vLLM lets the plug-in shorten the chunks of a prompt, and says
    which model runner it uses."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return ALIGN in vars(Scheduler) and names_runner()


def names_runner() -> bool:
    """Return True if the configuration of this version of vLLM says which model runner it uses."""
    from vllm.config import VllmConfig

    return "use_v2_model_runner" in vars(VllmConfig)


def can_pack() -> bool:
    """Return True if this version of vLLM lets a backend add codes to the pages of keys and
    values."""
    from vllm.v1.attention.backend import AttentionBackend

    return "customize_spec" in vars(AttentionBackend)


def on_a_cpu() -> bool:
    """Return True if vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def packs(config: Any, options: Options) -> bool:
    """Return True if the codes of an engine's layers are in the pages of their keys and values.

    This is the case for models with multi-head latent attention, and if vLLM needs pages of one
    size: for models with linear attention, and for models with sliding windows or chunked
    attention, unless vLLM's hybrid KV cache manager is disabled. It is also the case with a KV
    connector, which knows one cache of each attention layer.

    Args:
        config: The engine's `VllmConfig`.
        options: Options of the plug-in.
    """
    model, disabled = config.model_config, config.scheduler_config.disable_hybrid_kv_cache_manager
    windows = model.get_sliding_window() is not None or model.attention_chunk_size is not None
    kinds = model.use_mla or model.is_hybrid or (windows and not disabled)
    needed = bool(kinds) or has_connector(config)
    return needed and options.rows == "device" and can_pack()


def has_connector(config: Any) -> bool:
    """Return True if an engine has a KV connector.

    Args:
        config: The engine's `VllmConfig`.
    """
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector is not None


def refuse(*reasons: str) -> None:
    """Raise ValueError with all reasons why an engine or a layer is not supported.

    In a worker process, the reasons are also passed to the process that started the engine, which
    raises the same error.

    Args:
        *reasons: One line each. Without a reason, nothing happens.
    """
    if not reasons:
        return
    found = reports.joined(reasons)
    reports.add(reasons)
    raise ValueError(found)


def engine_reasons(config: Any) -> list[str]:
    """Return the reasons why an engine cannot use kvindex. Without a reason, the list is empty.

    Args:
        config: The engine's `VllmConfig`, with the backend "KVINDEX" or with options of the
            plug-in.
    """
    attention, model = config.attention_config, config.model_config
    reasons: list[str] = []
    options: Options | None = Options()
    try:
        options = Options.of_engine(config)
        if options is None:
            return []
    except ValueError as error:
        reasons += reports.split(str(error))
    named = {kind: backend.name for kind, backend in attention.backend_per_kind.items()}
    reasons += _reasons(
        (
            "backend_per_kind",
            named,
            not named,
            f'None; attention_backend="{BACKEND}" already leaves sliding-window layers to vLLM',
        )
    )
    if model is None:
        return reasons
    assert options is not None
    reasons += _setting_reasons(config) + _model_reasons(config, options)
    reasons += _draft_reasons(config, options) + _connector_reasons(config, options)
    reasons += fp8_reasons(config, options, config.cache_config.cache_dtype)
    reasons += _graph_reasons(config, options) if options.dense_graphs is True else []
    return reasons + (_sparse_engine_reasons(config, options) if options.reading.sparse else [])


def _setting_reasons(config: Any) -> list[str]:
    """Return the reasons that are settings of the engine."""
    parallel, cache = config.parallel_config, config.cache_config
    block, dtype = cache.block_size, config.model_config.dtype
    chosen = config.model_config.is_hybrid  # vLLM chooses the size, a multiple of 256
    chunk = config.model_config.attention_chunk_size
    divides = chunk is None or (block is not None and chunk % block == 0)
    return _reasons(
        (
            "block_size",
            block,
            chosen or (block is not None and block % BLOCK == 0),
            f"a multiple of {BLOCK}; leave out block_size (--block-size) to get {BLOCK}",
        ),
        (
            "block_size",
            block,
            divides,
            f"a divisor of {chunk}, because tokens of this model attend to chunks of {chunk} "
            "tokens, and a chunk must have whole blocks",
        ),
        *(
            (name, value, value == 1, f"1; leave out {name} (--{name.replace('_', '-')})")
            for name, value in (
                ("decode_context_parallel_size", parallel.decode_context_parallel_size),
                ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
            )
        ),
        (
            "speculative_config",
            f"the method {_method(config)}",
            _method(config) in (None, "ngram", *DRAFT_MODELS),
            f"one of the methods ngram, {', '.join(DRAFT_MODELS)}, because others are not tested; "
            "or leave out --speculative-config",
        ),
        (
            "kv_sharing_fast_prefill",
            True,
            not cache.kv_sharing_fast_prefill,
            "False; leave out --kv-sharing-fast-prefill",
        ),
        (
            "kv_cache_dtype",
            cache.cache_dtype,
            stores(cache.cache_dtype, dtype),
            _caches(dtype),
        ),
    )


def _draft_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons that concern a draft model."""
    if not has_draft_model(config):
        return []
    backend = config.speculative_config.attention_backend
    pipeline = config.parallel_config.pipeline_parallel_size
    return _reasons(
        (
            "speculative_config",
            f"attention_backend={backend}",
            backend is None,
            "None, because a draft model uses vLLM's own attention",
        ),
        (
            "speculative_config",
            f"the method {_method(config)} for an engine whose codes are in the pages of its keys "
            "(as with a KV connector)",
            not packs(config, options),
            "the method 'ngram' for such an engine",
        ),
        (
            "speculative_config",
            f"the method {_method(config)} with prefill='sparse'",
            not options.reading.sparse,
            "the method 'ngram' with prefill='sparse', or prefill='dense'",
        ),
        (
            "pipeline_parallel_size",
            pipeline,
            pipeline == 1,
            "1 with a draft model",
        ),
    )


def _connector_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons that concern a KV connector."""
    if not has_connector(config):
        return []
    without = "or leave out --kv-transfer-config and --kv-offloading-size"
    known = ", ".join(CONNECTORS)
    return _reasons(
        *(
            (
                "kv_transfer_config",
                f"the connector {name}",
                name in CONNECTORS,
                f"one of {known}, or {CONNECTOR_OF_SEVERAL} with these, because others are not "
                f"tested with pages that contain codes after keys and values; {without}",
            )
            for name in _connectors(config.kv_transfer_config)
        ),
        (
            "kv_transfer_config",
            "a connector with this version of vLLM, in which codes have pages of their own",
            can_pack() and names_runner(),
            f"vLLM 0.28 or newer; {without}",
        ),
        (
            "kv_transfer_config",
            f"a connector with rows={options.rows!r}",
            options.rows == "device",
            f"rows='device', because connectors copy vLLM's pages, which then have no rows; "
            f"{without}",
        ),
        (
            "kv_transfer_config",
            "a connector with prefill='sparse'",
            not options.reading.sparse,
            f"prefill='dense', because a connector may load what another engine has read with full "
            f"attention; {without}",
        ),
        (
            "kv_transfer_config",
            "a connector with use_ubatching",
            not config.parallel_config.use_ubatching,
            f"use_ubatching=False; {without}",
        ),
    )


def _connectors(transfer: Any) -> list[str]:
    """Return the names of the connectors of a `KVTransferConfig`. A connector from a module that
    does not belong to vLLM has the name of the module in front."""

    def name(connector: str, module: str | None) -> str:
        return f"{module}.{connector}" if module else connector

    if transfer.kv_connector != CONNECTOR_OF_SEVERAL or transfer.kv_connector_module_path:
        return [name(transfer.kv_connector, transfer.kv_connector_module_path)]
    return [
        name(str(one.get("kv_connector")), one.get("kv_connector_module_path"))
        for one in transfer.kv_connector_extra_config.get("connectors", [])
    ]


def fp8_reasons(config: Any, options: Options, kv_cache_dtype: str) -> list[str]:
    """Return the reasons why an engine or a layer cannot store keys and values in FP8.

    A checkpoint may choose FP8 itself. vLLM then changes the dtype of the cache before it
    constructs layers (ModelOpt), or while it constructs them (compressed-tensors).

    Args:
        config: The engine's `VllmConfig`.
        options: Options of the plug-in.
        kv_cache_dtype: vLLM's name of the dtype of the cache. Other dtypes have no reasons.
    """
    if kv_cache_dtype not in NAMES:
        return []
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype in ("float16", "bfloat16"):
        plain = f"{dtype}, the model's (--kv-cache-dtype {dtype})"
    else:  # vLLM has no name for this dtype of a cache
        plain = "auto; leave out --kv-cache-dtype, with a checkpoint that does not choose FP8"
    quantized = config.quant_config
    scheme = (None if quantized is None else vars(quantized).get("kv_cache_scheme")) or {}
    skipped = config.cache_config.kv_cache_dtype_skip_layers
    return _reasons(
        (
            "kv_cache_dtype",
            f"{kv_cache_dtype} for a model with latent attention (MLA)",
            not model.use_mla,
            plain,
        ),
        (
            "kv_cache_dtype_skip_layers",
            f"{skipped} with rows='host'",
            options.rows == "device" or not skipped,
            "none, because rows on the host have one dtype in all layers; leave out "
            "--kv-cache-dtype-skip-layers, or rows='device'",
        ),
        (
            "kv_cache_dtype",
            f"{kv_cache_dtype} with a scale for each head",
            scheme.get("strategy") != "attn_head",
            f"{plain}, or a checkpoint with one scale for all heads of a layer",
        ),
    )


def has_draft_model(config: Any) -> bool:
    """Return True if an engine uses a draft model that the plug-in supports."""
    return _method(config) in DRAFT_MODELS


def _model_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons that are properties of the model's architecture."""
    model, other = config.model_config, f"a model without it; use vLLM without {BACKEND}"
    return _latent_reasons(config, options) + _reasons(
        (
            "model",
            f"state of linear attention in addition to the KV cache, with rows={options.rows!r}",
            not model.is_hybrid or packs(config, options),
            f"rows='device' and vLLM 0.28 or newer for such a model, or {other}",
        ),
    )


def has_two_graphs(config: Any, options: Options) -> bool:
    """Return True if an engine captures two CUDA graphs for each batch size (see `two_graphs`)."""
    if options.dense_graphs == AUTO:
        return not config.model_config.use_mla and not _graph_reasons(config, options)
    return options.dense_graphs is True


def _graph_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons why an engine cannot have two CUDA graphs for each batch size.

    With data parallelism, each engine would choose a graph for its own batch. But engines of a
    model with experts exchange data inside of the graphs, so all must replay the same one.
    """
    engines = config.parallel_config.data_parallel_size
    wanted = (
        (
            options.dense_below == AUTO,
            f"dense_below={options.dense_below!r}",
            f"dense_below={AUTO!r}",
        ),
        (options.rows == "device", f"rows={options.rows!r}", "rows='device'"),
        (not config.parallel_config.use_ubatching, "use_ubatching", "use_ubatching=False"),
        (
            engines == 1 or not config.model_config.is_moe,
            f"data_parallel_size={engines} for a model with experts",
            "data_parallel_size=1",
        ),
    )
    return _reasons(
        *(
            ("dense_graphs", f"True with {got}", fine, f"False, or {need}")
            for fine, got, need in wanted
        )
    )


def _sparse_engine_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons why an engine cannot read prompts with sparse attention."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    unit, threshold = cache.prefix_match_unit, scheduler.long_prefill_token_threshold
    drafted = config.speculative_config and config.speculative_config.num_speculative_tokens
    decoded = scheduler.max_num_seqs * (1 + (drafted or 0))
    room = scheduler.max_num_batched_tokens
    return _reasons(
        ("prefill", "'sparse' with rows='host'", options.rows == "device", "'dense'"),
        (
            "prefill",
            "'sparse' for a model with latent attention (MLA)",
            not model.use_mla,
            "'dense'",
        ),
        (
            "prefill",
            f"'sparse' for the runner {model.runner_type!r}",
            model.runner_type == "generate",
            "'dense' for a model that generates no tokens",
        ),
        (
            "prefill",
            "'sparse' with this version of vLLM, whose scheduler cannot divide prompts at "
            "multiples of a block",
            can_align(),
            "'dense'",
        ),
        (
            "prefix_match_unit",
            unit,
            unit is None or unit % BLOCK == 0,
            f"None or a multiple of {BLOCK} with prefill='sparse'",
        ),
        (
            "max_num_batched_tokens",
            room,
            room >= decoded + ROOM,
            f"at least {decoded + ROOM} with prefill='sparse', so that a step has room for the "
            f"decode steps of {scheduler.max_num_seqs} sequences (max_num_seqs) and {ROOM} tokens "
            "of a prompt",
        ),
        (
            "long_prefill_token_threshold",
            threshold,
            not 0 < threshold < ROOM,
            f"0 or at least {ROOM} with prefill='sparse'",
        ),
        (
            "use_ubatching",
            True,
            not config.parallel_config.use_ubatching,
            "False with prefill='sparse'",
        ),
    )


def sparse_reasons(geometry: Geometry, sinks: Tensor | None) -> list[str]:
    """Return the reason why the prompts of a full-attention layer cannot be read with sparse
    attention, in a list.

    Args:
        geometry: Geometry of the layer.
        sinks: Logits of the learned sinks, or None.
    """
    try:
        check_sparse(geometry)
    except ValueError as error:
        return [str(error)]
    wide = max(geometry.head_dim, geometry.value_dim)
    return _reasons(
        ("prefill", "'sparse' for a layer with learned sinks", sinks is None, "'dense'"),
        (
            "prefill",
            f"'sparse' for a head dimension of {wide} on a GPU",
            geometry.device.type == "cpu" or wide <= MOST_WIDE,
            f"'dense', or a head dimension of at most {MOST_WIDE}",
        ),
    )


def row_reasons(config: Any, options: Options, *, shared: bool) -> list[str]:
    """Return the reasons why searches of a layer on a GPU cannot choose the number of rows. The
    list is empty if each search retrieves `k` rows.

    Args:
        config: The engine's `VllmConfig`.
        options: Options of the plug-in.
        shared: Whether the layer reads the keys and values of an earlier layer.
    """
    if options.allowed_error is None:
        return []
    chosen = "k", "'auto'", "a number"
    if options.k != "auto":
        chosen = "error", str(options.error), "None"
    name, value, other = chosen
    return _reasons(
        (
            name,
            f"{value} in a model whose layers share keys and values",
            not shared,
            f"{other} on a GPU for such a model, because both layers would have one limit",
        ),
        (
            "use_ubatching",
            True,
            not config.parallel_config.use_ubatching,
            f"False with {name}={value} on a GPU, because micro-batches would have other limits",
        ),
    )


def _latent_reasons(config: Any, options: Options) -> list[str]:
    """Return the reasons why decode steps cannot search latents in a model with multi-head latent
    attention. The list is empty for any other model, and if they can."""
    model, latents = config.model_config, "in a model with multi-head latent attention"
    if not model.use_mla:
        return []
    rows = vars(model.hf_text_config).get("index_topk")
    reasons = _reasons(
        (
            "model",
            "multi-head latent attention with a trained indexer, which selects the rows "
            f"(index_topk={rows})",
            rows is None,
            f"a model without such an indexer; use vLLM without {BACKEND}",
        ),
        (
            "model",
            "multi-head latent attention on a CPU",
            can_pack() or not on_a_cpu(),
            "vLLM 0.28 or newer for such a model, because codes are in the pages of latents; or a "
            "GPU",
        ),
    )
    if reasons:
        return reasons[:1]
    why = (
        "for multi-head latent attention, because vLLM computes prompts without latents, so that "
        "the size of outputs over latents is not known"
    )
    return _reasons(
        ("k", repr(options.k), options.k != "auto", f"a number {why}"),
        ("error", options.error, options.error is None, f"None {why}"),
        (
            "rows",
            f"{options.rows!r} {latents}",
            on_a_cpu() or options.rows == "device",
            "'device', because the kernels that write rows to host memory do not write latents",
        ),
        (
            "dense_graphs",
            f"True {latents}",
            options.dense_graphs is not True,
            "False, because the fused step also computes full attention of short sequences",
        ),
        (
            "speculative_config",
            f"the method {_method(config)} {latents}",
            not has_draft_model(config),
            "the method 'ngram', because others are not tested; or leave out --speculative-config",
        ),
        (
            "fuse_rope_kvcache_cat_mla",
            f"True {latents} on a GPU",
            on_a_cpu() or not packs(config, options) or not _fuses_latents(config),
            "False in the pass_config of compilation_config, because codes are in the pages of "
            "latents, which this fused operation would overwrite",
        ),
    )


def _fuses_latents(config: Any) -> bool:
    """Return True if vLLM writes latents with an operation of its own, which does not call the
    attention layer."""
    compilation = config.compilation_config
    return bool(vars(compilation.pass_config).get("fuse_rope_kvcache_cat_mla"))


def layer_reasons(
    *,
    attn_type: str,
    alibi_slopes: object,
    kv_cache_dtype: str,
    dtype: torch.dtype,
) -> list[str]:
    """Return the reasons why a full-attention layer cannot search: it computes more than a softmax
    over keys and values.

    Args:
        attn_type: vLLM's type of attention.
        alibi_slopes: Slopes of ALiBi, or None.
        kv_cache_dtype: vLLM's name of the dtype of the cache.
        dtype: Dtype of the model.
    """
    other = f"a model without it; use vLLM without {BACKEND}"
    return _reasons(
        ("attention", attn_type, attn_type == "decoder", f"'decoder': {other}"),
        ("alibi_slopes", "slopes that change scores by position", alibi_slopes is None, other),
        (
            "kv_cache_dtype",
            kv_cache_dtype,
            stores(kv_cache_dtype, dtype),
            _caches(dtype),
        ),
    )


def sliding_reasons(config: Any, options: Options) -> list[str]:
    """Return a reason if vLLM would use a separate block table for sliding-window layers, although
    codes have pages of their own."""
    disabled = config.scheduler_config.disable_hybrid_kv_cache_manager
    return _reasons(
        (
            "disable_hybrid_kv_cache_manager",
            disabled,
            bool(disabled) or packs(config, options),
            "True for this model with sliding-window or chunked layers, because vLLM's hybrid "
            "manager would make the pages of keys and of codes equal in size; set the option "
            "(--disable-hybrid-kv-cache-manager)",
        )
    )


def kernel_reasons(why: str | None, local_window: int, drafted: int = 0) -> list[str]:
    """Return the reasons why the GPU kernels cannot search.

    Args:
        why: The reason why the kernels do not support the index, or None.
        local_window: The option `local_window`.
        drafted: Largest number of drafted tokens that a step verifies.
    """
    return _reasons(
        (
            "local_window",
            local_window,
            local_window > drafted,
            f"at least {drafted + 1} on a GPU, because the blocks that a step of up to "
            f"{drafted + 1} tokens fills are encoded after this step",
        )
    ) + ([] if why is None else [f"index: on a GPU: {why}"])


def host_reasons(config: Any, *, sliding: bool, shared: bool = False) -> list[str]:
    """Return the reasons why a layer's keys and values cannot be stored in host memory.

    Args:
        config: The engine's `VllmConfig`.
        sliding: Whether the layer has a sliding window or chunked attention.
        shared: Whether the layer reads the keys and values of an earlier layer.
    """
    cache, parallel = config.cache_config, config.parallel_config
    sleeps = config.model_config.enable_sleep_mode
    unit = cache.prefix_match_unit
    one = "None or the block size, because vLLM copies pages without the rows in host memory"
    return _reasons(
        (
            "rows",
            "host in a model with sliding-window or chunked layers",
            not sliding,
            "device for such a model, because its pages would differ in size",
        ),
        (
            "rows",
            "host in a model whose layers share keys and values",
            not shared,
            "device for such a model",
        ),
        ("prefix_match_unit", unit, unit in (None, cache.block_size), one),
        ("use_ubatching", True, not parallel.use_ubatching, "False with rows='host'"),
        ("enable_sleep_mode", True, not sleeps, "False with rows='host'"),
        (
            "speculative_config",
            f"the method {_method(config)}",
            config.speculative_config is None,
            "None with rows='host'; leave out --speculative-config",
        ),
    )


def device_reasons(rows: str) -> list[str]:
    """Return a reason if rows are in host memory although there is no GPU."""
    return _reasons(
        (
            "rows",
            rows,
            rows == "device",
            "'device' on a CPU, where host and device memory are the same",
        )
    )


def check_causal(causal: object) -> None:
    """Check that the attention is causal.

    Args:
        causal: The field `causal` of vLLM's metadata.

    Raises:
        ValueError: `causal` is not True.
    """
    _refuse(("attention", "attention that is not causal", causal is True, "causal attention"))


def check_output(*scales: Tensor | None) -> None:
    """Check that the output is not quantized inside the attention.

    Args:
        *scales: The scales that vLLM passes for a quantized output.

    Raises:
        ValueError: A scale is not None.
    """
    given = any(scale is not None for scale in scales)
    _refuse(("output_scale", "a scale", not given, "None (no fused quantization)"))


def refuse_capture(captured: bool) -> None:
    """Raise ValueError if `captured` is True.

    This means that vLLM captures a CUDA graph before it has allocated its KV cache pages. Such a
    graph would not write keys and values.
    """
    own = "vLLM's default splitting_ops, with which only graphs of decode steps write rows"
    _refuse(
        ("rows", "host, with a graph that is captured before there are pages", not captured, own)
    )


def refuse_memory(error: MemoryError) -> None:
    """Raise ValueError because host memory is too small for the rows of all pages."""
    reason = (
        f"{error}; set num_gpu_blocks_override (--num-gpu-blocks-override) to a smaller number of "
        "pages"
    )
    try:
        refuse(reason)
    except ValueError as found:
        raise found from error


def refuse_implementation(name: str) -> None:
    """Raise ValueError for an attention implementation that does not belong to the plug-in.

    Args:
        name: Name of the class.

    Raises:
        ValueError: Always.
    """
    ours = f"the plug-in's: a model whose layers have no attention of their own, or no {BACKEND}"
    _refuse(("attention", name, False, ours))


def refuse_layer(name: str, kind: str) -> None:
    """Raise ValueError for a layer that has a cache, but does not belong to the plug-in.

    Args:
        name: Name of the layer.
        kind: Class name of the layer.

    Raises:
        ValueError: Always.
    """
    ours = f"full or sliding attention over keys and values; use vLLM without {BACKEND}"
    _refuse((f"layer {name}", kind, False, ours))


def refuse_dense_model() -> None:
    """Raise ValueError for a model in which no layer has an index."""
    _refuse(
        (
            "model",
            "no full-attention layer",
            False,
            f"a model with at least one full-attention layer; use vLLM without {BACKEND}",
        )
    )


def stores(kv_cache_dtype: str, dtype: torch.dtype) -> bool:
    """Return True if the plug-in can read keys and values that a cache stores in this dtype.

    Args:
        kv_cache_dtype: vLLM's name of the dtype of the cache.
        dtype: Dtype of the model.
    """
    return kv_cache_dtype in ("auto", str(dtype).removeprefix("torch."), *NAMES)


def _caches(dtype: torch.dtype) -> str:
    """Describe the supported dtypes of a cache."""
    return (
        f"{dtype}, the model's, auto, or {' and '.join(NAMES)} (--kv-cache-dtype fp8); leave out "
        "kv_cache_dtype to get auto"
    )


def _method(config: Any) -> str | None:
    """Return the name of an engine's method of speculative decoding, or None."""
    speculative = config.speculative_config
    return None if speculative is None else str(speculative.method)


def _reasons(*limits: tuple[str, object, bool, str]) -> list[str]:
    """Return a line for each tuple `(name, got, fits, allowed)` in which `fits` is False."""
    return [
        f"{name}: got {got}, allowed is {allowed}"
        for name, got, fits, allowed in limits
        if not fits
    ]


def _refuse(*limits: Any) -> None:
    """Raise ValueError with all tuples `(name, got, fits, allowed)` in which `fits` is False."""
    refuse(*_reasons(*limits))

"""Checks that reject unsupported engines and layers with a clear message before the first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.pariskv.block_layout import BLOCK


def check_engine(config: Any) -> None:
    """Raise ValueError if a `VllmConfig` has a setting that is not supported."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    block, sizes = cache.block_size, f"a multiple of {BLOCK} (block_size={BLOCK})"
    _refuse(
        ("block_size", block, block is not None and block % BLOCK == 0, sizes),
        *(
            (name, value, value == 1, "1: no other value is tested")
            for name, value in (
                ("tensor_parallel_size", parallel.tensor_parallel_size),
                ("pipeline_parallel_size", parallel.pipeline_parallel_size),
                ("decode_context_parallel_size", parallel.decode_context_parallel_size),
                ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
            )
        ),
        *(
            (name, value, value is None, "None: it is not tested")
            for name, value in (
                ("speculative_config", config.speculative_config),
                ("kv_transfer_config", config.kv_transfer_config),
                ("attention_chunk_size of the model", model.attention_chunk_size),
            )
        ),
        (
            "model",
            "state of linear attention in addition to the KV cache",
            not model.is_hybrid,
            "one without it: vLLM would store both in pages of one size",
        ),
    )


def check_layer(
    *,
    attn_type: str,
    alibi_slopes: object,
    sinks: object,
    kv_sharing_target_layer_name: str | None,
    kv_cache_dtype: str,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError if a full-attention layer needs more than a softmax over its rows.

    Args:
        attn_type: vLLM's type of attention.
        alibi_slopes: Slopes of ALiBi, or None.
        sinks: Learned attention sinks, or None.
        kv_sharing_target_layer_name: Layer whose cache this one uses, or None.
        kv_cache_dtype: Data type of the cache, as vLLM names it.
        dtype: Data type of the model.
    """
    plain = kv_cache_dtype in ("auto", str(dtype).removeprefix("torch."))
    _refuse(
        ("attention", attn_type, attn_type == "decoder", "'decoder'"),
        ("alibi_slopes", alibi_slopes, alibi_slopes is None, "None: scores have no positions"),
        ("sinks", "learned sinks in the softmax", sinks is None, "None"),
        (
            "kv_sharing_target_layer_name",
            kv_sharing_target_layer_name,
            kv_sharing_target_layer_name is None,
            "None: a layer with rows of its own",
        ),
        ("kv_cache_dtype", kv_cache_dtype, plain, f"{dtype}, the model's, or auto"),
    )


def check_sliding(config: Any) -> None:
    """Raise ValueError if vLLM would give sliding-window layers a block table of their own."""
    disabled = config.scheduler_config.disable_hybrid_kv_cache_manager
    _refuse(
        (
            "disable_hybrid_kv_cache_manager",
            disabled,
            bool(disabled),
            "True for a model with sliding layers: pages of rows and of codes differ in size, and "
            "vLLM's hybrid manager would make them alike",
        )
    )


def check_searched(why: str | None, local_window: int) -> None:
    """Raise ValueError if no fused step supports the index, or the local window is empty.

    Args:
        why: The reason why no fused step supports the index, or None.
        local_window: The option `local_window`.
    """
    if why is not None:
        raise ValueError(f"kvindex: on a GPU: {why}")
    _refuse(
        (
            "local_window",
            local_window,
            local_window > 0,
            "1 or more on a GPU: a block is encoded after the step that fills it",
        )
    )


def check_host(config: Any, *, sliding: bool) -> None:
    """Raise ValueError if the layer's rows cannot be stored on the host."""
    cache, parallel = config.cache_config, config.parallel_config
    sleeps = config.model_config.enable_sleep_mode
    unit = cache.prefix_match_unit
    one = "None or the block size: a page that is copied inside vLLM would lack its rows"
    _refuse(
        (
            "rows",
            "host, and sliding layers",
            not sliding,
            "device for a model with sliding layers: their pages would be of another size",
        ),
        ("prefix_match_unit", unit, unit in (None, cache.block_size), one),
        ("use_ubatching", True, not parallel.use_ubatching, "False where rows lie on the host"),
        ("enable_sleep_mode", True, not sleeps, "False where rows lie on the host"),
    )


def check_device(rows: str) -> None:
    """Raise ValueError on a CPU unless rows are stored in vLLM's pages."""
    _refuse(("rows", rows, rows == "device", "'device' on a CPU: there is one memory"))


def check_causal(causal: object) -> None:
    """Check that the attention is causal.

    Args:
        causal: The field of vLLM's metadata.

    Raises:
        ValueError: It is not True.
    """
    _refuse(("attention", "one that is not causal", causal is True, "causal"))


def check_output(*scales: Tensor | None) -> None:
    """Check that the output is not quantized inside the attention.

    Args:
        *scales: The scales that vLLM passes for a quantized output.

    Raises:
        ValueError: A scale is not None.
    """
    given = any(scale is not None for scale in scales)
    _refuse(("output_scale", "one", not given, "None: no fused quantization"))


def refuse_capture(captured: bool) -> None:
    """Raise ValueError if a graph is captured before there are pages, because it would write no
    rows."""
    own = "vLLM's own splitting_ops, with which only graphs of decode steps write rows"
    _refuse(("rows", "host, and a graph captured before there are pages", not captured, own))


def refuse_memory(error: MemoryError) -> None:
    """Raise ValueError because the host lacks memory for the rows of all pages."""
    raise ValueError(
        f"kvindex: {error}; set num_gpu_blocks_override (--num-gpu-blocks-override), so that vLLM "
        "makes fewer pages"
    ) from error


def refuse_latent(name: str) -> None:
    """Raise ValueError for multi-head latent attention."""
    _refuse(
        (
            "model",
            f"multi-head latent attention ({name})",
            False,
            "one whose cache holds keys that an index can search",
        )
    )


def refuse_implementation(name: str) -> None:
    """Raise the error for an attention implementation that does not search.

    Args:
        name: The name of the class.

    Raises:
        ValueError: Always.
    """
    ours = "that of attention_backend CPU_ATTN on a CPU, or FLASH_ATTN on a GPU"
    _refuse(("attention", name, False, ours))


def refuse_layer(name: str, kind: str) -> None:
    """Raise the error for a layer that has a cache, but no attention of the plug-in.

    Args:
        name: The name of the layer.
        kind: The name of its class.

    Raises:
        ValueError: Always.
    """
    _refuse((f"layer {name}", kind, False, "full or sliding attention over keys and values"))


def refuse_dense_model() -> None:
    """Raise ValueError for a model in which no layer searches."""
    _refuse(("model", "no full-attention layer", False, "one with at least one of them to index"))


def _refuse(*limits: tuple[str, object, bool, str]) -> None:
    """Raise ValueError for the first entry `(name, got, fits, allowed)` whose `fits` is False."""
    for name, got, fits, allowed in limits:
        if not fits:
            raise ValueError(f"kvindex: {name}: got {got}, allowed is {allowed}")

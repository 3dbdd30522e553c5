"""Checks for engines and layers that are not supported. They raise ValueError before vLLM
generates the first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.pariskv.block_layout import BLOCK


def check_engine(config: Any) -> None:
    """Raise ValueError if an engine's `VllmConfig` has an unsupported setting."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    block, sizes = cache.block_size, f"a multiple of {BLOCK} (block_size={BLOCK})"
    _refuse(
        ("block_size", block, block is not None and block % BLOCK == 0, sizes),
        *(
            (name, value, value == 1, "1 (other values are not tested)")
            for name, value in (
                ("tensor_parallel_size", parallel.tensor_parallel_size),
                ("pipeline_parallel_size", parallel.pipeline_parallel_size),
                ("decode_context_parallel_size", parallel.decode_context_parallel_size),
                ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
            )
        ),
        *(
            (name, value, value is None, "None (other values are not tested)")
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
            "a model without such state, because vLLM would store both in pages of one size",
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
    """Raise ValueError if a full-attention layer computes more than a softmax over its own keys and
    values.

    Args:
        attn_type: vLLM's type of attention.
        alibi_slopes: Slopes of ALiBi, or None.
        sinks: Learned attention sinks, or None.
        kv_sharing_target_layer_name: Name of the layer whose cache this layer uses, or None.
        kv_cache_dtype: vLLM's name of the dtype of the cache.
        dtype: Dtype of the model.
    """
    plain = kv_cache_dtype in ("auto", str(dtype).removeprefix("torch."))
    _refuse(
        ("attention", attn_type, attn_type == "decoder", "'decoder'"),
        (
            "alibi_slopes",
            alibi_slopes,
            alibi_slopes is None,
            "None, because scores of an index do not depend on positions",
        ),
        ("sinks", "learned sinks in the softmax", sinks is None, "None"),
        (
            "kv_sharing_target_layer_name",
            kv_sharing_target_layer_name,
            kv_sharing_target_layer_name is None,
            "None, because each layer must have its own keys and values",
        ),
        ("kv_cache_dtype", kv_cache_dtype, plain, f"{dtype}, the model's, or auto"),
    )


def check_sliding(config: Any) -> None:
    """Raise ValueError if vLLM would use a separate block table for sliding-window layers."""
    disabled = config.scheduler_config.disable_hybrid_kv_cache_manager
    _refuse(
        (
            "disable_hybrid_kv_cache_manager",
            disabled,
            bool(disabled),
            "True for a model with sliding-window layers, because vLLM's hybrid manager would make "
            "the pages of keys and of codes equal in size",
        )
    )


def check_searched(why: str | None, local_window: int) -> None:
    """Raise ValueError if the GPU kernels do not support the index, or the local window is empty.

    Args:
        why: The reason why the kernels do not support the index, or None.
        local_window: The option `local_window`.
    """
    if why is not None:
        raise ValueError(f"kvindex: on a GPU: {why}")
    _refuse(
        (
            "local_window",
            local_window,
            local_window > 0,
            "at least 1 on a GPU, because a block is encoded only after the step that fills it",
        )
    )


def check_host(config: Any, *, sliding: bool) -> None:
    """Raise ValueError if the layer's keys and values cannot be stored in host memory."""
    cache, parallel = config.cache_config, config.parallel_config
    sleeps = config.model_config.enable_sleep_mode
    unit = cache.prefix_match_unit
    one = "None or the block size, because vLLM copies pages without the rows in host memory"
    _refuse(
        (
            "rows",
            "host in a model with sliding-window layers",
            not sliding,
            "device for such a model, because its pages would differ in size",
        ),
        ("prefix_match_unit", unit, unit in (None, cache.block_size), one),
        ("use_ubatching", True, not parallel.use_ubatching, "False with rows='host'"),
        ("enable_sleep_mode", True, not sleeps, "False with rows='host'"),
    )


def check_device(rows: str) -> None:
    """Raise ValueError on a CPU unless `rows` is "device"."""
    _refuse(
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
    raise ValueError(
        f"kvindex: {error}; set num_gpu_blocks_override (--num-gpu-blocks-override) to a smaller "
        "number of pages"
    ) from error


def refuse_latent(name: str) -> None:
    """Raise ValueError for a model with multi-head latent attention."""
    _refuse(
        (
            "model",
            f"multi-head latent attention ({name})",
            False,
            "a model whose cache contains keys, which an index can search",
        )
    )


def refuse_implementation(name: str) -> None:
    """Raise ValueError for an attention implementation that does not belong to the plug-in.

    Args:
        name: Name of the class.

    Raises:
        ValueError: Always.
    """
    ours = "attention_backend CPU_ATTN on a CPU, or FLASH_ATTN on a GPU"
    _refuse(("attention", name, False, ours))


def refuse_layer(name: str, kind: str) -> None:
    """Raise ValueError for a layer that has a cache, but does not belong to the plug-in.

    Args:
        name: Name of the layer.
        kind: Class name of the layer.

    Raises:
        ValueError: Always.
    """
    _refuse((f"layer {name}", kind, False, "full or sliding attention over keys and values"))


def refuse_dense_model() -> None:
    """Raise ValueError for a model in which no layer has an index."""
    _refuse(
        (
            "model",
            "no full-attention layer",
            False,
            "a model with at least one full-attention layer",
        )
    )


def _refuse(*limits: tuple[str, object, bool, str]) -> None:
    """Raise ValueError for the first tuple `(name, got, fits, allowed)` in which `fits` is
    False."""
    for name, got, fits, allowed in limits:
        if not fits:
            raise ValueError(f"kvindex: {name}: got {got}, allowed is {allowed}")

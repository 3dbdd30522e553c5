"""`SearchingFlashAttention`: a vLLM attention layer on a GPU, with an index for decode steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

import kvindex_cuda
from kvindex.core.geometry import Geometry
from kvindex.core.transaction import in_plain_torch
from kvindex_adapters.vllm import two_graphs
from kvindex_adapters.vllm.costs import FALLBACK, limit_of
from kvindex_adapters.vllm.engine import (
    CodesLayer,
    PluginAttention,
    check_window,
    drafted_tokens,
    geometry_of,
    keep_no_rows,
    options_of,
)
from kvindex_adapters.vllm.fp8 import NAMES, Scales, query_scale
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.packed import codes_layer
from kvindex_adapters.vllm.request_hooks import install_runner
from kvindex_adapters.vllm.unsupported import (
    check_output,
    has_connector,
    has_two_graphs,
    host_reasons,
    kernel_reasons,
    refuse,
    refuse_capture,
    row_reasons,
    sparse_reasons,
)
from kvindex_cuda.pariskv.steps.host_rows import HostRows
from kvindex_cuda.pariskv.steps.paged import unserved


class LocalFlashAttention(PluginAttention, FlashAttentionImpl):
    """vLLM's own attention, for layers in which tokens attend only to tokens of the same chunk."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = get_current_vllm_config()
        options = options_of(config)
        if options is not None:
            host = options.rows == "host"
            check_window(config, *(host_reasons(config, sliding=True) if host else ()))


class SearchingFlashAttention(PluginAttention, FlashAttentionImpl):
    """vLLM's FlashAttention layer, in which decode steps search an index if the layer has full
    attention."""

    supports_quant_query_input: bool

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = get_current_vllm_config()
        self.host: HostRows | None = None
        self.fp8 = False
        self._quantizer: QuantFP8 | None = None
        self.geometry: Geometry | None = None
        options = options_of(config)
        if options is None:
            return
        device = torch.device(config.device_config.device or "cuda")

        def more(geometry: Geometry | None) -> list[str]:
            shared = self.kv_sharing_target_layer_name is not None
            reasons = row_reasons(config, options, shared=shared)
            if options.rows == "host":
                reasons += host_reasons(config, sliding=geometry is None, shared=shared)
            if geometry is not None:
                try:
                    kvindex_cuda.ready(geometry.device)
                except (ImportError, RuntimeError, ValueError) as error:
                    return [*reasons, f"kernels for GPUs: {error}"]
                # use torch's normal defaults here, because vLLM sets the default dtype and device
                # to those of the model while it constructs layers
                why = in_plain_torch(unserved)(options.config, geometry)
                reasons += kernel_reasons(why, options.local_window, drafted_tokens(config))
                if options.reading.sparse:
                    reasons += sparse_reasons(geometry, named.get("sinks"))
            return reasons

        self.geometry = geometry_of(config, device, more, *given, **named)
        if self.geometry is None:
            return
        self.fp8 = self.kv_cache_dtype in NAMES
        if self.fp8 and self.supports_quant_query_input:
            # vLLM would pass queries in FP8, but searches need those of the model. vLLM asks for
            # this while it constructs the layer.
            self._quantizer = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
            self.supports_quant_query_input = False
        record_bytes = options.layout(self.geometry.head_dim).head_bytes
        target = self.kv_sharing_target_layer_name
        self.codes = codes_layer(config, self.geometry, record_bytes, target)
        self.context = config.compilation_config.static_forward_context
        self.codes.mixed = options.rows == "host"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else FALLBACK
        given = options.dense_below, self.geometry, name
        self.codes.limit = limit_of(
            *given, batches=options.rows == "device", k=options.usual_rows, fp8=self.fp8
        )
        if options.rows == "host":
            self.host = self.codes.host = host_of(config, self.geometry, options, fp8=self.fp8)
            self.number = self.host.add_layer()
        if options.reading.sparse or has_connector(config):
            install_runner(config)
        if has_two_graphs(config, options):
            two_graphs.install()
        self.options = options

    def explain(self) -> str:
        """Return a description of the layer: its index, and the sequences that use the index."""
        reading = self.options.reading
        others = "FlashAttention computes all other batches"
        if reading.sparse:
            others = f"FlashAttention computes other tokens; {reading.explain()}"
        if self.options.rows == "host":
            others = (
                "FlashAttention computes all other tokens, over copies of rows on the host; "
                f"{self.options.cached_rows} rows per KV head and layer stay on the device"
            )
        assert self.codes is not None  # only layers with an index are described
        text = self.options.explain(self.codes.limit)
        return f"{text}, in fused steps of batches of decoded tokens; {others}"

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of queries `[T, H, D]` of all sequences into `output`."""
        rows = self._rows(kv_cache)
        if (
            attn_metadata is None
            or self.codes is None
            or attn_metadata.searching is None
            or two_graphs.full()
        ):
            given = layer, query, key, value, rows, attn_metadata, output
            found = self.attend_whole(*given, output_scale, output_block_scale)
        else:
            check_output(output_scale, output_block_scale)
            attn_metadata.searching.attend(self, layer, query, key, value, rows, output)
            found = output
        if attn_metadata is not None and self.codes is not None and attn_metadata.measuring:
            attn_metadata.measuring.measure(self, value, output)
        return found

    def _rows(self, kv_cache: Tensor) -> Tensor:
        """Return the part of the pages that contains keys and values.

        While vLLM measures memory, there are no pages, and `kv_cache` is empty.
        """
        if self.codes is None or kv_cache is None or kv_cache.ndim != 4:
            return kv_cache
        return self.codes.rows(kv_cache)

    def attend_whole(self, layer: Any, queries: Tensor, *given: Any) -> Tensor:
        """Compute full causal attention with vLLM's own `forward`. If it needs queries `[T, H, D]`
        in FP8, they are converted as vLLM converts them."""
        if self._quantizer is not None:
            queries, _ = self._quantizer.forward_cuda(queries.flatten(1), query_scale(layer))
            queries = queries.view(-1, self.num_heads, self.head_size)
        return super().forward(layer, queries, *given)

    def scales(self, layer: Any) -> Scales | None:
        """Return the scales of a layer whose keys and values are in FP8, otherwise None."""
        assert self.geometry is not None  # true for every layer with an index
        return Scales.of(layer, self.geometry.dtype) if self.fp8 else None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values `[T, G, D]` of new tokens, to vLLM's pages or to host memory."""
        if self.host is None:
            super().do_kv_cache_update(layer, key, value, self._rows(kv_cache), slot_mapping)
            return
        if not self.host.opened:  # vLLM's profiling run, before there are pages
            refuse_capture(key.is_cuda and torch.cuda.is_current_stream_capturing())
            return
        count = len(slot_mapping)
        self.host.write(self.number, key[:count], value[:count], slot_mapping)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the size of the layer's pages: small if keys and values are in host memory, larger if
        codes are in the same pages.

        vLLM calls this before it asks for the size of a page.
        """
        super().process_weights_after_loading(act_dtype)
        if self._quantizer is not None:
            self.supports_quant_query_input = True  # from here on, only `forward` asks for it
        if self.codes is not None:
            self.codes.join(self, self.context)
        if self.host is not None:
            mine = (part for part in self.context.values() if isinstance(part, Attention))
            keep_no_rows(next(layer for layer in mine if layer.impl is self))


def host_of(config: VllmConfig, geometry: Geometry, options: Options, *, fp8: bool) -> HostRows:
    """Return the `HostRows` object that all layers of an engine share. The first call creates
    it.

    Args:
        config: The engine's configuration.
        geometry: Geometry of a layer.
        options: Options of the plug-in.
        fp8: Whether keys and values of this layer are in FP8.
    """
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(layer, CodesLayer) and layer.host is not None:
            try:
                layer.host.check_layer(geometry, fp8=fp8)
            except ValueError as error:
                refuse(
                    f'rows: got "host" for layers that differ ({error}), allowed are layers with '
                    'keys and values of one shape and dtype; use rows="device"'
                )
            found: HostRows = layer.host
            return found
    parallel = config.parallel_config
    return HostRows(
        geometry,
        # all processes create their layers before vLLM allocates the first cache
        processes=parallel.local_world_size * max(parallel.data_parallel_size_local, 1),
        tokens=config.model_config.max_model_len,
        page_tokens=config.cache_config.block_size,
        cached=options.cached_rows,
        fp8=fp8,
    )

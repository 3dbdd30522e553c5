"""`SearchingFlashBackend`: vLLM's FlashAttention on a GPU, whose decoded tokens search.

Registered in the place of vLLM's own, which it is unless the engine asks for kvindex. Prompts,
chunks of them and mixed batches are FlashAttention's, over the same pages; a batch of decoded
tokens alone is a fused step of each layer, which vLLM captures in its graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

import kvindex_cuda
from kvindex.core.guard import in_plain_torch
from kvindex_adapters.vllm.engine import CodesLayer, geometry_of, logger, options_of
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.unsupported import check_searched, refuse_dense_model
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.pariskv.paged_step import PagedSteps, unserved


class SearchingFlashBackend(FlashAttentionBackend):
    """vLLM's own; layers search where `additional_config` has "kvindex"."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """As the base."""
        if options_of(get_current_vllm_config()) is None:
            return FlashAttentionImpl
        return SearchingFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """As the base."""
        return SearchingFlashBuilder


class SearchingFlashAttention(FlashAttentionImpl):
    """One layer: vLLM's own but for decoded tokens of a full one."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
            **others,
        )
        config = get_current_vllm_config()
        self.geometry = geometry_of(
            config,
            torch.device(config.device_config.device or "cuda"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            sliding_window=sliding_window,
            attn_type=attn_type,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            kv_cache_dtype=kv_cache_dtype,
        )
        if self.geometry is None:
            return
        options = options_of(config)
        assert options is not None  # or vLLM's own class would be here
        kvindex_cuda.ready(self.geometry.device)
        # vLLM makes layers with a model's dtype and device as torch's defaults
        why = in_plain_torch(unserved)(options.config, self.geometry)
        check_searched(why, options.local_window)
        self.codes = CodesLayer(config, num_kv_heads, options.layout(head_size).head_bytes)
        logger.info_once("kvindex: %s", explain(options))
        logger.warning_once("kvindex: steps on vLLM's pages are not yet verified on a GPU")

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
        """As the base: attention of queries `[T, H, D]` of all sequences."""
        if attn_metadata is None or self.geometry is None or attn_metadata.searching is None:
            given = layer, query, key, value, kv_cache, attn_metadata, output
            return super().forward(*given, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(
                "kvindex: output_scale: got one, allowed is None: no fused quantization"
            )
        rows = attn_metadata.searching
        rows.attend(self.codes, query, output)
        return output


class Searching:
    """Steps of the layers of one builder, for a batch of so many decoded tokens."""

    def __init__(self, steps: PagedSteps, numbers: dict[CodesLayer, int], rows: int) -> None:
        self._steps, self._numbers, self._rows = steps, numbers, rows

    def attend(self, codes: CodesLayer, queries: Tensor, output: Tensor) -> None:
        """Attention of a layer's queries `[T, H, D]`, of which the first ones are the batch's."""
        some = slice(0, self._rows)
        self._steps.attend(self._numbers[codes], queries[some], output[some])


class SearchingFlashBuilder(FlashAttentionMetadataBuilder):
    """vLLM's own, which reads the engine's tables for the layers that search."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._options = options_of(vllm_config)
        self._layers: list[Any] = []
        self._caches: list[Tensor] = []
        self._steps: PagedSteps | None = None
        if self._options is None:
            return
        context = vllm_config.compilation_config.static_forward_context
        if not any(isinstance(layer, CodesLayer) for layer in context.values()):
            refuse_dense_model()
        layers = [context[name] for name in layer_names]
        self._layers = [
            layer
            for layer in layers
            if isinstance(layer.impl, SearchingFlashAttention) and layer.impl.geometry is not None
        ]
        if self._layers:
            self.supports_update_block_table = False  # of a step there is one plan, not a copy

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """As the base: batches of decoded tokens alone are one graph."""
        if options_of(vllm_config) is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """As the base; not where layers search."""
        return False if self._layers else super().use_cascade_attention(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        """As the base."""
        common = common_attn_metadata
        rows = common.num_reqs if self._layers and common.max_query_len == 1 else 0
        metadata = super().build(common_prefix_len, common, fast_build or bool(rows))
        metadata.searching = None
        if not self._layers:
            return metadata
        if common.causal is not True:
            raise ValueError("kvindex: attention: got one that is not causal, allowed is causal")
        steps = self._opened()
        tables, slots = common.block_table_tensor, common.slot_mapping
        steps.begin(tables, common.seq_lens, slots, rows=rows)
        if rows:
            numbers = {layer.impl.codes: i for i, layer in enumerate(self._layers)}
            metadata.searching = Searching(steps, numbers, rows)
        return metadata

    @in_plain_torch
    def _opened(self) -> PagedSteps:
        """Steps over the caches that the layers have: vLLM may give them others."""
        caches = [layer.kv_cache for layer in self._layers]
        caches += [layer.impl.codes.kv_cache for layer in self._layers]
        same = len(caches) == len(self._caches)
        if same and all(new is old for new, old in zip(caches, self._caches, strict=True)):
            assert self._steps is not None
            return self._steps
        config, options = self.vllm_config, self._options
        assert options is not None  # or no layer would search
        scheduler, compilation = config.scheduler_config, config.compilation_config
        most_rows = max(scheduler.max_num_seqs, compilation.max_cudagraph_capture_size or 0)
        geometries = {layer.impl.geometry for layer in self._layers}
        if len(geometries) > 1:
            raise ValueError(f"kvindex: model: got {geometries}, allowed are layers of one shape")
        self._steps = PagedSteps(
            geometries.pop(),
            options.config,
            Pages(
                [layer.impl.codes.records for layer in self._layers], caches[: len(self._layers)]
            ),
            k=options.k,
            sink=options.sink,
            local_window=options.local_window,
            dense_below=options.dense_below,
            most_rows=most_rows,
            tokens=config.model_config.max_model_len,
            new_tokens=max(scheduler.max_num_batched_tokens, most_rows),
        )
        self._caches = caches
        return self._steps


def explain(options: Options) -> str:
    """What searches, and how, in words."""
    return (
        f"full-attention layers search by {options.index}: k={options.k} rows of sequences of at "
        f"least {options.dense_below} tokens, beside {options.sink} first and "
        f"{options.local_window} or more newest ones, in fused steps of batches of decoded tokens; "
        "all other batches are FlashAttention's"
    )

"""vLLM's GPU backend for multi-head latent attention (MLA), with an index over latents.

Decode steps run as one fused step per layer, which vLLM captures in its CUDA graphs. So do decode
steps in batches that also contain prompts, because vLLM's class for MLA separates them. vLLM
computes prompts with its own code: it projects latents to the keys and values of each head.

The classes here are derived from the common base classes of vLLM's backends for MLA, not from one
of these backends (FlashAttention's on Hopper GPUs). The backends differ in what they compute for
decode steps, and the fused step computes all of these, full attention of short sequences included.
The base classes have everything else: they write latents and read prompts. They support blocks of
256 tokens and keys of 576 coordinates on every GPU on which vLLM supports MLA.

If vLLM lets the plug-in do so (0.28 and newer), codes are in the pages of latents (see `packed`).
In vLLM 0.26 they have pages of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    CommonAttentionMetadata,
)

import kvindex_cuda
from kvindex.core.geometry import Geometry
from kvindex.core.transaction import in_plain_torch
from kvindex_adapters.vllm.costs import FALLBACK, limit_of
from kvindex_adapters.vllm.engine import (
    CodesLayer,
    PluginAttention,
    drafted_tokens,
    geometry_of,
    options_of,
)
from kvindex_adapters.vllm.gpu_batch import (
    admitting,
    are_same,
    caches_of,
    most_rows_of,
    one_by_one,
    short_prompts,
)
from kvindex_adapters.vllm.packed import codes_layer, with_heads
from kvindex_adapters.vllm.request_hooks import install_runner
from kvindex_adapters.vllm.unsupported import check_causal, has_connector, kernel_reasons
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.pariskv.steps.paged import PagedSteps, unserved


class Searching:
    """Computes the attention of the decode steps of a batch. All layers that use the same metadata
    builder of vLLM share this object.

    Args:
        steps: The fused decode steps of the layers.
        numbers: Maps the `CodesLayer` of each layer to the layer's number in `steps`.
    """

    def __init__(self, steps: PagedSteps, numbers: dict[CodesLayer, int]) -> None:
        self._steps, self._numbers = steps, numbers

    def attend(self, codes: CodesLayer, queries: Tensor, output: Tensor) -> None:
        """Compute a layer's attention of queries `[T, H, D]` into `output` `[T, H, Dv]`."""
        self._steps.attend(self._numbers[codes], queries, output)


class SearchingLatentAttention(PluginAttention, MLACommonImpl[MLACommonMetadata]):
    """One layer of multi-head latent attention on a GPU, whose decode steps search latents."""

    kv_sharing_target_layer_name = None
    """No layer reads the latents of another one."""

    codes: CodesLayer

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = get_current_vllm_config()
        options = options_of(config)
        assert options is not None  # vLLM uses this class only in engines that use kvindex
        device = torch.device(config.device_config.device or "cuda")

        def more(geometry: Geometry | None) -> list[str]:
            assert geometry is not None  # no layer of MLA has a sliding window here
            try:
                kvindex_cuda.ready(geometry.device)
            except (ImportError, RuntimeError, ValueError) as error:
                return [f"kernels for GPUs: {error}"]
            # use torch's normal defaults here, because vLLM sets the default dtype and device to
            # those of the model while it constructs layers
            why = in_plain_torch(unserved)(options.config, geometry)
            return kernel_reasons(why, options.local_window, drafted_tokens(config))

        geometry = geometry_of(config, device, more, *given, **named)
        assert geometry is not None  # no layer of MLA has a sliding window here
        self.geometry: Geometry = geometry
        record_bytes = options.layout(self.geometry.head_dim).head_bytes
        self.codes = codes_layer(config, self.geometry, record_bytes, None)
        self.codes.mixed = True
        self.context = config.compilation_config.static_forward_context
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else FALLBACK
        self.codes.limit = limit_of(options.dense_below, self.geometry, name, batches=False)
        if has_connector(config):
            install_runner(config)
        self.options = options

    def explain(self) -> str:
        """Return a description of the layer: its index, and the sequences that use the index."""
        text = self.options.explain(self.codes.limit)
        return f"{text}, in fused steps over latents; vLLM's own code computes prompts"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer larger pages if codes are in the same pages.

        vLLM calls this before it asks for the size of a page.
        """
        super().process_weights_after_loading(act_dtype)
        self.codes.join(self, self.context)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, *more: Any, **named: Any
    ) -> None:
        """Write latents `[T, r]` and rotated keys `[T, 1, Dr]` of new tokens to the pages."""
        super().do_kv_cache_update(kv_c_normed, k_pe, self._rows(kv_cache), *more, **named)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of decode steps.

        Args:
            q: Queries, `[T, H, r + Dr]`, or their two parts. vLLM has multiplied the first part
                with the matrix that projects latents to keys.
            kv_c_and_k_pe_cache: The pages of the layer. The fused steps know their addresses.
            attn_metadata: vLLM's metadata of the batch, whose first sequences are decode steps.
            layer: vLLM's layer.

        Returns:
            Outputs with latents as values, `[T, H, r]`, and None. vLLM then projects the outputs to
            the values of each head.
        """
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = queries.new_empty(*queries.shape[:2], self.geometry.value_dim)
        vars(attn_metadata)["searching"].attend(self.codes, queries, output)
        return output, None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        """Compute the attention of prompts with vLLM's own code. It reads the latents of earlier
        chunks from the pages."""
        rows = self._rows(kv_c_and_k_pe_cache)
        super().forward_mha(q, kv_c_normed, k_pe, rows, *more, **named)

    def _rows(self, kv_cache: Tensor) -> Tensor:
        """Return the part of the pages that contains latents, `[blocks, tokens, D]`.

        While vLLM measures memory, there are no pages, and `kv_cache` is empty.
        """
        if not kv_cache.numel():
            return kv_cache
        rows = self.codes.rows(kv_cache)
        return rows[:, 0] if rows.ndim == 4 else rows


def use_all_context(prefill: Any) -> None:
    """Let all tokens of prompts attend to the earlier chunks of their prompts (their context).

    vLLM 0.26 assumes that the sequences with context are the first ones, and counts the tokens of
    as many sequences. Tokens after these ignore their context. One of its two model runners
    (`VLLM_USE_V2_MODEL_RUNNER=1`, the default for DeepSeek-V2) sorts sequences by their numbers of
    new tokens, so that a sequence with context can come later.

    None stands for all tokens. A sequence without context then also merges an attention to no
    tokens, which vLLM has replaced by zeros of weight 0 (`mask_empty_context`). So its output does
    not change. Newer versions of vLLM have no such number.

    Args:
        prefill: vLLM's metadata of the prompts of a batch, or None.
    """
    context = None if prefill is None else prefill.chunked_context
    if context is not None and "prefill_tokens_with_context" in vars(context):
        context.prefill_tokens_with_context = None


class LatentsBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's common metadata builder for MLA, which also prepares the fused decode steps."""

    query_len_support = QueryLenSupport.VARLEN
    """Steps that verify drafted tokens are decode steps, however many of them each sequence has."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        self._drafted = drafted_tokens(vllm_config)
        context = vllm_config.compilation_config.static_forward_context
        self._layers: list[Any] = [context[name] for name in layer_names]
        self._caches: list[Tensor] = []
        self._steps: PagedSteps | None = None
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Return which batches can run as CUDA graphs: only batches of decode steps, or of steps
        that all verify as many drafted tokens."""
        if drafted_tokens(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build the metadata of a batch, and prepare the fused decode steps in it."""
        common, slots, shared = admitting(self._layers, common_attn_metadata)
        metadata = super().build(common_prefix_len, common, fast_build)
        use_all_context(metadata.prefill)
        check_causal(common.causal)
        count, rows = metadata.num_decodes, metadata.num_decode_tokens
        tables, lengths = common.block_table_tensor[:count], common.seq_lens[:count]
        whole = short_prompts(common)
        if whole is not None and shared is not None:
            whole |= shared
        whole = None if whole is None else whole[:count]
        if self._drafted and rows:
            decoded = replace(common, num_reqs=count, num_actual_tokens=rows)
            tables, lengths, owner = one_by_one(decoded)
            whole = None if whole is None else whole[owner]
        steps = self._opened()
        steps.begin(tables, lengths, slots, rows=rows, whole=whole)
        numbers = {layer.impl.codes: i for i, layer in enumerate(self._layers)}
        vars(metadata)["searching"] = Searching(steps, numbers)
        return metadata

    @in_plain_torch
    def _opened(self) -> PagedSteps:
        """Return the object that runs the fused decode steps of all layers.

        It is created again if vLLM has replaced the KV cache of a layer since the last call.
        """
        caches = caches_of(self._layers)
        if are_same(caches, self._caches):
            assert self._steps is not None
            return self._steps
        config = self.vllm_config
        options = options_of(config)
        assert options is not None  # an engine with an index has options
        scheduler, impl = config.scheduler_config, self._layers[0].impl
        most_rows = most_rows_of(config)
        rows = [with_heads(layer.impl.codes.rows(layer.kv_cache)) for layer in self._layers]
        self._steps = PagedSteps(
            impl.geometry,
            options.config,
            Pages([layer.impl.codes.records for layer in self._layers], rows),
            k=options.most_rows,
            sink=options.sink,
            local_window=options.local_window,
            dense_below=impl.codes.limit.dense_below,
            most_rows=most_rows,
            tokens=config.model_config.max_model_len,
            new_tokens=max(scheduler.max_num_batched_tokens, most_rows),
            loads=has_connector(config),
        )
        self._caches = caches
        return self._steps


class SearchingLatentBackend(MLACommonBackend):
    """The backend for MLA of an engine whose backend is "KVINDEX", on a GPU."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend."""
        return "KVINDEX_MLA"

    @staticmethod
    def get_impl_cls() -> type[SearchingLatentAttention]:
        """Return the attention class."""
        return SearchingLatentAttention

    @staticmethod
    def get_builder_cls() -> type[LatentsBuilder]:
        """Return the class that builds the metadata of a batch."""
        return LatentsBuilder

"""vLLM's CPU backend for multi-head latent attention (MLA), with an index over latents.

For each token, MLA caches a latent and a rotated key that all heads share. vLLM multiplies the
queries of decode steps with the matrix that projects latents to keys, so that they can be compared
with latents. For such a query there is one KV head for all query heads: its keys are the latents
and the rotated keys, and its values are the latents, which are a part of the keys.

Decode steps search an index over these keys, in plain torch. vLLM computes prompts with its own
code: it projects latents to the keys and values of each head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvindex_adapters.vllm.backend import LoadedBlocks, TorchAttention, prompts_of
from kvindex_adapters.vllm.engine import options_of
from kvindex_adapters.vllm.unsupported import check_causal


class LatentBackend(AttentionBackend):
    """Base class of backends for MLA, with an index if the engine's backend is "KVINDEX"."""

    @classmethod
    def get_impl_cls(cls) -> Any:
        """Return the attention class: vLLM's own for engines without kvindex, or the plug-in's."""
        if options_of(get_current_vllm_config()) is None:
            return super().get_impl_cls()
        return LatentAttention

    @classmethod
    def get_builder_cls(cls) -> Any:
        """Return the class that builds the metadata of a batch."""
        return searching(super().get_builder_cls())


class SearchingLatentBackend(LatentBackend, CPUMLABackend):
    """vLLM's MLA backend for all CPUs, with an index if the engine's backend is "KVINDEX"."""


@cache
def searching(builder: Any) -> Any:
    """Return a subclass of a metadata builder for MLA, for steps that search.

    In engines that use kvindex, steps that verify drafted tokens are decode steps. The metadata
    also get the list `prompts`: whether each sequence is still reading its prompt.

    Args:
        builder: vLLM's class of the builder.
    """

    class Searching(builder):
        """A metadata builder for MLA."""

        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
        ) -> None:
            if options_of(vllm_config) is not None:
                self.query_len_support = QueryLenSupport.VARLEN
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self._loaded = LoadedBlocks(vllm_config, layer_names)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            """Build the metadata of a batch."""
            common = self._loaded.begin(common_attn_metadata)
            metadata = super().build(common_prefix_len, common, fast_build)
            vars(metadata)["prompts"] = prompts_of(common)
            return metadata

    return Searching


class LatentAttention(TorchAttention, CPUMLAImpl):
    """One layer of multi-head latent attention on a CPU, whose decode steps search latents."""

    kv_sharing_target_layer_name = None
    """No layer reads the latents of another one."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.add_index(None, *given, **named)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the backend of the layer, before vLLM asks it for the size of a page."""
        super().process_weights_after_loading(act_dtype)
        self.set_backend()

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *more: Any,
    ) -> None:
        """Write latents `[T, r]` and rotated keys `[T, 1, Dr]` to the pages, and encode each
        segment of 256 tokens that they complete.

        vLLM 0.33 passes one more argument, which concerns pages in FP8.
        """
        if self.codes is None:
            given = kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *more
            super().do_kv_cache_update(*given)
        elif kv_cache.numel():  # while vLLM measures memory, there are no pages
            keys = torch.cat([kv_c_normed[:, None], k_pe.view(len(k_pe), 1, -1)], dim=-1)
            self.write(kv_cache, slot_mapping.flatten(), keys.to(kv_cache.dtype), None)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of decode steps.

        Args:
            q: Queries, `[T, H, r + Dr]`, or their two parts. vLLM has multiplied the first part
                with the matrix that projects latents to keys.
            kv_c_and_k_pe_cache: The pages of the layer.
            attn_metadata: vLLM's metadata of the batch, whose first sequences are decode steps.
            layer: vLLM's layer.

        Returns:
            Outputs with latents as values, `[T, H, r]`, and None. vLLM then projects the outputs to
            the values of each head.
        """
        if self.codes is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        check_causal(attn_metadata.causal)
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = queries.new_zeros(*queries.shape[:2], self.kv_lora_rank)
        decode = attn_metadata.decode
        self.paged.attend_batch(
            queries,
            output,
            self.sequences(kv_c_and_k_pe_cache, decode.block_table, decode.seq_lens),
            attn_metadata.query_start_loc.tolist(),
            prompts=vars(attn_metadata).get("prompts", []),
        )
        return output, None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Compute the attention of prompts with vLLM's own code.

        If earlier chunks of a prompt are in the pages, vLLM needs pages that contain latents alone.
        So the pages of this prompt are copied without their codes.
        """
        if self.codes is not None and attn_metadata.prefill.chunked_context is not None:
            rows = self.codes.rows(kv_c_and_k_pe_cache)[:, 0]
            kv_c_and_k_pe_cache, table = copied(rows, attn_metadata.prefill)
            prefill = replace(attn_metadata.prefill, block_table=table)
            attn_metadata = replace(attn_metadata, prefill=prefill)
        given = q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output
        super().forward_mha(*given, output_scale)


def copied(rows: Tensor, prefill: Any) -> tuple[Tensor, Tensor]:
    """Copy the pages that contain earlier tokens of the prompts of a batch.

    Args:
        rows: Pages of latents, `[blocks, tokens, D]`.
        prefill: vLLM's metadata of the prompts.

    Returns:
        The copied pages, and a block table that refers to them.
    """
    tokens = rows.shape[1]
    longest = max(prefill.chunked_context.context_lens_list)
    table = prefill.block_table[:, : -(-longest // tokens)]
    used, places = torch.unique(table, return_inverse=True)
    return rows[used.long()], places.to(table.dtype)

"""The plug-in's GPU backend for latents in vLLM's engine on a CPU: emulated kernels, prompts by the
code of vLLM's CPU backend."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.gpu_latents import SearchingLatentAttention, SearchingLatentBackend
from kvindex_adapters.vllm.latents import copied
from tests.cuda import emulator
from tests.vllm import on_a_cpu


@contextmanager
def kernels_for_latents():
    """Put the GPU backend for latents in place of the CPU's, with emulated kernels."""
    members = registry.AttentionBackendEnum.__members__
    before = {members[name]: members[name].get_path() for name in ("CPU_MLA", "AMX_MLA")}
    for own in before:
        registry.register_backend(own, f"{__name__}.Backend")
    selector._cached_get_attn_backend.cache_clear()
    try:
        with emulator.emulated():
            yield
    finally:
        for own, path in before.items():
            registry.register_backend(own, path)
        selector._cached_get_attn_backend.cache_clear()


class Backend(SearchingLatentBackend):
    """A backend in place of CPU_MLA."""

    @staticmethod
    def get_impl_cls():
        return Attention


class Attention(SearchingLatentAttention, CPUMLAImpl):
    """vLLM's prompts on a CPU."""

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *more):
        if kv_cache.numel():
            keys = torch.cat([kv_c_normed[:, None], k_pe.view(len(k_pe), 1, -1)], dim=-1)
            slots = slot_mapping.flatten().long()
            pages.write_rows(self._rows(kv_cache)[:, None], slots, keys[: len(slots)], None)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        on_a_cpu.Attention.searched += 1
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

    def forward_mha(self, q, kv_c, k_pe, kv_cache, attn_metadata, *more, **named):
        if attn_metadata.prefill.chunked_context is not None:
            kv_cache, table = copied(self._rows(kv_cache), attn_metadata.prefill)
            prefill = replace(attn_metadata.prefill, block_table=table)
            attn_metadata = replace(attn_metadata, prefill=prefill)
        CPUMLAImpl.forward_mha(self, q, kv_c, k_pe, kv_cache, attn_metadata, *more, **named)

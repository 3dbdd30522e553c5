"""The vLLM plug-in: full-attention layers of a serving engine search their KV cache.

LLM(model, block_size=256, additional_config={"kvindex": {"index": "pariskv", "k": 100}})

vLLM finds `register` by the entry point `kvindex` of `vllm.general_plugins`
(docs/adapters/vllm.md).
"""

from __future__ import annotations


def register() -> None:
    """Tell vLLM of the backends that search; called in each of its processes, any number of times.

    They are vLLM's own, by name and in all they do, unless `additional_config` has "kvindex".
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.SearchingBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.latent.LatentBackend")
    register_backend(AttentionBackendEnum.AMX_MLA, f"{__name__}.latent.AMXLatentBackend")

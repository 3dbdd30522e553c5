"""The vLLM plug-in: full-attention layers of a serving engine search their KV cache.

LLM(model, block_size=256, additional_config={"kvindex": {"index": "pariskv", "k": 100}})

vLLM finds `register` by the entry point `kvindex` of `vllm.general_plugins`
(docs/adapters/vllm.md).
"""

from __future__ import annotations

OTHERS = (
    *("TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TURBOQUANT"),
    *("CPU_MLA", "AMX_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"),
    *("CUTLASS_MLA", "TRITON_MLA", "TOKENSPEED_MLA"),
)
"""vLLM's backends that an engine which asks for us may end up with, and that do not search."""


def register() -> None:
    """Tell vLLM of the backends that search; called in each of its processes, any number of times.

    They are vLLM's own, by name and in all they do, unless `additional_config` has "kvindex".
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.SearchingBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.gpu.SearchingFlashBackend")
    known = AttentionBackendEnum.__members__
    for name in OTHERS:
        if name in known:
            register_backend(known[name], f"{__name__}.others.{name}")

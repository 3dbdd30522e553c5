"""The vLLM plug-in: in full-attention layers, decode steps search the KV cache with an index.

LLM(model, block_size=256, additional_config={"kvindex": {"index": "pariskv", "k": 100}})

vLLM finds `register` by the entry point `kvindex` of `vllm.general_plugins`
(docs/adapters/vllm.md).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvindex.core.extras import how_to_install
from kvindex_adapters.vllm.options import BACKEND


def register() -> None:
    """Register the plug-in's attention backends. vLLM calls this in each of its processes, possibly
    several times.

    The plug-in's backends replace vLLM's own backends of the same device. For an engine without
    "kvindex" in its `additional_config`, they behave exactly like vLLM's own.

    Raises:
        ImportError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ImportError(
            "kvindex_adapters.vllm needs vLLM, which is not installed; on a GPU, install it with "
            f"pip install vllm==0.26.0; on a CPU, with {how_to_install('vllm')}"
        )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvindex_adapters.vllm.hooks import install

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.SearchingBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.gpu.SearchingFlashBackend")
    if hasattr(AttentionBackendEnum, "register"):  # vLLM 0.32 and later
        named_backend()
    install()


def named_backend() -> Any:
    """Return the member `KVINDEX` of vLLM's `AttentionBackendEnum`, and add it if it is missing.

    In a process that has not loaded the plug-in, vLLM raises an error for
    `attention_backend="KVINDEX"`.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    members = AttentionBackendEnum.__members__
    if BACKEND not in members:
        # vLLM pickles its configuration, which contains this enum member, for its worker processes.
        # These unpickle it before they load plug-ins. So unpickling calls this function, which adds
        # the member to the enum of the worker process.
        member = AttentionBackendEnum.register(BACKEND, f"{__name__}.gpu.SearchingFlashBackend")
        member.__reduce_ex__ = lambda protocol: (named_backend, ())
    return members[BACKEND]

"""The vLLM plug-in: in full-attention layers, decode steps search the KV cache with an index.

LLM(model, attention_backend="KVINDEX", additional_config={"kvindex": {"k": 256}})

The options in `additional_config` may be left out. vLLM finds `register` by the entry point
`kvindex` of `vllm.general_plugins` (docs/adapters/vllm.md).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvindex.core.extras import how_to_install
from kvindex_adapters.vllm.options import BACKEND

OWN = {
    "CPU_ATTN": "backend.SearchingBackend",
    "CPU_MLA": "latents.SearchingLatentBackend",
    "AMX_MLA": "latents_amx.SearchingAMXLatentBackend",
}
"""Name of a backend of vLLM for CPUs -> class that replaces it."""


def register() -> None:
    """Register the attention backend "KVINDEX". vLLM calls this in each of its processes, possibly
    several times.

    On a CPU, vLLM uses its own backends whatever the user asks for. So the plug-in also replaces
    the classes of these backends. In an engine without `attention_backend="KVINDEX"`, the new
    classes behave exactly like vLLM's own.

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

    members = AttentionBackendEnum.__members__
    for name, path in OWN.items():
        if name in members:
            register_backend(members[name], f"{__name__}.{path}")
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
        member = _new_member(AttentionBackendEnum, f"{__name__}.gpu.SearchingFlashBackend")
        member.__reduce_ex__ = lambda protocol: (named_backend, ())
        member.get_class = gpu_backend
    return members[BACKEND]


def gpu_backend() -> Any:
    """Return the class of the backend "KVINDEX" on a GPU: for multi-head latent attention if the
    model of the current engine has it, otherwise for attention over keys and values.

    vLLM calls this while it constructs the layers of an engine.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from kvindex_adapters.vllm.gpu_latents import SearchingLatentBackend

        return SearchingLatentBackend
    from kvindex_adapters.vllm.gpu import SearchingFlashBackend

    return SearchingFlashBackend


def _new_member(enum: Any, path: str) -> Any:
    """Add the member `KVINDEX` to vLLM's enum of backends, and return it."""
    if hasattr(enum, "register"):
        return enum.register(BACKEND, path)
    member = object.__new__(enum)  # vLLM 0.26 has no such method, so do what it does in 0.32
    member._name_, member._value_ = BACKEND, path
    setattr(enum, BACKEND, member)
    enum._member_map_[BACKEND] = enum._value2member_map_[path] = member
    enum._member_names_.append(BACKEND)
    return member

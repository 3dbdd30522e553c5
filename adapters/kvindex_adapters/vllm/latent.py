"""vLLM's backends of multi-head latent attention (MLA), which refuse an engine that asks for us.

Without them such a model would be served as if nobody had asked.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from kvindex_adapters.vllm.backend import options_of
from kvindex_adapters.vllm.unsupported import refuse_latent


class LatentBackend(CPUMLABackend):
    """vLLM's own."""

    @staticmethod
    def get_impl_cls() -> Any:
        """As the base. Raises ValueError."""
        return _unless_asked(CPUMLABackend)


class AMXLatentBackend(AMXMLABackend):
    """vLLM's own."""

    @staticmethod
    def get_impl_cls() -> Any:
        """As the base. Raises ValueError."""
        return _unless_asked(AMXMLABackend)


def _unless_asked(backend: Any) -> Any:
    if options_of(get_current_vllm_config()) is not None:
        refuse_latent(backend.get_name())
    return backend.get_impl_cls()

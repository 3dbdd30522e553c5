"""vLLM's other backends, which refuse an engine that asks for us.

Without them such a model would be served as if nobody had asked. A backend is an attribute of this
module by its name in `AttentionBackendEnum`: vLLM's own class for whoever does not ask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvindex_adapters.vllm.engine import options_of
from kvindex_adapters.vllm.unsupported import refuse_backend, refuse_latent


def __getattr__(name: str) -> Any:
    """The class of a backend. Raises AttributeError for no backend's name."""
    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    own = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    config = get_current_vllm_config_or_none()
    return own if config is None or options_of(config) is None else _refusing(name, own)


@cache
def _refusing(name: str, own: Any) -> Any:
    """The class, whose layers cannot be made."""

    def get_impl_cls() -> Any:
        refuse = refuse_latent if own.is_mla() else refuse_backend
        refuse(own.get_name())

    parts = dict(get_impl_cls=staticmethod(get_impl_cls), __module__=__name__)
    return type(name, (own,), parts)

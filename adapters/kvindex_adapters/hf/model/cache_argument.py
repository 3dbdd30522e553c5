"""The name of the argument in which transformers models take the KV cache.

The name is `past_key_values` up to transformers 5.23, and `cache` from 5.24 on. All other modules
of the adapters take the name from here, so that they work with both. Inside `attach`, users may
pass the old name to every version. Outside, newer versions accept the old name with a warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import GenerationMixin

from kvindex_adapters.common.unsupported import UnsupportedError

OLD, NEW = "past_key_values", "cache"
RENAMED = "5.24"
"""The first version of transformers that uses `NEW`."""

CACHE = next(
    name
    for name in (OLD, NEW)
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The name in the installed version, for arguments and for attributes of model outputs."""


def parameters(module: nn.Module) -> Collection[str]:
    """Return the names of the arguments of a module's forward method."""
    return inspect.signature(type(module).forward).parameters


def takes_cache(module: object) -> bool:
    """Return True if the forward method of `module` takes a KV cache."""
    return isinstance(module, nn.Module) and CACHE in parameters(module)


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the KV cache in the keyword arguments of a call, or None."""
    return kwargs.get(CACHE, kwargs.get(OLD))


def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call, with the cache under its name in this version.

    If both names are given, transformers ignores the old one, and so does this function.
    """
    if OLD not in kwargs or CACHE == OLD:
        return kwargs
    others = {name: value for name, value in kwargs.items() if name != OLD}
    return {CACHE: kwargs[OLD], **others}


def no_cache_argument(model: nn.Module, modules: Collection[object]) -> UnsupportedError:
    """Return the error for a model none of whose `modules` takes a KV cache.

    If the model's code is not that of transformers (for example, it was loaded with
    `trust_remote_code`) and uses the name of another version, the message says so.
    """
    name, version = type(model).__name__, transformers.__version__
    other = NEW if CACHE == OLD else OLD
    own = type(model).__module__.startswith("transformers.models.")  # xlm has another `cache`
    found = (isinstance(module, nn.Module) and other in parameters(module) for module in modules)
    if not own and any(found):
        limit = f">={RENAMED}" if other == NEW else f"<{RENAMED}"
        return UnsupportedError(
            f"model: got {name}, whose forward calls its KV cache {other}, but transformers "
            f"{version} calls it {CACHE}; rename the argument in the model's code, or pip install "
            f"'transformers{limit}'"
        )
    return UnsupportedError(
        f"model: got {name}, whose forward has no argument {CACHE}; allowed are decoders with a "
        "KV cache"
    )

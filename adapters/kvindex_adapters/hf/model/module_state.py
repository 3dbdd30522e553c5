"""`ModuleState`: detects changes of weights, modules and hooks since a graph was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig as Config

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module in which torch stores hooks."""

COMPILED = "_compiled_call_impl"
"""Attribute of a module that torch calls instead of its forward, if the module is compiled."""

READ = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes of torch's modules that a forward reads. All are mappings."""

OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has and that only torch reads."""

WEIGHTS_ALONE = (nn.Linear, nn.Embedding)
"""Classes of modules whose attributes, except the weights, only repeat the weights' shapes."""


class ModuleState:
    """The state that a module's forward reads, to compare it with the state at a later time.

    This state consists of the attributes of all submodules, those of their configurations, and the
    addresses of tensors. An attribute counts as unchanged if it is the same object; for a mapping,
    its values must be the same objects. The comparison runs before each decode step, so it makes
    only few Python calls per submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        mappings = [vars(part)[name] for part in parts for name in READ]
        self._own: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        for part in parts:
            if type(part) not in WEIGHTS_ALONE:
                names = [name for name in vars(part) if name not in OF_TORCH]
                mappings += [one for name in names if isinstance(one := vars(part)[name], dict)]
                get = itemgetter("training", *names)  # a tuple, because there are several names
                self._own.append((get, vars(part)))
        configs = [
            config for part in parts if isinstance(config := vars(part).get("config"), Config)
        ]
        mappings += {id(config): vars(config) for config in configs}.values()
        self._sized = [*map(vars, parts), *mappings]
        self._mappings = [one for one in mappings if one]
        self._tensors = [*module.parameters(), *module.buffers()]
        self._before = self._addresses(), self._sizes(), list(self._values())
        self.hooked = _first(parts, lambda own: any(own[name] for name in HOOKS))
        """Class of a module with a hook, which a replay would not call, or None."""
        self.replaced = _first(parts, lambda own: "forward" in own)
        """Class of a module whose forward was replaced by an attribute of the instance, or None."""
        self.compiled = _first(parts, lambda own: own.get(COMPILED) is not None)
        """Class of a module that is compiled (`Module.compile`), or None."""

    @property
    def unchanged(self) -> bool:
        """True if nothing has changed since this object was made."""
        addresses, sizes, values = self._before
        same = self._addresses() == addresses and self._sizes() == sizes
        return same and all(map(is_, self._values(), values))

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _sizes(self) -> list[int]:
        return list(map(len, self._sized))

    def _values(self) -> Iterator[Any]:
        own = [get(part) for get, part in self._own]
        return chain.from_iterable([*map(dict.values, self._mappings), *own])


def _first(parts: list[nn.Module], holds: Callable[[dict[str, Any]], bool]) -> str | None:
    """Return the class name of the first module whose attributes fulfil a condition, or None."""
    return next((type(part).__name__ for part in parts if holds(vars(part))), None)

"""`ModuleState`: whether weights, modules and hooks are still those of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig as Config

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold what is called around its forward."""

COMPILED = "_compiled_call_impl"
"""Attribute of a module that is called in place of its forward."""

READ = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes of torch, all mappings, that a forward reads."""

OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has, and that only torch reads."""

WEIGHTS_ALONE = (nn.Linear, nn.Embedding)
"""Modules whose other attributes say what their weights say."""


class ModuleState:
    """What the forward of a module reads: attributes of all its modules and their configurations,
    and where tensors lie.

    Of a mapping that is an attribute it sees the values, of other objects that they are the same.
    It is asked before each token, so it makes few calls of Python for each module.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        mappings = [vars(part)[name] for part in parts for name in READ]
        self._own: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        for part in parts:
            if type(part) not in WEIGHTS_ALONE:
                names = [name for name in vars(part) if name not in OF_TORCH]
                mappings += [one for name in names if isinstance(one := vars(part)[name], dict)]
                get = itemgetter("training", *names)  # of two names at least: a tuple
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
        """A module with a hook, which no replay would call; None where there is none."""
        self.replaced = _first(parts, lambda own: "forward" in own)
        """A module whose forward was set beside that of its class."""
        self.compiled = _first(parts, lambda own: own.get(COMPILED) is not None)
        """A module whose call is compiled (`Module.compile`)."""

    @property
    def unchanged(self) -> bool:
        """Whether all of it is as it was."""
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
    """The class of the first module for whose attributes it holds."""
    return next((type(part).__name__ for part in parts if holds(vars(part))), None)

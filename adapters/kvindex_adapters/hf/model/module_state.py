"""`ModuleState`: detects whether a model's weights, modules or hooks have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig as Config

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Module attributes in which torch stores forward hooks."""

COMPILED = "_compiled_call_impl"
"""Module attribute with the function that torch calls instead of `forward` if the module is
compiled."""

READ = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes of every torch module that can affect its forward pass. All of these are dicts."""

OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has, and that only torch itself uses."""

WEIGHTS_ALONE = (nn.Linear, nn.Embedding)
"""Module classes whose attributes need no check, because they only repeat the shapes of the
weights."""


class ModuleState:
    """A snapshot of everything that a module's forward pass may depend on.

    The snapshot contains the attributes of all submodules and of their configurations, and the
    addresses of tensors. An attribute counts as unchanged if it is the same object; for a dict, its
    values must be the same objects. The comparison runs before each decode step, so it makes only a
    few Python calls per submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        mappings = [vars(part)[name] for part in parts for name in READ]
        self._own: list[tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any]]] = []
        for part in parts:
            if type(part) not in WEIGHTS_ALONE:
                names = [name for name in vars(part) if name not in OF_TORCH]
                mappings += [one for name in names if isinstance(one := vars(part)[name], dict)]
                get = itemgetter(
                    "training", *names
                )  # with several names, `itemgetter` returns a tuple
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
        """Class name of a module with a forward hook, which a graph replay would not call, or
        None."""
        self.replaced = _first(parts, lambda own: "forward" in own)
        """Class name of a module whose `forward` was replaced on the instance, or None."""
        self.compiled = _first(parts, lambda own: own.get(COMPILED) is not None)
        """Class name of a module that is compiled (`Module.compile`), or None."""

    @property
    def unchanged(self) -> bool:
        """True if nothing has changed since the snapshot was taken."""
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
    """Return the class name of the first module whose attributes satisfy `holds`, or None."""
    return next((type(part).__name__ for part in parts if holds(vars(part))), None)

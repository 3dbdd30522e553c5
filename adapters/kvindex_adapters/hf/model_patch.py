"""Reversible patches of a model: private copies of its configurations, subclasses of its modules.

Configurations are copied, as other models may share them. Classes are subclassed, as torch's
parametrizations do: what others put on a module meanwhile (hooks, another `forward`) stays.
Copies and pickles of a patched module are of its own class and attention.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

IMPLEMENTATION = "_attn_implementation_internal"
"""Attribute of a configuration that names its attention function."""


class Substitute(str):
    """Name of an attention function; in deep copies and pickles it is the name that it replaces."""

    __slots__ = ("_own",)
    _own: Any

    @classmethod
    def of(cls, ours: str, config: PreTrainedConfig) -> Substitute:
        """The name `ours`, in place of the one in this configuration."""
        name = cls(ours)
        name._own = vars(config).get(IMPLEMENTATION)
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own

    def __reduce_ex__(self, protocol: Any) -> Any:
        # callables of Python alone, so that a pickle is loaded where this package is not
        return type(self._own), () if self._own is None else (self._own,)


def _plain(value: Any) -> Any:
    """A configuration without substitutes, or any other value as it is."""
    if not isinstance(value, PreTrainedConfig):
        return value._own if isinstance(value, Substitute) else value
    other = copy(value)
    vars(other).update((name, _plain(part)) for name, part in vars(value).items())
    return other


class Copies:
    """Copies of configurations, one for each object; those nested in a copy are copies, too."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = {}
        self._before: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = []

    def of(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The copy of a configuration."""
        if id(config) not in self._made:
            other = copy(config)
            self._made[id(config)] = config, other
            nested = vars(other)
            for name, value in nested.items():
                if isinstance(value, PreTrainedConfig):
                    nested[name] = self.of(value)
            self._before.append((config, other, dict(nested)))
        return self._made[id(config)][1]

    def originals(self) -> dict[int, PreTrainedConfig]:
        """Id of a copy -> what it is a copy of."""
        return {id(other): config for config, other in self._made.values()}

    def substitute(self, ours: str) -> None:
        """Let copies of those that name the attention `ours` name what the originals do."""
        for config, other in self._made.values():
            if vars(other).get(IMPLEMENTATION) == ours:
                vars(other)[IMPLEMENTATION] = Substitute.of(ours, config)

    def hand_over(self, ours: str) -> None:
        """Set on each original what was set on its copy, but for the attention named `ours`."""
        originals = self.originals()
        for config, other, before in self._before:
            for name, value in vars(other).items():
                unchanged = name in before and value is before[name]
                if not unchanged and (name, value) != (IMPLEMENTATION, ours):
                    vars(config)[name] = originals.get(id(value), value)


@contextmanager
def private_configurations(model: nn.Module, ours: str) -> Iterator[Copies]:
    """Give the model's modules private configurations; afterwards restore those that they had.

    ours: name of an attention function that is not handed over; all else that is set meanwhile
    on `model.config` and others stays set.
    """
    copies, modules = Copies(), list(model.modules())
    try:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, PreTrainedConfig):
                    vars(module)[name] = copies.of(value)
        yield copies
    finally:
        originals = copies.originals()
        for module in {*modules, *model.modules()}:
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    vars(module)[name] = originals[id(value)]
        copies.hand_over(ours)


@contextmanager
def subclassed(module: nn.Module, first: type[nn.Module]) -> Iterator[None]:
    """Put `first` before the module's class, under the same name; afterwards restore the class.

    A class that others put over it meanwhile stays, so the methods of `first` must have no effect
    by then. Copies and pickles of the module are of its own class.
    """
    own = type(module)
    if issubclass(own, first):
        yield
        return

    def reduce(module: nn.Module, protocol: Any) -> Any:
        made: Any = own.__reduce_ex__(module, protocol)
        _, (cls, *_), *state = made
        if cls is not patched:  # another class, put over it meanwhile
            return made
        return object.__new__, (own,), *state  # pickle demands that `__newobj__` keeps the class

    def shallow(module: nn.Module) -> nn.Module:
        other = own.__new__(own)
        vars(other).update((name, _plain(value)) for name, value in vars(module).items())
        return other

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    body = {**names, "__reduce_ex__": reduce, "__copy__": shallow}
    patched = types.new_class(own.__name__, (first, own), exec_body=lambda it: it.update(body))
    try:
        module.__class__ = patched
        yield
    finally:
        if type(module) is patched:
            module.__class__ = own

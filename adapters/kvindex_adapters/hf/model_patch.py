"""Reversible patches of a model: private copies of its configurations, subclasses of its modules.

Configurations are copied, as other models may share them. Classes are subclassed, as torch's
parametrizations do: what others put on a module meanwhile (hooks, another `forward`) stays.
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


class _Copies:
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

    def hand_over(self, ours: str) -> None:
        """Set on each original what was set on its copy, but for the attention named `ours`."""
        originals = self.originals()
        for config, other, before in self._before:
            for name, value in vars(other).items():
                unchanged = name in before and value is before[name]
                if not unchanged and (name, value) != (IMPLEMENTATION, ours):
                    vars(config)[name] = originals.get(id(value), value)


@contextmanager
def private_configurations(model: nn.Module, ours: str) -> Iterator[None]:
    """Give the model's modules private configurations; afterwards restore those that they had.

    ours: name of an attention function that is not handed over; all else that is set meanwhile
    on `model.config` and others stays set.
    """
    copies, modules = _Copies(), list(model.modules())
    try:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, PreTrainedConfig):
                    vars(module)[name] = copies.of(value)
        yield
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
    by then.
    """
    own = type(module)
    if issubclass(own, first):
        yield
        return
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    patched = types.new_class(own.__name__, (first, own), exec_body=lambda body: body.update(names))
    try:
        module.__class__ = patched
        yield
    finally:
        if type(module) is patched:
            module.__class__ = own

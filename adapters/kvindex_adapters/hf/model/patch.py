"""Reversible patches of a model: private copies of its configurations, subclasses of its modules.

Configurations are copied because other models may use them, too. Classes are subclassed, as in
torch's parametrizations, so that changes that other code makes meanwhile (hooks, another `forward`)
stay. Copies and pickles of a patched module have its original class and attention function.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from operator import getitem
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

IMPLEMENTATION = "_attn_implementation_internal"
"""Attribute of a configuration that contains the name of its attention function."""


class Substitute(str):
    """The name of our attention function. Deep copies and pickles get the name that it replaces."""

    __slots__ = ("_own",)
    _own: Any

    @classmethod
    def of(cls, ours: str, config: PreTrainedConfig) -> Substitute:
        """Make a substitute for the attention function that a configuration names.

        Args:
            ours: The name of our attention function.
            config: The original configuration.
        """
        name = cls(ours)
        name._own = vars(config).get(IMPLEMENTATION)
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own

    def __reduce_ex__(self, protocol: Any) -> Any:
        # only Python's own types, so that a pickle can be loaded without this package
        return type(self._own), () if self._own is None else (self._own,)


def copied_as(own: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Make deep copies and pickles of `own` equal to those of `config`.

    A copy of a model then has one configuration, as the original model does.
    """
    vars(own)["__deepcopy__"] = lambda memo: deepcopy(config, memo)
    # `getitem` returns `config` itself, and a pickle of the result can be loaded without this
    # package
    vars(own)["__reduce_ex__"] = lambda protocol: (getitem, ((config,), 0))


def _plain(value: Any) -> Any:
    """Copy a configuration without substitutes; return any other value unchanged."""
    if not isinstance(value, PreTrainedConfig):
        return value._own if isinstance(value, Substitute) else value
    other = copy(value)
    vars(other).update((name, _plain(part)) for name, part in vars(value).items())
    return other


class Copies:
    """Copies of configurations, one for each object. Nested configurations are copied, too."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = {}
        self._before: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = []

    def of(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the copy of a configuration. Repeated calls return the same copy."""
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
        """Map the `id` of each copy to its original."""
        return {id(other): config for config, other in self._made.values()}

    def substitute(self, ours: str) -> None:
        """Make deep copies and pickles of these configurations name the original attention.

        Args:
            ours: The name of our attention function. Only configurations that name it change.
        """
        for config, other in self._made.values():
            if vars(other).get(IMPLEMENTATION) == ours:
                vars(other)[IMPLEMENTATION] = Substitute.of(ours, config)

    def hand_over(self, ours: str) -> None:
        """Apply the changes of each copy to its original, except the attention named `ours`."""
        originals = self.originals()
        for config, other, before in self._before:
            for name, value in vars(other).items():
                unchanged = name in before and value is before[name]
                if not unchanged and (name, value) != (IMPLEMENTATION, ours):
                    vars(config)[name] = originals.get(id(value), value)


@contextmanager
def private_configurations(model: nn.Module, ours: str) -> Iterator[Copies]:
    """Give the model's modules private configurations; afterwards restore the original ones.

    Changes that the caller makes meanwhile to `model.config` or another configuration stay, except
    the attention function `ours`.

    Args:
        model: The model to change.
        ours: The name of our attention function.

    Yields:
        The private configurations.
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

    If other code subclasses the module's class meanwhile, that subclass stays. So the methods of
    `first` must have no effect after the context. Copies and pickles of the module have its
    original class.

    Args:
        module: The module to change.
        first: The class to add.
    """
    own = type(module)
    if issubclass(own, first):
        yield
        return

    def reduce(module: nn.Module, protocol: Any) -> Any:
        made: Any = own.__reduce_ex__(module, protocol)
        _, (cls, *_), *state = made
        if cls is not patched:  # other code has subclassed it meanwhile
            return made
        return object.__new__, (own,), *state  # pickle's `__newobj__` would require `patched`

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

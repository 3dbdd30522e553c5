"""Reversible patches of a model: copies of its configurations, and subclasses of its classes.

Configurations are copied because other models may share them. Classes are subclassed, as in torch's
parametrizations, so that hooks and other changes that the caller makes are preserved. Copies and
pickles of a patched module have the original class and attention function.
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
"""Configuration attribute with the name of the attention function."""


class Substitute(str):
    """The name of kvindex's attention function, as a string that is not copied.

    A deep copy or a pickle contains the name of the model's original attention function instead.
    """

    __slots__ = ("_own",)
    _own: Any

    @classmethod
    def of(cls, ours: str, config: PreTrainedConfig) -> Substitute:
        """Make the string that replaces the name of the attention function in a configuration.

        Args:
            ours: The name of kvindex's attention function.
            config: The original configuration.
        """
        name = cls(ours)
        name._own = vars(config).get(IMPLEMENTATION)
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle only Python's own types, so that the pickle can be loaded without this package
        return type(self._own), () if self._own is None else (self._own,)


def copied_as(own: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Change the configuration `own` so that a deep copy of it is a copy of `config`.

    Pickling `own` also stores `config` instead. So after a model is copied, its modules share one
    configuration, as in the original model.
    """
    vars(own)["__deepcopy__"] = lambda memo: deepcopy(config, memo)
    # When Python loads the pickled object, it calls `getitem((config,), 0)`, which returns
    # `config`. `getitem` is a function of Python's standard library, so the pickle can be loaded
    # without this package.
    vars(own)["__reduce_ex__"] = lambda protocol: (getitem, ((config,), 0))


def _plain(value: Any) -> Any:
    """Copy a configuration, and replace each `Substitute` by the original name. Return other values
    unchanged."""
    if not isinstance(value, PreTrainedConfig):
        return value._own if isinstance(value, Substitute) else value
    other = copy(value)
    vars(other).update((name, _plain(part)) for name, part in vars(value).items())
    return other


class Copies:
    """Makes one copy of each configuration object, including nested configurations."""

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
        """Return a dictionary from the `id` of each copied configuration to the original one."""
        return {id(other): config for config, other in self._made.values()}

    def substitute(self, ours: str) -> None:
        """Replace the attention name `ours` in the copies of the model's configurations.

        A `Substitute` takes its place. Deep copies and pickles of these configurations then contain
        the original attention name.

        Args:
            ours: The name of kvindex's attention function. Configurations with another name do not
                change.
        """
        for config, other in self._made.values():
            if vars(other).get(IMPLEMENTATION) == ours:
                vars(other)[IMPLEMENTATION] = Substitute.of(ours, config)

    def hand_over(self, ours: str) -> None:
        """Copy changes of the copied configurations to the original configurations.

        The attention name `ours`, which kvindex itself has written to the copies, is not copied.
        """
        originals = self.originals()
        for config, other, before in self._before:
            for name, value in vars(other).items():
                unchanged = name in before and value is before[name]
                if not unchanged and (name, value) != (IMPLEMENTATION, ours):
                    vars(config)[name] = originals.get(id(value), value)


@contextmanager
def private_configurations(model: nn.Module, ours: str) -> Iterator[Copies]:
    """Context manager that gives the model's modules copies of their configurations.

    At the end, the original configurations are restored, with the changes that the caller made to
    the copies (except the attention name `ours`).

    Args:
        model: The model to change.
        ours: The name of kvindex's attention function.

    Yields:
        The copies.
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
    """Context manager that replaces a module's class by a subclass with the mixin `first`.

    The original class is restored at the end, unless other code has subclassed the new class in the
    meantime. In that case the module keeps the mixin, so the methods of `first` must do nothing
    once the context has ended. Copies and pickles of the module have the original class.

    Args:
        module: The module to change.
        first: The mixin class.
    """
    own = type(module)
    if issubclass(own, first):
        yield
        return

    def reduce(module: nn.Module, protocol: Any) -> Any:
        made: Any = own.__reduce_ex__(module, protocol)
        _, (cls, *_), *state = made
        if cls is not patched:  # other code has subclassed `patched` in between
            return made
        return (
            object.__new__,
            (own,),
            *state,
        )  # the usual `__newobj__` would require the class `patched`

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

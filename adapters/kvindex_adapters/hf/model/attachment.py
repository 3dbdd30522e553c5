"""`Attachment`: the state of one `attach`, which all modules of its model and its caches share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import DynamicCache

from kvindex.core import forks
from kvindex_adapters.common.exclusive import Exclusive

if TYPE_CHECKING:
    from kvindex_adapters.hf.batching.state import Batching


class Attachment:
    """The state of one `attach`. The cache that it yields refers to it, and so do copies of it."""

    def __init__(self) -> None:
        self.closed = False
        """True after the context has ended."""
        self.decoder: nn.Module | None = None
        """The module that runs the layers. Each of its calls is one step of a cache."""
        self.sharing: dict[int, int] = {}
        """Number of each layer without own keys -> number of the layer whose keys it attends to."""
        self.running: DynamicCache | None = None
        """The cache of the current step, or None between steps."""
        self.batching: Batching | None = None
        """The state of `attach_batch`, which uses no `IndexCache`."""
        self._pending: tuple[DynamicCache, Any, tuple[Tensor, Tensor]] | None = None
        self.exclusive = Exclusive("model", "the same attached model or of a cache of it")
        """A lock that each call enters before it changes a cache."""
        self._undo: dict[int, Callable[[], None]] | None = None  # id of a cache -> undoes its steps

    def set_pending(self, cache: DynamicCache, layer: Any, states: tuple[Tensor, Tensor]) -> None:
        """Record that a cache layer has received keys and values, and that attention comes next."""
        self._pending = cache, layer, states

    def take_pending(self) -> tuple[DynamicCache, Any, tuple[Tensor, Tensor]] | None:
        """Return and forget the cache, layer and states of the last `update`, or None."""
        pending, self._pending = self._pending, None
        return pending

    def shared(self, layer: int) -> tuple[DynamicCache, Any, None] | None:
        """For a layer without own keys, find the cache, and the cache layer whose keys it uses."""
        producer = self.sharing.get(layer)
        if producer is None or self.running is None:
            return None
        return self.running, self.running.layers[producer], None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run one call of the whole model; if the call raises, undo the decoder's steps in it.

        Raises:
            RuntimeError: Another thread is in a call, as for `exclusive`.
        """
        with self.exclusive():
            if self._undo is not None:  # an outer call of the model undoes all steps
                yield
                return
            self._undo = {}
            try:
                yield
            except BaseException:  # KeyboardInterrupt, too
                for undo in self._undo.values():
                    undo()
                raise
            finally:
                self._undo = None

    def add_undo(self, cache: DynamicCache, undo: Callable[[], None]) -> None:
        """Record how to undo a step of the decoder, in case the model's call fails after it.

        If one call has several steps of a cache, only the function of the first one is recorded.

        Args:
            cache: The cache that the step has changed.
            undo: Restores the cache to its state before the step.
        """
        if self._undo is not None:
            self._undo.setdefault(id(cache), undo)


attached: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()
"""The attachment of every module of an attached model."""

_claims = forks.lock(sys.modules[__name__], "_claims")
"""The lock of `attached`."""


@contextmanager
def claimed(model: nn.Module) -> Iterator[Attachment]:
    """Give all modules of a model one attachment inside the context.

    Raises ValueError if any thread has already attached a module of the model.
    """
    modules, attachment = list(model.modules()), Attachment()
    try:
        with _claims:
            if any(module in attached for module in modules):
                raise ValueError(
                    "model: got one that is attached already, allowed is one attach() at a time"
                )
            attached.update((module, attachment) for module in modules)
        yield attachment
    finally:
        attachment.closed = True
        for module in modules:
            if attached.get(module) is attachment:
                del attached[module]

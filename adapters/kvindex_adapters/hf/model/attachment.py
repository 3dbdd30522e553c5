"""`Attachment`: the state of one `attach` call, which the model's modules and the caches share."""

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
    """The state of one `attach` call. The cache that `attach` yields refers to this object, and so
    do the cache's copies."""

    def __init__(self) -> None:
        self.closed = False
        """True after the `attach` context has ended."""
        self.decoder: nn.Module | None = None
        """The decoder module, which runs the layers. Each call of this module is one forward pass
        with a cache."""
        self.sharing: dict[int, int] = {}
        """Maps the number of each layer without keys to the number of the layer whose keys it
        uses."""
        self.running: DynamicCache | None = None
        """The cache of the current forward pass, or None between forward passes."""
        self.batching: Batching | None = None
        """The state of `attach_batch`, or None for `attach`."""
        self._pending: tuple[DynamicCache, Any, tuple[Tensor, Tensor]] | None = None
        self.exclusive = Exclusive("model", "the same attached model or one of its caches")
        """The lock that every call holds while it changes a cache."""
        self._undo: dict[int, Callable[[], None]] | None = (
            None  # id of a cache -> function that undoes its steps
        )

    def set_pending(self, cache: DynamicCache, layer: Any, states: tuple[Tensor, Tensor]) -> None:
        """Record a call of the cache's `update`: the cache, the layer, and the new keys and values.

        The attention function, which runs next, reads this record with `take_pending`.
        """
        self._pending = cache, layer, states

    def take_pending(self) -> tuple[DynamicCache, Any, tuple[Tensor, Tensor]] | None:
        """Return and delete the record that `set_pending` made in the last `update` of the cache.

        The record contains the cache, the layer, and the new keys and values. Return None if there
        is no record.
        """
        pending, self._pending = self._pending, None
        return pending

    def shared(self, layer: int) -> tuple[DynamicCache, Any, None] | None:
        """Look up the keys and values of a layer that computes none of its own.

        Such a layer attends to the keys and values of another layer. The result is a tuple: the
        cache of the current forward pass, the cache layer of that other layer, and always None. For
        a layer with keys and values of its own, return only None.
        """
        producer = self.sharing.get(layer)
        if producer is None or self.running is None:
            return None
        return self.running, self.running.layers[producer], None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager around one call of the model: after an error, undo its forward passes.

        Raises:
            RuntimeError: Another thread is using the model.
        """
        with self.exclusive():
            if self._undo is not None:  # an outer call of the model will undo all forward passes
                yield
                return
            self._undo = {}
            try:
                yield
            except BaseException:  # including KeyboardInterrupt
                for undo in self._undo.values():
                    undo()
                raise
            finally:
                self._undo = None

    def add_undo(self, cache: DynamicCache, undo: Callable[[], None]) -> None:
        """Record how to undo a forward pass of the decoder, in case the model's call fails later.

        If a call of the model runs several forward passes, only the first `undo` of each cache is
        recorded.

        Args:
            cache: The cache that the forward pass has changed.
            undo: Function that restores the cache to its state before the forward pass.
        """
        if self._undo is not None:
            self._undo.setdefault(id(cache), undo)


attached: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()
"""Maps every module of an attached model to its `Attachment`."""

_claims = forks.lock(sys.modules[__name__], "_claims")
"""The lock that protects `attached`."""


@contextmanager
def claimed(model: nn.Module) -> Iterator[Attachment]:
    """Context manager that registers a new `Attachment` for all modules of a model.

    Raises ValueError if a module of the model is already attached, by any thread.
    """
    modules, attachment = list(model.modules()), Attachment()
    try:
        with _claims:
            if any(module in attached for module in modules):
                raise ValueError(
                    "model: got a model that is attached already; end its attach() context first "
                    "(several chats: chat.fork(), or Chat(…, cache=…) with one attach() for all)"
                )
            attached.update((module, attachment) for module in modules)
        yield attachment
    finally:
        attachment.closed = True
        for module in modules:
            if attached.get(module) is attachment:
                del attached[module]

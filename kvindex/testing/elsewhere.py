"""A simulated GPU, whose tensors raise an error if they are combined with CPU tensors.

The tensors are CPU tensors in a wrapper that reports torch's device `meta`. So tests on a machine
without a GPU can find code that creates a tensor on the wrong device, or reads a GPU tensor with
numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PLACE = torch.device("meta")
ATEN = torch.ops.aten
COPIES = {ATEN._to_copy.default, ATEN.copy_.default}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
"""Indexing operations. In these, torch allows a GPU tensor to be indexed with CPU tensors."""


class Elsewhere(Tensor):
    """A tensor on the simulated device. The attribute `on_cpu` is a CPU tensor with its data."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> Elsewhere:
        """Create a tensor with the shape and strides of `on_cpu` on the simulated device."""
        place: Any = dict(
            strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), device=PLACE
        )
        return Tensor._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, **place)

    def __init__(self, on_cpu: Tensor) -> None:
        self.on_cpu = on_cpu

    def __repr__(self) -> str:  # type: ignore[override]  # torch's method has another option
        return f"Elsewhere({self.on_cpu!r})"

    def tolist(self) -> Any:
        """Return the elements as nested lists, as `Tensor.tolist` does."""
        return self.on_cpu.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes more arguments than declared
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch operation on tensors of the simulated GPU. The CPU computes the result.

    Raises RuntimeError if the operation mixes tensors of the simulated GPU and of the CPU in a way
    that also fails with a real GPU.
    """
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    away = [one for one in tensors if isinstance(one, Elsewhere)]
    here = [one for one in tensors if not isinstance(one, Elsewhere) and one.dim()]
    indices = func in INDEXED and isinstance(args[0], Elsewhere)
    if away and here and func not in COPIES and not indices:
        raise RuntimeError(f"{func}: got tensors on two devices; move all tensors to one device")
    to = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    stays = bool(away) if to is None else to == PLACE
    if to == PLACE:
        kwargs = {**kwargs, "device": "cpu"}
    opened = tree_map_only(Elsewhere, lambda one: one.on_cpu, (args, kwargs))
    found = func(*opened[0], **opened[1])
    if func._schema.is_mutable:  # an in-place operation returns its argument
        given = kwargs["out"] if "out" in kwargs else args[0]
        return given if isinstance(found, Tensor) else found
    return tree_map_only(Tensor, Elsewhere, found) if stays else found


DispatchMode: Any = TorchDispatchMode  # both classes are untyped in torch
FunctionMode: Any = TorchFunctionMode


class _Dispatched(DispatchMode):  # type: ignore[misc]  # untyped
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Made(FunctionMode):  # type: ignore[misc]  # untyped
    """Converts lists to tensors on the simulated device.

    Without this, torch would convert the lists to CPU tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor:
            like = dict(dtype=args[0].dtype, device=args[0].device)
            func, args, kwargs = torch.tensor, args[1:], {**like, **kwargs}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _indices(args[1]), *args[2:])
        return func(*args, **kwargs)


def _indices(given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(map(_indices, given))
    return torch.tensor(given) if isinstance(given, list) else given


@contextmanager
def known() -> Iterator[None]:
    """Allow tensors on the simulated device within the context: `torch.zeros(3, device=PLACE)`."""
    with _Made(), _Dispatched():
        yield

"""`Trace`: records the torch operations of a forward pass, to decide if a CUDA graph can replace
it.

A CUDA graph repeats the same operations with the same addresses and numbers. A decode step can
therefore be captured if two successive steps have equal traces, and the host reads no values from
the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvindex_adapters.hf.cache import count

OWN, TORCH = {Path(__file__), Path(count.__file__)}, Path(torch.__file__).parent
"""Files (`OWN`) and a folder (`TORCH`) to skip in the call stack when looking up which line of
model code called an operation."""

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of torch operations for which the host must wait until the device has computed their result.

They return a number, or a tensor whose size depends on values.
"""

INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
"""Operations that make the host wait only if an index is a bool mask."""

LEAVES = {
    **{Tensor.tolist: "reads a tensor", Tensor.numpy: "reads a tensor"},
    **{Tensor.__array__: "reads a tensor", Tensor.__dlpack__: "gives away a tensor"},
    Tensor.data_ptr: "asks for an address, as kernels do that are no operations of torch",
}
"""Methods of a tensor that give its data to code outside of torch.

The value of each is its description in error messages.
"""

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Tensor classes whose operations the trace can record. Other subclasses may do more than their
operations show."""


class Operand(NamedTuple):
    """A tensor that an operation reads.

    Args:
        origin: Address of the tensor's storage. For a tensor that an operation of the same step
            made: the number of the operation, and the number of its result.
        offset: Offset of the tensor in the storage.
        shape: Shape of the tensor.
        strides: Strides of the tensor.
        dtype: Dtype of the tensor.
        device: Device of the tensor.
        value: The value of a 0-dimensional CPU tensor, which a graph would repeat unchanged. None
            for other tensors.
    """

    origin: int | tuple[int, int]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: Any


class Operation(NamedTuple):
    """A recorded operation: its name, its operands, and the file and line that called it."""

    name: str
    given: list[Any]
    place: str


class Trace(TorchDispatchMode):
    """Context manager that records all torch operations.

    Args:
        device: The device of the forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.refusals: list[str] = []
        """Descriptions of what the forward pass did that a graph cannot repeat."""
        self._device, self._paused = device, False
        self._made: dict[
            int, tuple[int, int]
        ] = {}  # address of a storage -> (number of the operation, number of its result)
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Leaving(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._modes.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call: Any = (args, kwargs or {})
        if self._paused:
            return function(*call[0], **call[1])
        if self._waits(function, args):
            self.refuse(f"{function}: the host reads what the device has")
        given, read = self._operands(call), call
        if function is torch.ops.aten.lift_fresh.default and args[0].device.type == "cpu":
            with self._pause():  # a tensor of Python numbers: its address is new each time
                given, read = [args[0].tolist()], ()
        result = function(*call[0], **call[1])
        self._note(str(function), given, read, result)
        return result

    def _waits(self, function: Any, args: Any) -> bool:
        if function in INDEXED:
            return any(one is not None and one.dtype is torch.bool for one in args[1])
        return bool(READS & set(function.tags))

    def whole(self, name: str, call: Callable[[], Tensor], *read: Any) -> Tensor:
        """Run a function, and record it in the trace as one operation.

        Args:
            name: Name of the operation.
            call: The function, which has no arguments.
            *read: The tensors and numbers that the function reads: the operands of the operation.

        Returns:
            The result of the function.
        """
        given = self._operands(read)
        with self._pause():
            result = call()
        self._note(name, given, read, result)
        return result

    def refuse(self, why: str) -> None:
        """Record that the forward pass did something that a CUDA graph cannot repeat.

        The record contains the reason `why`, and the file and line where it happened.
        """
        if not self._paused:
            self.refusals.append(f"{why} ({_place()})")

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _operands(self, given: Any) -> list[Any]:
        """List the operands (tensors and numbers) of a call."""
        leaves = tree_leaves(given)
        return [self._operand(one) if isinstance(one, Tensor) else one for one in leaves]

    def _operand(self, tensor: Tensor) -> Any:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            self.refuse(f"got a {type(tensor).__name__}, allowed are plain tensors")
            return type(tensor)
        address, value = _address(tensor), None
        if tensor.device != self._device:
            if tensor.device.type == "cpu" and tensor.ndim == 0:
                with self._pause():
                    address, value = 0, tensor.item()
            else:
                self.refuse(f"got a tensor on {tensor.device}, allowed is {self._device}")
        return Operand(
            origin=self._made.get(address, address),
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            value=value,
        )

    def _note(self, name: str, given: list[Any], read: Any, result: Any) -> None:
        number, known = len(self.operations), {_address(one) for one in _tensors(read)}
        self.operations.append(Operation(name, given, _place()))
        for place, made in enumerate(_tensors(result)):
            if made.device != self._device and made.ndim:
                self.refuse(f"{name}: gives a tensor on {made.device}, not on {self._device}")
            if (address := _address(made)) not in known:
                self._made[address] = (number, place)


class _Leaving(TorchFunctionMode):
    """Reports to a trace that code reads a tensor's data without a torch operation.

    An example of such code is `Tensor.numpy`.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in LEAVES:
            self._trace.refuse(f"{function.__name__}: the host {LEAVES[function]}")
        return function(*args, **kwargs or {})


def difference(before: Trace, after: Trace) -> str | None:
    """Return the reason why a CUDA graph of one decode step cannot run the next step.

    Return None if it can.
    """
    for refusal in (*before.refusals, *after.refusals):
        return refusal
    for one, other in zip_longest(before.operations, after.operations):
        if one is None or other is None:
            some = other if one is None else one
            return f"{some.name}: an operation of one token, not of the next ({some.place})"
        if one.name != other.name:
            return f"got {one.name}, at the next token {other.name} ({other.place})"
        if one.given != other.given:
            return f"{one.name}: {_apart(one.given, other.given)} ({other.place})"
    return None


def _apart(given: list[Any], later: list[Any]) -> str:
    """Describe the first difference between the operands of two calls."""
    for one, other in zip_longest(given, later):
        if one == other:
            continue
        if not isinstance(one, Operand) or not isinstance(other, Operand):
            return f"got {one}, at the next token {other}"
        if one.shape != other.shape:
            return f"got shape {list(one.shape)}, at the next token {list(other.shape)}"
        if one.origin != other.origin:
            return "got a tensor that has another address at the next token"
        return "got a tensor that has other strides at the next token"
    return "got another call at the next token"


def _tensors(given: Any) -> list[Tensor]:
    return [one for one in tree_leaves(given) if type(one) in PLAIN]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _place() -> str:
    """Return the file and line outside of torch that called the current operation."""
    frame = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path not in OWN and TORCH not in path.parents:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere"

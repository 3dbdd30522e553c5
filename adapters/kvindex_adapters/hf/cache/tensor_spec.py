"""`TensorSpec`: shape, dtype and device of keys or values whose rows are in an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from kvindex_adapters.common.unsupported import UnsupportedError

WHY = "the rows are in the index's store and in the window"


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor without its numbers, as `layer.keys` and `layer.values` of a cache."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that a tensor of this shape and dtype takes."""
        return self.numel() * self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"keys, values: got .{name}, allowed are shape, dtype, device: {WHY}")

    def __getitem__(self, index: object) -> NoReturn:
        raise UnsupportedError(
            f"keys, values: got an index, allowed are shape, dtype, device: {WHY}"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise UnsupportedError(f"keys, values: got {name}, allowed are shape, dtype, device: {WHY}")

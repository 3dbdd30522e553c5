"""Linear layers with weights in int8, for models on a CPU.

A decode step on a CPU takes most of its time to read the weights. In int8 they take a quarter of
the bytes of float32. oneDNN multiplies 8-bit integers, which also makes prompts faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 63
"""Largest magnitude of an integer that represents an input number.

Without VNNI instructions, oneDNN adds pairs of products in 16 bits. With `LARGEST` and weights of
at most 127, these sums do not overflow, so every processor computes the same result.
"""

ZERO = LARGEST + 1
"""Added to the integers of the inputs, which oneDNN reads as unsigned 8-bit numbers."""

FINER = 2 * LARGEST
"""Factor between the two integers that represent an input number."""


class _Packed:
    """A matrix in the layout that oneDNN reads. Copies share it, since it never changes."""

    def __init__(self, matrix: Tensor) -> None:
        """Convert the int8 matrix `[O, I]` to oneDNN's layout."""
        self.tensor: Any = torch.ops.onednn.qlinear_prepack(matrix, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        return self

    def __reduce__(self) -> Any:
        return _Packed, (self.tensor.to_dense().t().contiguous(),)


class Int8Linear(nn.Module):
    """A linear layer with a matrix in int8, and one float32 scale per output feature.

    The result differs from that of the float32 layer because the weights are rounded. Each input
    number is represented by two integers, one for the number and one for its rounding error, so
    rounding the inputs changes the result far less. Each token has its own scale, so tokens do not
    influence each other.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Quantize the weights of `linear`."""
        super().__init__()
        weight = linear.weight.detach().float()
        self.out_features, self.in_features = weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._scale = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        integers = (weight / self._scale[:, None]).round_().to(torch.int8)
        self._weight = _Packed(integers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs `[..., I]` by the matrix, and return float32 `[..., O]`."""
        rows = inputs.detach().reshape(-1, self.in_features).float()
        count, scale = len(rows), rows.abs().amax(dim=1, keepdim=True)
        scale = scale.clamp_(min=torch.finfo(torch.float32).tiny).mul_(1 / LARGEST)
        pair = torch.empty(2, *rows.shape)
        error, whole = pair
        torch.div(rows, scale, out=error)
        torch.round(error, out=whole)
        error.sub_(whole).mul_(FINER)
        # The addition of 0.5 rounds to the nearest integer, because the conversion truncates
        integers = pair.add_(ZERO + 0.5).to(torch.uint8).view(2 * count, -1)
        both = torch.ops.onednn.qlinear_pointwise(
            integers,
            1.0,
            ZERO,
            self._weight.tensor,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        found = both[count:].add(both[:count], alpha=1 / FINER).mul_(scale)
        if self.bias is not None:
            found += self.bias
        return found.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def supported() -> bool:
    """Return True if this build of torch multiplies 8-bit integers on a CPU with oneDNN."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available


def quantize(model: nn.Module) -> None:
    """Replace each `nn.Linear` of a float32 model on a CPU by an `Int8Linear`."""
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear:
            setattr(model, name, Int8Linear(child))
        else:
            quantize(child)

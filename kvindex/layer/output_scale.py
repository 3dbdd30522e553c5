"""Sizes of a layer's values and attention outputs, which turn a relative error into a limit.

With `k="auto"`, a search gets a limit for the variance of the attention weights of the rows that it
samples. Times the mean square of the values, this variance is the expected squared error of the
attention output. So the limit follows from the allowed relative error, the size of the values, and
the size of the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.core.restore import Restorable
from kvindex.storage.layout import TensorSpec

HORIZON = 1024
"""A chunk of this many tokens replaces the measured means; a shorter one counts in proportion."""

LAST = 256
"""Number of tokens at the end of a chunk whose outputs are measured.

The outputs of tokens near the beginning of a text have other sizes than those of later tokens.
"""

NAMES = ("scale.values", "scale.outputs")
"""Names of the two means in the state of a layer."""


class OutputScale(Restorable):
    """Mean squares of values and outputs, measured on tokens that attend to all tokens.

    Tokens whose queries search are not measured, because the error of their outputs would then
    influence later limits. The means are moving averages, so they depend slightly on how a prompt
    is divided into chunks.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None  # mean of |v|² over tokens, float32 [B, G]
        self._outputs: Tensor | None = None  # mean of |o|² over tokens, float32 [B, H]

    @property
    def known(self) -> bool:
        """True if the sizes of values and outputs have been measured."""
        return self._outputs is not None

    def measure(self, values: Tensor, outputs: Tensor, valid: Tensor | None) -> None:
        """Measure the values and attention outputs of new tokens.

        Args:
            values: `[B, G, T, Dv]`, values of new tokens. Before the first call, of earlier tokens,
                too.
            outputs: `[B, H, T', Dv]`, outputs of the new tokens.
            valid: Bool `[B, T']`, False for padding; None if no new token is padding.
        """
        found = values.float().square().sum(-1).mean(2)
        last = outputs[:, :, -LAST:].float().square().sum(-1)  # [B, H, n]
        if valid is None:
            mean = last.mean(2)
        else:
            real = valid[:, None, -LAST:].to(last.dtype)
            mean = (last * real).sum(2) / real.sum(2).clamp_min(1)
        if self._values is None or self._outputs is None:
            self._values, self._outputs = found, mean
            return
        weight = min(outputs.shape[2] / HORIZON, 1.0)
        self._values = self._values.lerp(found, weight)
        self._outputs = self._outputs.lerp(mean, weight)

    def variance(self, error: float) -> Tensor:
        """Return the largest variance of attention weights for each KV head, float32 `[B, G]`.

        It is added up over the query heads of the KV head. If no KV head exceeds it, the expected
        squared error of the layer's output is at most `error²` times the mean square of the
        outputs.

        Args:
            error: Allowed error of the layer's output, relative to the size of outputs.
        """
        assert self._values is not None
        assert self._outputs is not None
        heads = self._values.shape[1]
        allowed = error**2 * self._outputs.sum(1, keepdim=True) / heads
        return allowed / self._values.clamp_min(torch.finfo(torch.float32).tiny)

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` of the batch by sequence `batch_indices[b]`."""
        if self._values is not None and self._outputs is not None:
            at = batch_indices.to(self._values.device)
            self._values, self._outputs = self._values[at], self._outputs[at]

    def reset(self) -> None:
        """Forget what was measured."""
        self._values, self._outputs = None, None

    # State as named tensors

    def packed(self) -> dict[str, Tensor]:
        """Return the means by name, or an empty dict if nothing was measured."""
        if self._values is None or self._outputs is None:
            return {}
        return dict(zip(NAMES, (self._values, self._outputs), strict=True))

    @staticmethod
    def layout() -> dict[str, TensorSpec]:
        """Return what the tensors of `packed` must look like."""
        shapes = "B G", "B H"
        return {
            name: TensorSpec(shape, torch.float32, least=0)
            for name, shape in zip(NAMES, shapes, strict=True)
        }

    def unpack(self, state: Mapping[str, Tensor]) -> None:
        """Load the means from a state that may contain them."""
        self._values, self._outputs = (state.get(name) for name in NAMES)

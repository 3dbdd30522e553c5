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
"""Number of tokens over which the means are taken. Later tokens replace earlier ones."""

LAST = 256
"""Number of tokens at the end of a chunk whose outputs are measured.

The outputs of tokens near the beginning of a text have other sizes than those of later tokens.
"""

FEWEST = 32
"""Number of tokens that must be measured before a search uses the means."""

NAMES = ("scale.values", "scale.outputs", "scale.seen")
"""Names of the tensors in the state of a layer."""


class OutputScale(Restorable):
    """Mean squares of values and outputs, measured on the tokens of prompts and dense steps.

    Tokens whose queries search are not measured, because the error of their outputs would then
    influence later limits. The means are moving averages over some 1,000 tokens, so they depend
    slightly on how a prompt is divided into chunks. `truncate` of a layer does not change them,
    except if no token remains.
    """

    def __init__(self) -> None:
        self._seen = 0  # number of measured tokens
        self._values: Tensor | None = None  # mean of |v|² over tokens, float32 [B, G]
        self._outputs: Tensor | None = None  # mean of |o|² over tokens, float32 [B, H]
        self._limit: tuple[float, Tensor] | None = None  # the last result of `variance`

    @property
    def known(self) -> bool:
        """True if enough tokens have been measured."""
        return self._seen >= FEWEST

    def measure(self, values: Tensor, outputs: Tensor, valid: Tensor | None) -> None:
        """Measure the values and attention outputs of new tokens.

        Padding does not count, and may be NaN. The means of a sequence stay as they are if all its
        new tokens are padding.

        Args:
            values: `[B, G, T, Dv]`.
            outputs: `[B, H, T, Dv]`.
            valid: Bool `[B, T]`, False for padding; None if no token is padding.
        """
        B, _, T, _ = values.shape
        if valid is None:
            valid = torch.ones((B, T), dtype=torch.bool, device=values.device)
        left = valid.flip(-1).cumsum(-1).flip(-1)  # number of real tokens from this one on
        found = _mean_square(values.detach(), valid)
        mean = _mean_square(outputs.detach(), valid & (left <= LAST))
        weight = T / (min(HORIZON, self._seen + T) if self._seen else T)
        if self._values is not None and self._outputs is not None:
            weights = min(weight, 1.0) * valid.any(-1, keepdim=True)
            found = self._values.lerp(found, weights.expand_as(found))
            mean = self._outputs.lerp(mean, weights.expand_as(mean))
        self._values, self._outputs, self._seen = found, mean, self._seen + T
        self._limit = None

    def variance(self, error: float) -> Tensor:
        """Return the largest variance of attention weights for each KV head, float32 `[B, G]`.

        It is added up over the query heads of the KV head. If no KV head exceeds it, the expected
        squared error of the layer's output is at most `error²` times the mean square of the
        outputs. The result is the same tensor until the means change.

        Args:
            error: Allowed error of the layer's output, relative to the size of outputs.
        """
        if self._limit is not None and self._limit[0] == error:
            return self._limit[1]
        assert self._values is not None
        assert self._outputs is not None
        heads = self._values.shape[1]
        allowed = error**2 * self._outputs.sum(1, keepdim=True) / heads
        found = allowed / self._values.clamp_min(torch.finfo(torch.float32).tiny)
        self._limit = error, found
        return found

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` of the batch by sequence `batch_indices[b]`."""
        if self._values is not None and self._outputs is not None:
            at = batch_indices.to(self._values.device)
            self._values, self._outputs, self._limit = self._values[at], self._outputs[at], None

    def reset(self) -> None:
        """Forget what was measured."""
        self._seen, self._values, self._outputs, self._limit = 0, None, None, None

    # State as named tensors

    def packed(self) -> dict[str, Tensor]:
        """Return the means by name, or an empty dict if nothing was measured."""
        if self._values is None or self._outputs is None:
            return {}
        parts = self._values, self._outputs, torch.tensor(self._seen)
        return dict(zip(NAMES, parts, strict=True))

    @staticmethod
    def layout() -> dict[str, TensorSpec]:
        """Return what the tensors of `packed` must look like."""
        specs = (("B G", torch.float32, 0), ("B H", torch.float32, 0), ("", torch.int64, 1))
        return {
            name: TensorSpec(shape, dtype, least=least)
            for name, (shape, dtype, least) in zip(NAMES, specs, strict=True)
        }

    def unpack(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Load the means to a device, from a state that may contain them."""
        self.reset()
        if NAMES[0] in state:
            self._values, self._outputs = (state[name].to(device) for name in NAMES[:2])
            self._seen = int(state[NAMES[2]])


def _mean_square(vectors: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of `|v|²` over the chosen tokens, float32 `[B, n]`, or 0 if there are none.

    Args:
        vectors: `[B, n, T, Dv]`.
        chosen: Bool `[B, T]`.
    """
    squares = vectors.float().square().sum(-1).masked_fill(~chosen[:, None], 0)
    return squares.sum(-1) / chosen.sum(-1, keepdim=True).clamp_min(1)

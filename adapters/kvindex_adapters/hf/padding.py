"""What the mask of a step says of its tokens: asked of the device once, for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.unsupported import UnsupportedError


class Padding:
    """The mask of the step that is under way, which all layers of a model get."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self._mask: Tensor | None = None
        self._length = 0
        self._new: Tensor | None = None

    def of_new(self, layer: AttentionLayer, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of the `count` new tokens are real, bool `[B, count]`, or None where all are.

        mask: bool `[B, N + count]`, or None for no padding. Raises UnsupportedError where it does
        not say of the past what it said when the tokens came, ValueError for padding that is not
        on the left.
        """
        if mask is not None and mask is self._mask and len(layer) == self._length:
            return self._new
        _check_past(layer, mask)
        new = None if mask is None or bool(mask[:, -count:].all()) else mask[:, -count:]
        if mask is not None and new is not None:
            _check_left(mask)
        self._mask, self._length, self._new = mask, len(layer), new
        return new


def _check_left(mask: Tensor) -> None:
    """Raises ValueError where a padded token comes after a real one."""
    wrong = (mask[:, :-1] & ~mask[:, 1:]).nonzero()[:1].tolist()
    if wrong:
        row, place = wrong[0]
        raise ValueError(
            f"attention_mask: got a padded token after a real one in row {row}, at position "
            f"{place + 1}; allowed is padding on the left (tokenizer.padding_side = 'left')"
        )


def _check_past(layer: AttentionLayer, mask: Tensor | None) -> None:
    length, was = len(layer), layer.valid
    if length == 0:
        return
    now = None if mask is None else mask[:, :length]
    if was is None or now is None:
        some = now if was is None else was
        same = some is None or bool(some.all())
    else:
        same = torch.equal(now, was)
    if not same:
        raise UnsupportedError(
            "attention_mask: got one that hides tokens of the past which were visible before "
            "(or the reverse), allowed is the same past"
        )

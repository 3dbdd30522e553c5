"""The padding of a step. It is computed once from the attention mask, for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.unsupported import UnsupportedError


@dataclass(frozen=True, eq=False)
class MaskInfo:
    """The contents of a step's attention mask.

    Args:
        real: Bool `[B, N]`, False for padding; None where no token is padded.
        visible: Bool `[B, T, N]`, the tokens that each new token attends to; None for causal
            attention.
    """

    real: Tensor | None = None
    visible: Tensor | None = None


class Padding:
    """The attention mask of the current step, which all layers of a model get."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the mask at the end of its step."""
        self.all_real = False
        """True if all new tokens of this step are known to be real; the mask is then ignored."""
        self._mask: Tensor | None = None
        self._length = 0
        self._new: Tensor | None = None
        self._given: Tensor | None = None
        self._parsed = MaskInfo()

    def of_mask(self, mask: Tensor) -> MaskInfo:
        """Read the attention mask of a layer.

        Args:
            mask: `[B, N]` of padding, or `[B, 1, T, N]` with a row for each new token.

        Returns:
            Its contents.

        Raises:
            UnsupportedError: The mask hides tokens that later tokens would still search, differs
                between heads, or is a bias of the logits.
        """
        if mask.ndim == 2:
            return MaskInfo(mask.bool())
        if mask is not self._given:
            self._given, self._parsed = mask, _of_each(mask)
        return self._parsed

    def of_new(self, layer: AttentionLayer, mask: Tensor | None, count: int) -> Tensor | None:
        """Find the padding of the new tokens.

        Args:
            layer: The attention layer, with the past tokens.
            mask: Bool `[B, N + count]`, False for padding; None for no padding.
            count: Number of new tokens.

        Returns:
            Bool `[B, count]`, False for padding; None where no new token is padded.

        Raises:
            UnsupportedError: The mask changes the padding of past tokens.
        """
        if self.all_real or (mask is None and layer.valid is None):
            return None
        if mask is not None and mask is self._mask and len(layer) == self._length:
            return self._new
        _check_past(layer, mask)
        new = None if mask is None or bool(mask[:, -count:].all()) else mask[:, -count:]
        self._mask, self._length, self._new = mask, len(layer), new
        return new


def _of_each(mask: Tensor) -> MaskInfo:
    """Read a mask `[B, 1, T, N]`: bool, or floating point with 0 for visible tokens.

    The newest token of each sequence must see every token that earlier ones see, because later
    tokens will see them, too.
    """
    seen, known = mask if mask.dtype == torch.bool else mask == 0, True
    if mask.is_floating_point():  # check that it is not a bias
        known = bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    if mask.shape[1] > 1 or not known:
        raise UnsupportedError(
            f"attention_mask: got one of shape {list(mask.shape)} in a full-attention layer, "
            "allowed is one for all heads, bool, or of 0 and torch.finfo(dtype).min: an index "
            "cannot search with a bias of the logits"
        )
    seen, real = seen[:, 0], seen[:, 0, -1]
    T, N = mask.shape[-2:]
    causal = torch.ones(T, N, dtype=torch.bool, device=mask.device).tril(N - T)
    padding = None if bool(real.all()) else real
    if torch.equal(seen, causal & real[:, None]):
        return MaskInfo(padding)
    if bool((seen & ~real[:, None]).any()):
        raise UnsupportedError(
            f"attention_mask: got one of shape {list(mask.shape)} in a full-attention layer, which "
            "hides tokens from the newest token that earlier tokens see; allowed is a mask in "
            "which the newest token sees them all, because later tokens search among all tokens"
        )
    return MaskInfo(padding, seen)


def _check_past(layer: AttentionLayer, mask: Tensor | None) -> None:
    """Raise UnsupportedError if the mask differs from the padding of past tokens."""
    length, before = len(layer), layer.valid
    if length == 0:
        return
    now = None if mask is None else mask[:, :length]
    if before is None or now is None:
        known = now if before is None else before
        same = known is None or bool(known.all())
    else:
        same = torch.equal(now, before)
    if not same:
        raise UnsupportedError(
            "attention_mask: got one that hides tokens of the past which were visible before "
            "(or the reverse), allowed is the same past"
        )

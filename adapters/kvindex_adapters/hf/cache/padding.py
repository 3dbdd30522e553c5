"""`Padding`: reads the padding from a model's attention mask, once per forward pass for all
layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.unsupported import UnsupportedError


@dataclass(frozen=True, eq=False)
class MaskInfo:
    """The contents of an attention mask.

    Args:
        real: Bool `[B, N]`, False for padding. None means no padding.
        visible: Bool `[B, T, N]`, the tokens that each new token attends to. None means causal
            attention.
    """

    real: Tensor | None = None
    visible: Tensor | None = None


class Padding:
    """The attention mask of the current forward pass, which all layers of a model share."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Clear the mask at the end of a forward pass."""
        self.all_real = False
        """True if no new token of this forward pass is padding. The mask is then ignored."""
        self._mask: Tensor | None = None
        self._length = 0
        self._new: Tensor | None = None
        self._given: Tensor | None = None
        self._parsed = MaskInfo()

    def of_mask(self, mask: Tensor) -> MaskInfo:
        """Read an attention mask.

        Args:
            mask: A padding mask `[B, N]`, or a mask `[B, 1, T, N]` with a row for each new token.

        Returns:
            The contents of the mask.

        Raises:
            UnsupportedError: In the mask, the newest token cannot see a token that an earlier token
                sees. Or the mask differs between heads, or is a bias of the attention logits.
        """
        if mask.ndim == 2:
            return MaskInfo(mask.bool())
        if mask is not self._given:
            self._given, self._parsed = mask, _of_each(mask)
        return self._parsed

    def of_new(self, layer: AttentionLayer, mask: Tensor | None, count: int) -> Tensor | None:
        """Return the padding of the new tokens.

        Args:
            layer: The attention layer, which contains the past tokens.
            mask: Bool `[B, N + count]`, False for padding. None means no padding.
            count: Number of new tokens.

        Returns:
            Bool `[B, count]`, False for padding. None if no new token is padding.

        Raises:
            UnsupportedError: For the past tokens, the mask differs from the mask of earlier calls.
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
    """Read an attention mask `[B, 1, T, N]`: bool, or floating point with 0 for visible tokens.

    The newest token must see every token that any other new token sees. Otherwise UnsupportedError
    is raised, because later decode steps search all tokens except padding.
    """
    seen, known = mask if mask.dtype == torch.bool else mask == 0, True
    if mask.is_floating_point():  # check that the mask is not a bias
        known = bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    if mask.shape[1] > 1 or not known:
        raise UnsupportedError(
            f"attention_mask: got a mask of shape {list(mask.shape)} in a full-attention layer; "
            "an index cannot search with a bias of the logits, so pass a mask that is the same "
            "for all heads, and either bool or with the values 0 and torch.finfo(dtype).min"
        )
    seen, real = seen[:, 0], seen[:, 0, -1]
    T, N = mask.shape[-2:]
    causal = torch.ones(T, N, dtype=torch.bool, device=mask.device).tril(N - T)
    padding = None if bool(real.all()) else real
    if torch.equal(seen, causal & real[:, None]):
        return MaskInfo(padding)
    if bool((seen & ~real[:, None]).any()):
        raise UnsupportedError(
            f"attention_mask: got a mask of shape {list(mask.shape)} in a full-attention layer, in "
            "which the newest token cannot see a token that an earlier token sees; the newest "
            "token must see all tokens that earlier tokens see, because later decode steps search "
            "all of them"
        )
    return MaskInfo(padding, seen)


def _check_past(layer: AttentionLayer, mask: Tensor | None) -> None:
    """Raise UnsupportedError if the mask of past tokens differs from that of earlier calls."""
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
            "attention_mask: got a mask that hides past tokens which were visible in earlier "
            "calls (or the reverse); the mask of past tokens must not change"
        )

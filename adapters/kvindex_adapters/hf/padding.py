"""Padding of a step, read from its attention mask once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.unsupported import UnsupportedError


@dataclass(frozen=True, eq=False)
class Seen:
    """What the mask of a step says.

    real: which tokens are no padding, bool `[B, N]`, or None where all are real; visible: which
    each new token sees, bool `[B, T, N]`, or None for causal order.
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
        """Whether all new tokens of this step are known to be real, whatever its mask."""
        self._mask: Tensor | None = None
        self._length = 0
        self._new: Tensor | None = None
        self._given: Tensor | None = None
        self._seen = Seen()

    def of_mask(self, mask: Tensor) -> Seen:
        """What the mask of a layer says: `[B, N]` of padding, or `[B, 1, T, N]` of each new token.

        Raises UnsupportedError for a mask by which later tokens cannot search.
        """
        if mask.ndim == 2:
            return Seen(mask.bool())
        if mask is not self._given:
            self._given, self._seen = mask, _of_each(mask)
        return self._seen

    def of_new(self, layer: AttentionLayer, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of the `count` new tokens are real, bool `[B, count]`, or None where all are.

        mask: bool `[B, N + count]`, or None for no padding. Raises UnsupportedError where it
        changes the padding of past tokens.
        """
        if self.all_real or (mask is None and layer.valid is None):
            return None
        if mask is not None and mask is self._mask and len(layer) == self._length:
            return self._new
        _check_past(layer, mask)
        new = None if mask is None or bool(mask[:, -count:].all()) else mask[:, -count:]
        self._mask, self._length, self._new = mask, len(layer), new
        return new


def _of_each(mask: Tensor) -> Seen:
    """As `Padding.of_mask`, of `[B, 1, T, N]`, bool, or 0 where a token is seen.

    The newest token of each sequence must see whatever others see, as later ones will.
    """
    seen, known = mask if mask.dtype == torch.bool else mask == 0, True
    if mask.is_floating_point():  # a bias is no mask
        known = bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    if mask.shape[1] > 1 or not known:
        raise UnsupportedError(
            f"attention_mask: got one of shape {list(mask.shape)} in a full-attention layer, "
            "allowed is one for all heads that says which tokens are seen: a bias of the logits is "
            "nothing that an index searches by"
        )
    seen, real = seen[:, 0], seen[:, 0, -1]
    T, N = mask.shape[-2:]
    causal = torch.ones(T, N, dtype=torch.bool, device=mask.device).tril(N - T)
    padding = None if bool(real.all()) else real
    if torch.equal(seen, causal & real[:, None]):
        return Seen(padding)
    if bool((seen & ~real[:, None]).any()):
        raise UnsupportedError(
            f"attention_mask: got one of shape {list(mask.shape)} in a full-attention layer, that "
            "hides from the newest token some that earlier ones see; allowed is that it sees them "
            "all, for the tokens that are decoded after it search among all"
        )
    return Seen(padding, seen)


def _check_past(layer: AttentionLayer, mask: Tensor | None) -> None:
    """Raises UnsupportedError where the mask differs from the padding of past tokens."""
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

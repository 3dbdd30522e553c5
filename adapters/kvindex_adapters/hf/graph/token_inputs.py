"""`TokenInputs`: copies the arguments of each decode step to fixed addresses.

The CUDA graph of the decode step reads the arguments from these addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core import check
from kvindex.core.graphs import GRAPHS
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.sliding import grows
from kvindex_adapters.hf.model.cache_argument import CACHE

VALUES = (Tensor, bool, int, float, str, type(None))
"""Allowed types of arguments. Tensors are copied to the addresses that the CUDA graph reads."""

MASK = "attention_mask"
"""The only argument whose size grows with each token.

A captured decoder gets None instead, because the cache layers store the padding, and positions are
passed as a separate argument.
"""


def is_one_token(given: Mapping[str, Any]) -> bool:
    """Return True if a call has exactly one new token per sequence."""
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    read = embeddings if ids is None else ids
    return isinstance(read, Tensor) and read.ndim > 1 and read.shape[1] == 1


def refusal(cache: IndexCache, layers: list[AttentionLayer], given: Mapping[str, Any]) -> str:
    """Return the reason why a graph cannot replace a decode step with these arguments, or "" if it
    can.

    Args:
        cache: The cache.
        layers: The result of `cache.attention_layers()`.
        given: All arguments of the call, by name.
    """
    for name, value in given.items():
        if name == MASK and isinstance(value, dict) and not any(map(_given, value.values())):
            continue
        if not isinstance(value, VALUES) and value is not cache:
            return f"{name}: got a {type(value).__name__}, allowed are tensors and numbers"
    if len(layers) < len(cache.indexed):
        return "tokens: got 0, allowed is at least 1"
    kind = layers[0].index.geometry.device.type
    if kind not in GRAPHS:
        return f"device: got {kind}, allowed is cuda"
    if torch.is_grad_enabled():
        return "gradients: got them enabled, allowed is torch.no_grad()"
    if torch.is_autocast_enabled(kind):
        return "autocast: got it enabled"
    for number, other in enumerate(cache.layers):
        if why := grows(other):
            return f"layer {number}: {why}"
    return ""


def layer_refusal(cache: IndexCache) -> str:
    """Find the first layer whose attention cannot be captured in a CUDA graph.

    Return the number of this layer and the reason, as text. Return "" if there is no such layer.
    """
    for number, layer in zip(cache.indexed, cache.attention_layers(), strict=True):
        if why := layer.capture_refusal():
            return f"layer {number}: {why}"
    return ""


class TokenInputs:
    """The arguments of a decode step, copied to fixed addresses, and the padding in the cache."""

    def __init__(self) -> None:
        self._kinds: dict[str, object] = {}
        self._values: dict[str, Any] = {}
        self.look_again()

    def look_again(self) -> None:
        """Forget whether the cache contains padding, so that the next decode step checks this
        again.

        Call this when tokens were added or removed without a replay.
        """
        self._known: Tensor | None = None  # bool [B, n], False for padding among the first n tokens
        self._padded = False

    @property
    def padded(self) -> bool:
        """True if any token in the cache is padding."""
        return self._padded

    def arguments(self, cache: IndexCache) -> dict[str, Any]:
        """Return the arguments of the current step by name."""
        return {**self._values, CACHE: cache}

    def take(self, given: Mapping[str, Any]) -> bool:
        """Copy the arguments of a decode step to the fixed addresses that a CUDA graph reads.

        Return True if nothing except the contents of tensors differs from the previous step.
        """
        kinds = {
            name: check.kind(value) if isinstance(value, Tensor) else value
            for name, value in given.items()
            if name not in (MASK, CACHE)
        }
        if isinstance(given.get(MASK), dict):
            kinds["types of layers"] = sorted(given[MASK])
        kinds["inference"] = torch.is_inference_mode_enabled()
        same = kinds == self._kinds
        if not same:
            self._kinds = kinds
            self._values = {name: given[name] for name in kinds if name in given}
            with torch.inference_mode(False):
                for name, value in self._values.items():
                    if isinstance(value, Tensor):
                        self._values[name] = value.new_empty(value.shape)
            if MASK in given:  # a single mask, or a dict with a mask for each type of layer
                mask = given[MASK]
                self._values[MASK] = dict.fromkeys(mask) if isinstance(mask, dict) else None
        for name, value in self._values.items():
            if isinstance(value, Tensor):
                value.copy_(given[name])
        return same

    def mask_refusal(self, mask: Tensor | dict[str, None] | None, layer: AttentionLayer) -> str:
        """Check that a mask agrees with the padding in the cache, and that the new token is not
        padding.

        Args:
            mask: The padding mask `[B, N + 1]`, a dict of masks by type of layer, or None.
            layer: An attention layer of the cache.

        Returns:
            The reason why the mask does not agree, or "".
        """
        if self._known is None:
            valid = layer.valid
            self._known = (
                torch.ones((layer.batch_size, 0), dtype=torch.bool) if valid is None else valid
            )
            self._padded = not bool(self._known.all())
        if mask is None or isinstance(mask, dict):
            return f"{MASK}: got none, but some tokens are padded" if self._padded else ""
        known, length = self._known, len(layer) + 1
        if mask.shape == (len(known), length):
            if not self._padded and bool(mask.all()):
                return ""
            want = functional.pad(known.to(mask.device), (0, length - known.shape[1]), value=True)
            if self._padded and torch.equal(mask.bool(), want):
                return ""
        return f"{MASK}: got one that is not the mask of the tokens so far, followed by a real one"


def _given(value: object) -> bool:
    return value is not None

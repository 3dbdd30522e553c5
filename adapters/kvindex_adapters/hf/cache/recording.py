"""Layers of fixed size that record older tokens, so that assisted decoding can remove tokens.

`DynamicCache.activate_past_recording` lets sliding windows and convolution states grow.
transformers calls it for assisted decoding, and does not end this mode after the answer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicSlidingWindowLayer


def stop_recording(layer: Any) -> None:
    """End the recording in a cache layer, and delete the older tokens that it has recorded."""
    if not vars(layer).get("record_past"):  # transformers 5.17 lacks this attribute
        return
    layer.record_past = False
    if kept := _visible(layer):
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]
    for number, state in vars(layer).get("conv_states", {}).items():
        if state is not None:
            size = layer.conv_kernel_size[number]
            missing = max(size - state.shape[-1], 0)  # a prompt shorter than the convolution
            layer.conv_states[number] = functional.pad(state, (missing, 0))[..., -size:].clone()


def check_window(layer: Any) -> None:
    """Raise RuntimeError if a sliding-window layer lacks tokens that the next token attends to.

    This is so if more tokens were removed than the layer had recorded. Other layers pass.
    """
    needed = _visible(layer)
    if needed and (stored := layer.keys.shape[2]) < needed:
        raise RuntimeError(
            f"tokens_to_remove: got a number after which a sliding window has {stored} tokens, but "
            f"the next token attends to {needed}; older tokens were discarded already"
        )


def linear_states(layer: Any) -> list[Tensor]:
    """Return the convolution and recurrent states of a layer. [] if it has no linear attention."""
    found: list[Any] = []
    for name in ("conv_states", "recurrent_states"):
        states = vars(layer).get(name)
        found += states.values() if isinstance(states, dict) else [states]
    return [state for state in found if state is not None]


def _visible(layer: Any) -> int:
    """Return how many earlier tokens the next token attends to in a sliding-window layer. 0 for any
    other layer."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return 0
    return max(min(int(layer.get_seq_length()), layer.sliding_window - 1), 0)

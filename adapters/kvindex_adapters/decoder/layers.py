"""The forward pass: from ids to logits, through layers of attention and a perceptron.

No function here asks the device for a number, so one token's pass can be captured as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kvindex_adapters.llama.rotary import rotate
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, Weights, whole


class Attention(Protocol):
    """What a layer attends through: `kvindex.AttentionLayer`, or `dense.DenseAttention`."""

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens and attend from them, causally: `[B, H, T, D]`."""
        ...


def forward(
    weights: Weights,
    ids: Tensor,
    positions: Tensor,
    attentions: Sequence[Attention],
    head_dim: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Logits `[B, V]` after the last of ids int64 `[B, T]`, which every layer appends.

    positions: int64 `[B, T]`; attentions: one a layer; valid: bool `[B, T]`, which are no padding.
    """
    hidden = functional.embedding(ids, weights.embedding)
    angles = weights.rotary.at(positions, hidden.dtype)
    for layer, attention in zip(weights.layers, attentions, strict=True):
        add_block(hidden, layer, attention, angles, head_dim, valid)
    return logits(hidden[:, -1], weights)


def add_block(
    hidden: Tensor,
    layer: LayerWeights,
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    valid: Tensor | None,
) -> None:
    """One layer: attention, then the perceptron, each added to hidden `[B, T, hidden]` in place."""
    normed = normalize(hidden, layer.attention_norm)
    hidden += attend(normed, layer, attention, angles, head_dim, valid)
    hidden += perceptron(normalize(hidden, layer.mlp_norm), layer)


def logits(hidden: Tensor, weights: Weights) -> Tensor:
    """Logits `[B, V]` of hidden `[B, hidden]` after the last layer."""
    return whole(linear(normalize(hidden, weights.norm), weights.head), weights)


def attend(
    hidden: Tensor,
    layer: LayerWeights,
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    valid: Tensor | None,
) -> Tensor:
    """Attention of hidden `[B, T, hidden]`, of the same shape; zeros from padded tokens."""
    queries = rotate(heads(hidden, layer.query, layer.query_norm, head_dim), *angles)
    keys = rotate(heads(hidden, layer.key, layer.key_norm, head_dim), *angles)
    values = heads(hidden, layer.value, None, head_dim)
    output = attention.step(queries, keys, values, valid=valid)
    if valid is not None:
        output = output.masked_fill(~valid[:, None, :, None], 0)
    return summed(linear(output.transpose(1, 2).flatten(2), layer.output), layer)


def heads(hidden: Tensor, projection: Linear, norm: Norm | None, head_dim: int) -> Tensor:
    """Project hidden `[B, T, hidden]` to heads `[B, heads, T, D]`, and normalize each."""
    parts = linear(hidden, projection).view(*hidden.shape[:2], -1, head_dim)
    if norm is not None:
        parts = normalize(parts, norm)
    return parts.transpose(1, 2)


def perceptron(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """The gated perceptron (SwiGLU: Shazeer, 2020) of hidden `[B, T, hidden]`."""
    gate = functional.silu(linear(hidden, layer.gate))
    return summed(linear(gate.mul_(linear(hidden, layer.up)), layer.down), layer)


def summed(partial: Tensor, layer: LayerWeights) -> Tensor:
    """What a layer adds to the residual, of all ranks, from this one's part."""
    return partial if layer.ranks is None else layer.ranks.sum(partial)


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """RMS normalization along the last dimension (Zhang and Sennrich, 2019), in float32.

    One kernel on a GPU. What it gives in 16 bits is rounded once, after the factors.
    """
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)


def linear(hidden: Tensor, projection: Linear) -> Tensor:
    """The product with a matrix, and its bias; one in FP8 is multiplied as what it stands for."""
    weight, bias, scale = projection
    if scale is not None:  # powers of two, so that this is exact
        weight = weight.to(hidden.dtype) * scale[:, None].to(hidden.dtype)
    return functional.linear(hidden, weight, bias)

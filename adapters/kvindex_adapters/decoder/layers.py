"""The forward pass: from ids to logits, through layers of attention and MLP.

No function here makes the host wait for the device, so a decode step can be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kvindex_adapters.llama.rotary import rotate
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, Weights, whole


class Attention(Protocol):
    """The attention of one layer: `kvindex.AttentionLayer`, or `dense.DenseAttention`."""

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens, and return causal attention from them, `[B, H, T, D]`."""
        ...


def forward(
    weights: Weights,
    ids: Tensor,
    positions: Tensor,
    attentions: Sequence[Attention],
    head_dim: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Append tokens to every layer, and compute logits after the last one.

    Args:
        weights: The model's weights.
        ids: Int64 `[B, T]`.
        positions: Int64 `[B, T]`.
        attentions: One per layer.
        head_dim: Dimension of a head, `D`.
        valid: Bool `[B, T]`, False for padding; None if there is none.

    Returns:
        Logits `[B, V]`.
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
    """Add a layer's attention, then its MLP, to hidden `[B, T, hidden]` in place."""
    normed = normalize(hidden, layer.attention_norm)
    hidden += attend(normed, layer, attention, angles, head_dim, valid)
    hidden += perceptron(normalize(hidden, layer.mlp_norm), layer)


def logits(hidden: Tensor, weights: Weights) -> Tensor:
    """Compute logits `[B, V]` from hidden states `[B, hidden]` after the last layer."""
    return whole(linear(normalize(hidden, weights.norm), weights.head), weights)


def attend(
    hidden: Tensor,
    layer: LayerWeights,
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    valid: Tensor | None,
) -> Tensor:
    """Compute a layer's attention, `[B, T, hidden]`. It is zero for padded tokens."""
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
    """Compute the gated MLP (SwiGLU: Shazeer, 2020) of hidden `[B, T, hidden]`."""
    gate = functional.silu(linear(hidden, layer.gate))
    return summed(linear(gate.mul_(linear(hidden, layer.up)), layer.down), layer)


def summed(partial: Tensor, layer: LayerWeights) -> Tensor:
    """Sum a product over all ranks of the layer."""
    return partial if layer.ranks is None else layer.ranks.sum(partial)


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """RMS normalization along the last dimension (Zhang and Sennrich, 2019), in float32.

    On a GPU this is one kernel. In 16 bits, the result is rounded only once, after the
    multiplication by the factors.
    """
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)


def linear(hidden: Tensor, projection: Linear) -> Tensor:
    """Multiply by a matrix, and add its bias. An FP8 matrix is first converted to the input's
    dtype."""
    weight, bias, scale = projection
    if scale is not None:  # scales are powers of two, so the conversion is exact
        weight = weight.to(hidden.dtype) * scale[:, None].to(hidden.dtype)
    return functional.linear(hidden, weight, bias)

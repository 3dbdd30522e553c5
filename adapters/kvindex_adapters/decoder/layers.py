"""The forward pass from token ids to logits, through layers of attention and MLP.

No function in this module makes the host wait for the device, so a CUDA graph can capture a decode
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kvindex_adapters.llama.rotary import rotate
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, Weights, whole


class Attention(Protocol):
    """Protocol for the attention of one layer. `AttentionLayer` and `DenseAttention` implement
    it."""

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Append `T` tokens, and return the causal attention of their queries, `[B, H, T, D]`."""
        ...


def forward(
    weights: Weights,
    ids: Tensor,
    positions: Tensor,
    attentions: Sequence[Attention],
    head_dim: int,
    valid: Tensor | None = None,
) -> Tensor:
    """Append tokens to every layer, and compute the logits for the next token.

    Args:
        weights: The model's weights.
        ids: Int64 `[B, T]`.
        positions: Int64 `[B, T]`.
        attentions: The attention object of each layer.
        head_dim: Dimension of a head, `D`.
        valid: Bool `[B, T]`, False for padding. None means no padding.

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
    """Run one transformer layer in place: add its attention, then its MLP, to `hidden` `[B, T,
    hidden]`."""
    normed = normalize(hidden, layer.attention_norm)
    hidden += attend(normed, layer, attention, angles, head_dim, valid)
    hidden += perceptron(normalize(hidden, layer.mlp_norm), layer)


def logits(hidden: Tensor, weights: Weights) -> Tensor:
    """Apply the final norm and the output head to hidden states `[B, hidden]`.

    Return logits `[B, V]`.
    """
    return whole(linear(normalize(hidden, weights.norm), weights.head), weights)


def attend(
    hidden: Tensor,
    layer: LayerWeights,
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    valid: Tensor | None,
) -> Tensor:
    """Compute the output of the attention block of a layer, `[B, T, hidden]`.

    `hidden` contains the normalized inputs of the block. The attention output of padding tokens is
    set to zero before the output projection.
    """
    queries = rotate(heads(hidden, layer.query, layer.query_norm, head_dim), *angles)
    keys = rotate(heads(hidden, layer.key, layer.key_norm, head_dim), *angles)
    values = heads(hidden, layer.value, None, head_dim)
    output = attention.step(queries, keys, values, valid=valid)
    if valid is not None:
        output = output.masked_fill(~valid[:, None, :, None], 0)
    return summed(linear(output.transpose(1, 2).flatten(2), layer.output), layer)


def heads(hidden: Tensor, projection: Linear, norm: Norm | None, head_dim: int) -> Tensor:
    """Project `hidden` `[B, T, hidden]` to heads `[B, heads, T, D]`, and normalize each head if the
    model has a norm for it."""
    parts = linear(hidden, projection).view(*hidden.shape[:2], -1, head_dim)
    if norm is not None:
        parts = normalize(parts, norm)
    return parts.transpose(1, 2)


def perceptron(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """Apply the gated MLP to `hidden` `[B, T, hidden]`.

    Source: Shazeer, GLU Variants Improve Transformer (2020), SwiGLU.
    """
    gate = functional.silu(linear(hidden, layer.gate))
    return summed(linear(gate.mul_(linear(hidden, layer.up)), layer.down), layer)


def summed(partial: Tensor, layer: LayerWeights) -> Tensor:
    """Sum a partial matrix product over all ranks, if the layer is sharded."""
    return partial if layer.ranks is None else layer.ranks.sum(partial)


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """Apply RMS normalization along the last dimension. It is computed in float32.

    The result is rounded to the dtype of `hidden` only once, after the multiplication by the norm's
    weight.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)


def linear(hidden: Tensor, projection: Linear) -> Tensor:
    """Multiply `hidden` by a projection matrix, and add the bias. FP8 matrices are first converted
    to the dtype of `hidden`."""
    weight, bias, scale = projection
    if scale is not None:  # this product is exact, because the scales are powers of two
        weight = weight.to(hidden.dtype) * scale[:, None].to(hidden.dtype)
    return functional.linear(hidden, weight, bias)

"""The forward pass from token ids to logits, through layers of attention and MLP.

No function in this module makes the host wait for the device, so a CUDA graph can capture a decode
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.core.protocol import Rows
from kvindex_adapters.llama import prompt
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
    *,
    every: bool = False,
) -> Tensor:
    """Append tokens to every layer, and compute the logits for the next token.

    Args:
        weights: The model's weights.
        ids: Int64 `[B, T]`.
        positions: Int64 `[B, T]`.
        attentions: The attention object of each layer.
        head_dim: Dimension of a head, `D`.
        valid: Bool `[B, T]`, False for padding. None means no padding.
        every: Compute logits for each of the `T` positions, not only for the last one.

    Returns:
        Logits `[B, V]`, or `[B, T, V]` with `every`.
    """
    hidden = functional.embedding(ids, weights.embedding)
    angles = weights.rotary.at(positions, hidden.dtype)
    for layer, attention in zip(weights.layers, attentions, strict=True):
        add_block(hidden, layer, attention, angles, head_dim, valid)
    if every:
        return logits(hidden.flatten(0, 1), weights).view(*ids.shape, -1)
    return logits(hidden[:, -1], weights)


def add_block(
    hidden: Tensor,
    layer: LayerWeights,
    attention: Attention,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    valid: Tensor | None,
    into: Rows | None = None,
) -> None:
    """Run one transformer layer in place: add its attention, then its MLP, to `hidden` `[B, T,
    hidden]`.

    `into` are the tensors `[B, G, T, D]` for the new keys and values. If it is None, they are
    allocated.
    """
    normed = normalize(hidden, layer.attention_norm)
    attended = attend(normed, layer, attention, angles, head_dim, valid, into)
    add_product(hidden, attended, layer.output, layer)
    del normed, attended
    add_product(hidden, gated(normalize(hidden, layer.mlp_norm), layer), layer.down, layer)


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
    into: Rows | None = None,
) -> Tensor:
    """Compute the attention of a layer before its output projection, `[B, T, H·D]`.

    `hidden` contains the normalized inputs of the block. The attention output of padding tokens is
    zero. `into` are the tensors for the new keys and values, or None.
    """
    queries, keys, values = project(hidden, layer, angles, head_dim, into)
    output = attention.step(queries, keys, values, valid=valid)
    if valid is not None:
        output = output.masked_fill(~valid[:, None, :, None], 0)
    return output.transpose(1, 2).flatten(2)


def project(
    hidden: Tensor,
    layer: LayerWeights,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    into: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries `[B, H, T, D]`, keys and values `[B, G, T, D]` of new tokens, rotated."""
    if prompt.fuses(hidden):
        query, key, value = multiply(hidden, layer.query, layer.key, layer.value)
        return prompt.rotated_heads(query, key, value, layer, angles, head_dim, into)
    queries = rotate(heads(hidden, layer.query, layer.query_norm, head_dim), *angles)
    keys = rotate(heads(hidden, layer.key, layer.key_norm, head_dim), *angles)
    values = heads(hidden, layer.value, None, head_dim)
    if into is None:
        return queries, keys, values
    return queries, into.keys.copy_(keys), into.values.copy_(values)


def heads(hidden: Tensor, projection: Linear, norm: Norm | None, head_dim: int) -> Tensor:
    """Project `hidden` `[B, T, hidden]` to heads `[B, heads, T, D]`, and normalize each head if the
    model has a norm for it."""
    parts = linear(hidden, projection).view(*hidden.shape[:2], -1, head_dim)
    if norm is not None:
        parts = normalize(parts, norm)
    return parts.transpose(1, 2)


def gated(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """Compute the gated activations of the MLP, before its down projection, `[B, T, inner]`.

    Source: Shazeer, GLU Variants Improve Transformer (2020), SwiGLU.
    """
    if prompt.fuses(hidden):
        gate, up = multiply(hidden, layer.gate, layer.up)
        return prompt.activated(gate, up)
    gate = functional.silu(linear(hidden, layer.gate))
    return gate.mul_(linear(hidden, layer.up))


def multiply(hidden: Tensor, *projections: Linear) -> Sequence[Tensor]:
    """Multiply `hidden` by several matrices, by all at once if they are adjacent in memory."""
    one = prompt.joined(*projections)
    if one is None:
        return [linear(hidden, projection) for projection in projections]
    sizes = [len(projection.weight) for projection in projections]
    return torch.split(linear(hidden, one), sizes, dim=-1)


def add_product(hidden: Tensor, x: Tensor, projection: Linear, layer: LayerWeights) -> None:
    """Add the product of `x` and a matrix to `hidden` `[B, T, hidden]` in place.

    On a GPU, the matrix product itself adds, so the sum is rounded once.
    """
    alone = layer.ranks is None and projection.bias is None
    if alone and hidden.is_cuda and hidden.is_contiguous():
        weight = plain(projection, hidden.dtype)
        hidden.flatten(0, 1).addmm_(x.flatten(0, 1), weight.mT)
    else:
        hidden += summed(linear(x, projection), layer)


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
    """Multiply `hidden` by a projection matrix, and add the bias."""
    return functional.linear(hidden, plain(projection, hidden.dtype), projection.bias)


def plain(projection: Linear, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a projection. FP8 matrices are converted to `dtype`."""
    weight, scale = projection.weight, projection.scale
    if scale is None:
        return weight
    # this product is exact, because the scales are powers of two
    return weight.to(dtype) * scale[:, None].to(dtype)

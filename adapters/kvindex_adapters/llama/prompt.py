"""Fused parts of a layer's forward pass for several tokens per sequence, on a GPU with Triton.

Matrices with the same input are multiplied as one, if they are adjacent in memory. The results
equal those of `decoder.layers` up to rounding: the kernels compute in float32 and round once.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from kvindex.core.protocol import Rows
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, adjacent


@cache
def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def fuses(hidden: Tensor) -> bool:
    """Return True if this module processes hidden states `[B, T, hidden]`: a prompt on a GPU."""
    return hidden.is_cuda and hidden.shape[1] > 1 and has_triton()


def joined(*linears: Linear) -> Linear | None:
    """Return several linear layers with the same input as one, or None if they are not adjacent in
    memory."""
    weight = adjacent([linear.weight for linear in linears])
    if weight is None:
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    scales = [linear.scale for linear in linears if linear.scale is not None]
    bias = adjacent(biases) if len(biases) == len(linears) else None
    scale = adjacent(scales) if len(scales) == len(linears) else None
    if (biases and bias is None) or (scales and scale is None):
        return None
    return Linear(weight, bias, scale)


def rotated_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: LayerWeights,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    into: Rows | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize and rotate the projected heads of a layer.

    Args:
        query: Projected queries `[B, T, H·D]`.
        key: Projected keys `[B, T, G·D]`.
        value: Projected values `[B, T, G·D]`.
        layer: The layer's weights.
        angles: Cosines and sines `[B, 1, T, D]`.
        head_dim: Dimension of a head, `D`.
        into: Tensors for keys and values `[B, G, T, D]`; None to allocate them.

    Returns:
        Queries `[B, H, T, D]`, in which the heads of a token are stored one after the other, and
        keys and values.
    """
    from kvindex_cuda import triton  # imported here, because it is optional

    def normed(norm: Norm | None) -> triton.Norm | None:
        return None if norm is None else triton.Norm(*norm)

    B, T, width = query.shape
    queries = query.new_empty(B, T, width // head_dim, head_dim).transpose(1, 2)
    if into is None:
        shape = B, key.shape[2] // head_dim, T, head_dim
        into = Rows(key.new_empty(shape), key.new_empty(shape))
    cos, sin = angles
    triton.rotate_heads(
        query,
        key,
        value,
        cos[:, 0],
        sin[:, 0],
        queries,
        into.keys,
        into.values,
        query_norm=normed(layer.query_norm),
        key_norm=normed(layer.key_norm),
    )
    return queries, into.keys, into.values


def activated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) · up` for `[B, T, inner]`."""
    from kvindex_cuda import triton  # imported here, because it is optional

    return triton.swiglu(gate.flatten(0, 1), up.flatten(0, 1)).view(gate.shape)

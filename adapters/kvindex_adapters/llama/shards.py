"""Copy one rank's shard of a model: rows of the query, key, value, gate and up matrices, and
columns of the output and down matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.rotary import Rotary
from kvindex_adapters.llama.weights import LayerWeights, Linear, Norm, Weights


def shard(weights: Weights, ranks: HeadRanks) -> Weights:
    """Copy this rank's shard of a model to `ranks.device`, layer by layer.

    A shard has consecutive heads. Embedding and norms are not sharded, and not copied if they are
    already on the device. The language-model head is sharded only if the number of ranks divides
    its rows. FP8 scales are those of the whole matrices, so the ranks together compute the same
    products as one process.
    """
    device, frequencies = ranks.device, weights.rotary.frequencies
    embedding, head = weights.embedding.to(device), weights.head
    tied = head.weight.data_ptr() == weights.embedding.data_ptr()
    if tied:
        head = Linear(embedding, None if head.bias is None else head.bias.to(device))
    sharded = not len(head.weight) % ranks.count
    if sharded:
        head = _rows(head, ranks)
    return Weights(
        embedding=embedding,
        rotary=Rotary(frequencies.to(device), weights.rotary.factor),
        layers=tuple(_layer(layer, ranks) for layer in weights.layers),
        norm=_norm(weights.norm, device),
        head=head if tied else _copied(head, device),
        head_is_sharded=sharded,
    )


def _layer(layer: LayerWeights, ranks: HeadRanks) -> LayerWeights:
    device = ranks.device
    query, key, value = _together([layer.query, layer.key, layer.value], ranks)
    gate, up = _together([layer.gate, layer.up], ranks)
    return LayerWeights(
        attention_norm=_norm(layer.attention_norm, device),
        query=query,
        key=key,
        value=value,
        query_norm=None if layer.query_norm is None else _norm(layer.query_norm, device),
        key_norm=None if layer.key_norm is None else _norm(layer.key_norm, device),
        output=_columns(layer.output, ranks),
        mlp_norm=_norm(layer.mlp_norm, device),
        gate=gate,
        up=up,
        down=_columns(layer.down, ranks),
        ranks=ranks,
    )


def _together(linears: Sequence[Linear], ranks: HeadRanks) -> list[Linear]:
    """Copy this rank's rows of several matrices into one contiguous tensor. Do the same with biases
    and scales."""
    parts = [_rows(linear, ranks) for linear in linears]
    weights = _stacked([part.weight for part in parts], ranks.device)
    biases = _if_all([part.bias for part in parts], ranks.device)
    scales = _if_all([part.scale for part in parts], ranks.device)
    return [Linear(*own) for own in zip(weights, biases, scales, strict=True)]


def _if_all(parts: Sequence[Tensor | None], device: torch.device) -> Sequence[Tensor | None]:
    """Copy tensors into one contiguous tensor and return views of it. If one of them is None, copy
    the others separately."""
    some = [part for part in parts if part is not None]
    if len(some) == len(parts):
        return _stacked(some, device)
    return [None if part is None else _copy(part, device) for part in parts]


def _stacked(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    whole = torch.cat([part.to(device) for part in parts])
    return torch.split(whole, [len(part) for part in parts])


def _rows(linear: Linear, ranks: HeadRanks) -> Linear:
    """Return a view of this rank's rows of a matrix."""
    size = len(linear.weight) // ranks.count
    own = slice(ranks.rank * size, (ranks.rank + 1) * size)
    weight, *others = linear
    return Linear(weight[own], *(None if part is None else part[own] for part in others))


def _columns(linear: Linear, ranks: HeadRanks) -> Linear:
    """Copy this rank's columns of a matrix. Only rank 0 gets the bias, because the ranks' products
    are summed."""
    weight, bias, scale = linear
    size = weight.shape[1] // ranks.count
    own = weight[:, ranks.rank * size : (ranks.rank + 1) * size]
    return _copied(Linear(own, None if ranks.rank else bias, scale), ranks.device)


def _copied(linear: Linear, device: torch.device) -> Linear:
    weight, *others = linear
    copies = (None if part is None else _copy(part, device) for part in others)
    return Linear(_copy(weight, device), *copies)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a view, so that the memory of the tensor behind it can be freed."""
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def _norm(norm: Norm, device: torch.device) -> Norm:
    return Norm(norm.weight.to(device), norm.eps)

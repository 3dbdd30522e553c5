"""FP8 weights: a model's matrices as float8 e4m3fn, with a scale for each row."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch

from kvindex.core import check
from kvindex_adapters.llama.weights import LayerWeights, Linear, Weights

PLAIN = "plain"
WEIGHTS = (PLAIN, "fp8")
"""Values of `weights=`: as the model has them, or quantized."""


def check_weights(weights: str) -> None:
    """Raises ValueError for weights of another kind, or without what quantizes them."""
    check.one_of("weights", weights, WEIGHTS)
    if weights != PLAIN and find_spec("triton") is None:
        raise ValueError(f"weights: got {weights!r}, allowed without Triton installed is {PLAIN!r}")


def quantize(weights: Weights) -> Weights:
    """A model whose layers' matrices are FP8 copies; embedding, head and norms are the other's.

    Those that one product takes together lie one below the other. Scales are those of
    `kvindex_cuda.triton.to_fp8`. The head stays: rounding it moves logits more than all layers do
    (docs/decisions/0034).
    """
    return dataclasses.replace(weights, layers=tuple(map(_layer, weights.layers)))


def _layer(layer: LayerWeights) -> LayerWeights:
    query, key, value = _together(layer.query, layer.key, layer.value)
    gate, up = _together(layer.gate, layer.up)
    (output,), (down,) = _together(layer.output), _together(layer.down)
    return dataclasses.replace(
        layer, query=query, key=key, value=value, output=output, gate=gate, up=up, down=down
    )


def _together(*linears: Linear) -> list[Linear]:
    """The matrices as FP8, one below the other in memory, and so are their scales."""
    from kvindex_cuda.triton import Matrix, stack, to_fp8  # asked for where it is used

    whole = stack(*(to_fp8(Matrix(linear.weight)) for linear in linears))  # without biases
    sizes = [len(linear.weight) for linear in linears]
    parts = (torch.split(part, sizes) for part in whole if part is not None)
    made = zip(linears, *parts, strict=True)
    return [Linear(weight, linear.bias, scale) for linear, weight, scale in made]

"""FP8 weights: matrices as float8 e4m3fn, with one scale per matrix row."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch

from kvindex.core import check
from kvindex_adapters.llama.weights import LayerWeights, Linear, Weights

PLAIN = "plain"
WEIGHTS = (PLAIN, "fp8")
"""Values of the option `weights`: the model's weights, or copies quantized to FP8."""


def check_weights(weights: str) -> None:
    """Raise ValueError if `weights` is not in `WEIGHTS`, or is "fp8" and Triton is not
    installed."""
    check.one_of("weights", weights, WEIGHTS)
    if weights != PLAIN and find_spec("triton") is None:
        raise ValueError(
            f"weights: got {weights!r}, but Triton is not installed; install it or pass {PLAIN!r}"
        )


def quantize(weights: Weights) -> Weights:
    """Copy the matrices of all layers as FP8. Embedding, head and norms are not quantized.

    Matrices with the same input (query, key and value; gate and up) are adjacent in memory, so that
    one kernel can multiply them. The head is not quantized, because rounding the head changes the
    logits more than rounding all layers (docs/decisions/0034).
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
    """Quantize several matrices.

    The FP8 values are in one contiguous tensor, and the scales in another.
    """
    from kvindex_cuda.triton import Matrix, stack, to_fp8  # imported here, because it is optional

    whole = stack(*(to_fp8(Matrix(linear.weight)) for linear in linears))  # biases are not stacked
    sizes = [len(linear.weight) for linear in linears]
    parts = (torch.split(part, sizes) for part in whole if part is not None)
    made = zip(linears, *parts, strict=True)
    return [Linear(weight, linear.bias, scale) for linear, weight, scale in made]

"""Encode rotated keys on the device as signs, magnitudes and weights (ParisKV, A.2 and A.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops.codes import (
    FACTOR,
    OCTAVES,
    SUBSPACE,
    TINY,
    centers,
    centroids,
    decode,
    factors,
    levels,
    lloyd_max,
    log_factors,
    pack,
    tangent,
    unpack,
    weight_scale,
)
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import CODES_THREADS, MOST_BITS
from kvindex_cuda.runtime.launch import launch

__all__ = [
    "FACTOR",
    "OCTAVES",
    "SUBSPACE",
    "TINY",
    "centers",
    "centroids",
    "decode",
    "encode",
    "factors",
    "levels",
    "lloyd_max",
    "log_codes",
    "log_factors",
    "log_weights",
    "pack",
    "tangent",
    "unpack",
    "weight_scale",
]

MOST_BLOCKS = 2**16
"""Most thread blocks of `encode`. If there are more vectors, a thread block processes several."""


def encode(
    rotated: Tensor, norms: Tensor, levels: Tensor, block: int = SUBSPACE
) -> dict[str, Tensor]:
    """Encode rotated keys as `signs`, `magnitudes` and `weights`, like `kvindex.ops.codes.encode`.

    Signs and magnitudes equal those of the reference bit for bit. Weights may differ by rounding,
    because numbers are added up in another order. Raises ValueError for wrong dtypes or shapes, for
    a `block` that is not a multiple of 8 or does not divide `D`, or for a `D` above 2,048.
    """
    *outer, D = rotated.shape
    if D % SUBSPACE or D > SUBSPACE * CODES_THREADS or block < 1 or block % SUBSPACE or D % block:
        raise ValueError(
            f"rotated, block: got D = {D} and block = {block}; D must be a multiple of block and "
            f"at most {SUBSPACE * CODES_THREADS}, block a multiple of {SUBSPACE}"
        )
    given = of_type("rotated", rotated, torch.float32).contiguous()
    sizes = of_shape("norms", of_type("norms", norms, torch.float32), *outer).contiguous()
    bits = _bits_of(levels)
    M, count, device = D // SUBSPACE, norms.numel(), rotated.device
    codes = {
        "signs": torch.empty((*outer, M), dtype=torch.uint8, device=device),
        "magnitudes": torch.empty((*outer, bits, M), dtype=torch.uint8, device=device),
        "weights": torch.empty((*outer, D // block), dtype=torch.float32, device=device),
    }
    launch(
        "ops/codes.cu",
        "encode",
        (min(-(-count // (CODES_THREADS // M)), MOST_BLOCKS),),
        (CODES_THREADS,),
        arguments=dict(
            rotated=given,
            norms=sizes,
            levels=levels.contiguous(),
            **codes,
            count=count,
            M=M,
            bits=bits,
            share=block // SUBSPACE,
        ),
    )
    return codes


def log_codes(weights: Tensor, bits: int) -> Tensor:
    """Return the logarithms of float32 weights as integers of `bits` bits, int32. The logarithm is
    computed in double precision, as in `kvindex.ops.codes.log_codes`."""
    given = of_type("weights", weights, torch.float32).contiguous()
    codes = torch.empty(weights.shape, dtype=torch.int32, device=weights.device)
    _on_scale("log_codes", bits, weights=given, codes=codes)
    return codes


def log_weights(codes: Tensor, bits: int) -> Tensor:
    """Convert the results of `log_codes` back to float32 weights."""
    given = of_type("codes", codes, torch.int32).contiguous()
    weights = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    _on_scale("log_weights", bits, codes=given, weights=weights)
    return weights


def _on_scale(kernel: str, bits: int, *, weights: Tensor, codes: Tensor) -> None:
    if not 1 <= bits <= 16:
        raise ValueError(f"bits: got {bits}, allowed are 1 to 16")
    count = codes.numel()
    launch(
        "ops/codes.cu",
        kernel,
        (-(-count // CODES_THREADS),),
        (CODES_THREADS,),
        arguments=dict(weights=weights, codes=codes, count=count, bits=bits),
    )


def _bits_of(levels: Tensor) -> int:
    count = of_type("levels", levels, torch.float32).numel()
    bits = count.bit_length() - 1
    if levels.ndim != 1 or bits > MOST_BITS or count != 2**bits:
        raise ValueError(
            f"levels: got shape {tuple(levels.shape)}, allowed is [2^bits] with 0 to {MOST_BITS} "
            "bits"
        )
    return bits

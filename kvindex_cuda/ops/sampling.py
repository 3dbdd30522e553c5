"""Sample rows on the device, at random by their attention weights (docs/decisions/0010)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops import sampling as reference
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import SAMPLE_THREADS
from kvindex_cuda.runtime.launch import launch

MOST = 2**14
"""Most rows that fit into shared memory. For more rows, plain torch samples."""


def sample(logits: Tensor, ids: Tensor, k: int, sampled: int) -> tuple[Tensor, Tensor]:
    """Choose the rows to read: the best `k - sampled` of `P` rows, and `sampled` of the others,
    sampled at random.

    Sampling is systematic in the order of ids: a row is selected where the running sum of the rows'
    probabilities passes 1/2, 3/2, 5/2 and so on. The probability `π` of each row is known. The
    results equal those of `kvindex.ops.sampling.sample`, with rare exceptions due to rounding in
    float64. Rounding can matter if a running sum is very close to one of these numbers, or if a
    probability is very close to the middle between two float32 numbers.

    Args:
        logits: float32 `[B, G, P]`, descending, `-inf` for an unused slot.
        ids: int64 `[B, G, P]`.
        k: Number of rows to choose.
        sampled: Number of these rows to sample.

    Returns:
        Places among the `P` rows, int64 `[B, G, k]`, ascending, -1 for an unused slot; and log
        weights `-log π`, float32 `[B, G, k]`, `-inf` for an unused slot.
    """
    B, G, P = of_type("logits", logits, torch.float32).shape
    of_shape("ids", of_type("ids", ids, torch.int64), B, G, P)
    if P > MOST:
        return reference.sample(logits, ids, k, sampled)
    places = torch.empty((B, G, k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((B, G, k), device=logits.device)
    size = max(SAMPLE_THREADS, 1 << max(P - 1, 0).bit_length())
    launch(
        "ops/sampling.cu",
        "sample_rows",
        (B * G,),
        (SAMPLE_THREADS,),
        arguments=dict(
            logits=logits.contiguous(),
            ids=ids.contiguous(),
            places=places,
            weights=weights,
            size=size,
            count=P,
            k=k,
            sampled=sampled,
        ),
        shared_bytes=13 * size,
    )
    return places, weights

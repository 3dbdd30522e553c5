"""Sample rows at random on the device (docs/decisions/0010)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.ops import sampling as reference
from kvindex_cuda.runtime.arguments import of_shape, of_type
from kvindex_cuda.runtime.constants import SAMPLE_THREADS
from kvindex_cuda.runtime.launch import launch

MOST = 2**14
"""Most rows that shared memory has room for. More are sampled in plain torch."""


def sample(logits: Tensor, ids: Tensor, k: int, sampled: int) -> tuple[Tensor, Tensor]:
    """Which rows are read, of `P` with logits float32 `[B, G, P]`, descending, `-inf` for none:
    the best `k - sampled`, and `sampled` of the others, each with a known chance `π`.

    ids: int64 `[B, G, P]`: drawing is systematic along them. Returns places among the `P`, int64
    `[B, G, k]`, ascending, -1 for none, and log weights `-log π`, float32 `[B, G, k]`, `-inf` for
    none. Equal to the reference's but where a sum of chances lies within float64's rounding of
    half an odd number, or a chance within it of a tie between two float32.
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

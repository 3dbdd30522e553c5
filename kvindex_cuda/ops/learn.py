"""Centers of blocks and the scale of weights, learned as keys come: `kvindex.ops.learn`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvindex.ops.learn import HEADROOM, LEAN, SEEN
from kvindex_cuda.runtime.arguments import CODES, contiguous_rows, of_shape, of_type, strides, wide
from kvindex_cuda.runtime.constants import LEARN_TALL, LEARN_THREADS
from kvindex_cuda.runtime.launch import launch

__all__ = ["HEADROOM", "LEAN", "SEEN", "centers", "weight_scale"]

WIDEST = 1024
"""The largest head dimension whose sums fit shared memory."""


def centers(
    keys: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor], *, start: int, every: int
) -> dict[str, Tensor]:
    """Centers bfloat16 `[B, G, S, D]` and `known` bool `[B, S]`: as `kvindex.ops.learn.centers`.

    Sums in double, in another order. Raises ValueError for wrong dtypes or shapes, a `D` that 8
    does not divide or above 1,024.
    """
    B, G, N, D = of_type("keys", keys, *CODES).shape
    if D % 8 or D > WIDEST:
        raise ValueError(f"keys: got D = {D}, allowed are multiples of 8 up to {WIDEST}")
    if start < 0 or every < 1:
        raise ValueError(f"start, every: got {start}, {every}, allowed are from 0 and from 1 on")
    given, flags = contiguous_rows(keys, 1), flags_of(valid, B, N)
    old, held = known_of(learned, keys)
    before = old.shape[2]
    S = max(before, -(-(start + N) // every))
    found = torch.empty((B, G, S, D), dtype=torch.bfloat16, device=keys.device)
    known = torch.empty((B, S), dtype=torch.bool, device=keys.device)
    launch(
        "append/learn.cu",
        "learn",
        (S, G, B),
        (LEARN_THREADS,),
        arguments=dict(
            keys=given,
            valid=flags,
            old_centers=old,
            old_known=held,
            centers=found,
            known=known,
            old_scale=None,
            weight_scale=None,
            wrong=None,
            count=N,
            dim=D,
            before=before,
            old_row=before,
            row=S,
            start=start,
            every=every,
            begin=0,
            segments=S,
            skip=S,
            skipped=0,
            **strides("keys", given, "batch", "head", "token"),
            **strides("valid", flags, "batch"),
        ),
        shared_bytes=shared_bytes(D),
        DTYPE=CODES[keys.dtype],
        WIDE=int(wide(given)),
    )
    return {"centers": found, "known": known}


def known_of(learned: Mapping[str, Tensor], keys: Tensor) -> tuple[Tensor, Tensor]:
    """Centers bfloat16 `[B, G, S, D]` and `known` bool `[B, S]` that are learned, or none of them.

    Both contiguous. Raises ValueError for wrong dtypes or shapes.
    """
    B, G, _, D = keys.shape
    old = learned.get("centers", keys.new_zeros((B, G, 0, D), dtype=torch.bfloat16))
    held = learned.get("known", keys.new_zeros((B, 0), dtype=torch.bool))
    before = of_type("centers", old, torch.bfloat16).shape[2]
    of_shape("known", of_type("known", held, torch.bool), B, before)
    return of_shape("centers", old, B, G, before, D).contiguous(), held.contiguous()


def weight_scale(
    norms: Tensor, valid: Tensor | None, learned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`weight_scale` float32 `[B, G]`: as `kvindex.ops.learn.weight_scale`. norms: `[B, G, N]`."""
    B, G, N = of_type("norms", norms, torch.float32).shape
    flags, old = flags_of(valid, B, N), learned.get("weight_scale")
    if old is not None:
        of_shape("weight_scale", of_type("weight_scale", old, torch.float32), B, G)
        old = old.contiguous()
    found = norms.new_zeros((B, G)) if old is None else old.clone()
    launch(
        "append/learn.cu",
        "weight_scale",
        (windows(N), B * G),
        (LEARN_THREADS,),
        arguments=dict(
            norms=norms.contiguous(),
            valid=flags,
            old_scale=old,
            weight_scale=found,
            count=N,
            **strides("valid", flags, "batch"),
            kv_heads=G,
        ),
        DTYPE=0,
        WIDE=1,
    )
    return {"weight_scale": found}


def answer(keys: Tensor) -> Tensor:
    """Where the kernel puts references of keys `[B, G, N, D]`, float32 `[B, G]`.

    Zeros where several blocks look for the largest norm, each of which raises it to its own.
    """
    make = torch.empty if windows(keys.shape[2]) == 1 else torch.zeros
    return make(keys.shape[:2], dtype=torch.float32, device=keys.device)


def windows(count: int) -> int:
    """Blocks that look for the largest norm of so many keys' first ones."""
    return -(-min(count, SEEN) // LEARN_THREADS)


def shared_bytes(dim: int) -> int:
    """Dynamic shared memory of `learn`."""
    return 8 * dim * (1 + min(LEARN_TALL, LEARN_THREADS * 8 // dim))


def flags_of(valid: Tensor | None, batch: int, count: int) -> Tensor | None:
    """Flags bool `[B, N]` whose rows are contiguous. Raises ValueError for others."""
    if valid is None:
        return None
    return contiguous_rows(of_shape("valid", of_type("valid", valid, torch.bool), batch, count), 1)

"""Run the operations of a decode step that come before and after the layers of a model.

Before the layers, these are embeddings and rotary angles. After the layers, it is the choice of the
most likely token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kvindex_cuda.triton.kernels import ends as kernels
from kvindex_cuda.triton.operands import DTYPES, Tile, gapless, launch, shaped

COLUMNS, LOGITS = 1024, 2048
"""Numbers that a Triton program reads: COLUMNS of an embedding, LOGITS of the logits."""


def begin_token(
    ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    frequencies: Tensor,
    factor: float,
    *,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Look up the embeddings of tokens and compute their rotary angles, in one launch.

    Args:
        ids: Token ids, int64 `[B]`, of any stride. For an id outside of 0 to V - 1, the result is
            NaN.
        positions: int64 `[B]`, of any stride.
        embedding: Embedding matrix `[V, N]`, float32, float16 or bfloat16. All results have its
            dtype.
        frequencies: Angles per position, float32 `[D/2]`. Both halves of a head use the same
            angles.
        factor: Multiplies cosines and sines, which are computed in float32 and rounded once.
        overlap: See `Tile`.

    Returns:
        Hidden `[B, N]`, cosines and sines `[B, D]`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"ids: got shape {list(ids.shape)}, allowed is [B]")
    if embedding.ndim != 2 or not embedding.numel() or embedding.dtype not in DTYPES:
        raise ValueError(
            f"embedding: got {embedding.dtype} of shape {list(embedding.shape)}, allowed is "
            f"[V, N] of one of {DTYPES}"
        )
    if frequencies.ndim != 1 or not len(frequencies):
        raise ValueError(f"frequencies: got shape {list(frequencies.shape)}, allowed is [D/2]")
    (B, device), (V, N), D = (len(ids), embedding.device), embedding.shape, 2 * len(frequencies)
    shaped("positions", positions, B)
    for name, given in (("ids", ids), ("positions", positions)):
        if given.dtype != torch.int64 or given.device != device:
            raise ValueError(
                f"{name}: got {given.dtype} on {given.device}, allowed is int64 on {device}"
            )
    gapless("embedding", embedding, embedding.dtype, device)
    gapless("frequencies", frequencies, torch.float32, device)
    hidden = torch.empty((B, N), dtype=embedding.dtype, device=device)
    cos, sin = torch.empty((2, B, D), dtype=embedding.dtype, device=device)
    launch(
        kernels.begin_token,
        (1 + cdiv(N, COLUMNS), B),
        Tile(overlap=overlap),
        device,
        ids=ids,
        id_step=ids.stride(0),
        positions=positions,
        position_step=positions.stride(0),
        embedding=embedding,
        embedding_step=embedding.stride(0),
        frequencies=frequencies,
        factor=factor,
        hidden=hidden,
        cos=cos,
        sin=sin,
        V=V,
        N=N,
        D=D,
        BLOCK=COLUMNS,
        HALF=next_power_of_2(D // 2),
    )
    return hidden, cos, sin


def most_likely(
    logits: Tensor, scratch: Tensor, *, out: Tensor | None = None, overlap: bool = False
) -> Tensor:
    """Return the token with the highest logit of each sequence, int64 `[B]`, in one launch.

    Of tokens with equal logits, the lowest id is returned. NaN counts as the highest logit, as in
    torch.

    Args:
        logits: `[B, V]`, float32, float16 or bfloat16.
        scratch: Contiguous zeros, int64 `[B or more, 2]`, which are zeros again after the launch.
            Launches that run concurrently need separate tensors.
        out: Tensor to which the tokens are written.
        overlap: See `Tile`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    if logits.ndim != 2 or not logits.numel() or logits.dtype not in DTYPES:
        raise ValueError(
            f"logits: got {logits.dtype} of shape {list(logits.shape)}, allowed is [B, V] of one "
            f"of {DTYPES}"
        )
    (B, V), device = logits.shape, logits.device
    gapless("logits", logits, logits.dtype, device)
    if scratch.ndim != 2 or len(scratch) < B or not scratch.is_contiguous():
        raise ValueError(
            f"scratch: got shape {list(scratch.shape)} with strides {scratch.stride()}, allowed "
            f"is a contiguous tensor [{B} or more, 2]"
        )
    gapless("scratch", shaped("scratch", scratch, len(scratch), 2), torch.int64, device)
    tokens = torch.empty(B, dtype=torch.int64, device=device) if out is None else out
    gapless("out", shaped("out", tokens, B), torch.int64, device)
    launch(
        kernels.most_likely,
        (cdiv(V, LOGITS), B),
        Tile(overlap=overlap),
        device,
        logits=logits,
        step=logits.stride(0),
        scratch=scratch,
        tokens=tokens,
        V=V,
        BLOCK=LOGITS,
    )
    return tokens

"""Exact top-k selection by score on the device. Of entries with equal scores, the entry with the
lower index is selected."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core.protocol import UNUSED
from kvindex_cuda.runtime.arguments import busy, contiguous_rows, of_shape, of_type, strides
from kvindex_cuda.runtime.constants import BINS, DIGIT, SORTED, TILE
from kvindex_cuda.runtime.launch import Argument, launch

THREADS = 256

NEVER = float("-inf")

MOST = TILE * 65535
"""Most entries in a row of scores, limited by the largest grid."""


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest scores in descending order, and their positions.

    Args:
        scores: float32 `[..., N]`. Entries of `-inf` are never selected.
        k: Number of scores to select.

    Returns:
        Scores float32 `[..., k]` and positions int64 `[..., k]`. If fewer than `k` entries can be
        selected, the remaining slots contain `-inf` and -1.
    """
    N = _entries("scores", of_type("scores", scores, torch.float32))
    flat = scores.reshape(-1, N) if N else scores.new_empty((scores[..., 0:0].numel(), 0))
    shape, kept = (*scores.shape[:-1], k), min(k, N)
    best = torch.full(shape, NEVER, device=scores.device)
    positions = torch.full(shape, UNUSED, device=scores.device)
    if kept == 0 or best.numel() == 0:
        return best, positions
    flat = flat.contiguous()
    state = _cut(flat, k=kept)
    R, bits, device = len(flat), _bits(N), scores.device
    filled = torch.zeros(R, dtype=torch.int32, device=device)
    words = torch.zeros((R, kept), dtype=torch.int64, device=device)
    grid = R, busy(device, R, N, 4096)
    launch(
        "ops/select.cu",
        "collect",
        grid,
        (THREADS,),
        arguments=dict(
            scores=flat, state=state, filled=filled, words=words, n=N, bits=bits, k=kept
        ),
    )
    if kept > SORTED:
        words, last = words.sort(dim=-1, descending=True).values, 2**bits - 1
        found = torch.where(words > 0, last - (words & last), UNUSED)
        values = flat.gather(-1, found.clamp_min(0)).masked_fill(found < 0, NEVER)
        best.view(R, k)[:, :kept], positions.view(R, k)[:, :kept] = values, found
        return best, positions
    size = max(64, 2 ** (kept - 1).bit_length())
    launch(
        "ops/select.cu",
        "sort",
        (R,),
        (size // 2,),
        arguments=dict(
            words=words,
            scores=flat,
            best=best,
            positions=positions,
            width=kept,
            size=size,
            k=k,
            n=N,
            bits=bits,
        ),
    )
    return best, positions


def candidates(votes: Tensor, limits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the ids of the keys that at least one query head of a group selects, in ascending
    order.

    Each head selects the `limits[b]` keys with the most votes (the highest approximate scores). Of
    keys with equal votes, it selects those with the lower ids. The host waits for the device,
    because the size of the result depends on the data.

    Args:
        votes: int32 `[B, G, g, N]`.
        limits: int64 `[B]`, at most the number of valid keys of the sequence.
        valid: bool `[B, N]`, or None if all keys are valid.

    Returns:
        int64 `[B, G, C]`, with -1 in unused slots at the end.
    """
    B, G, g, _ = of_type("votes", votes, torch.int32).shape
    N = _entries("votes", votes)
    of_shape("limits", of_type("limits", limits, torch.int64), B)
    if limits.device.type == "cpu" and B and int(limits.max()) > N:
        raise ValueError(f"limits: got {int(limits.max())}, allowed are up to {N}")
    if valid is not None:
        valid = contiguous_rows(of_shape("valid", of_type("valid", valid, torch.bool), B, N), 1)
    if votes.numel() == 0:
        return torch.empty((B, G, 0), dtype=torch.int64, device=votes.device)
    votes, limits = votes.contiguous(), limits.to(votes.device).contiguous()
    state = _cut(votes.view(-1, N), limits=limits, valid=valid)
    words, counts = _marks(B * G, N, votes.device)
    launch(
        "ops/select.cu",
        "mark",
        tuple(counts.shape),
        (THREADS,),
        arguments=dict(
            scores=votes,
            valid=valid,
            state=state,
            words=words,
            counts=counts,
            **strides("valid", valid, "batch"),
            n=N,
            heads=g,
            kv_heads=G,
            bits=_bits(N),
        ),
        VOTES=1,
    )
    return _placed(words, counts).view(B, G, -1)


def compact(chosen: Tensor) -> Tensor:
    """Return the positions of True entries, in ascending order. The host waits for the device,
    because the size of the result depends on the data.

    Args:
        chosen: bool `[..., N]`.

    Returns:
        int64 `[..., C]`, padded with -1.
    """
    N = _entries("chosen", of_type("chosen", chosen, torch.bool))
    outer = chosen.shape[:-1]
    if chosen.numel() == 0:
        return torch.empty((*outer, 0), dtype=torch.int64, device=chosen.device)
    flat = contiguous_rows(chosen, 1) if chosen.ndim == 3 else chosen.reshape(1, -1, N).contiguous()
    B, G = flat.shape[:2]
    words, counts = _marks(B * G, N, chosen.device)
    launch(
        "ops/select.cu",
        "flags",
        tuple(counts.shape),
        (THREADS,),
        arguments=dict(
            flags=flat,
            words=words,
            counts=counts,
            **strides("flags", flat, "batch", "head"),
            n=N,
            kv_heads=G,
        ),
    )
    return _placed(words, counts).view(*outer, -1)


def _cut(
    scores: Tensor, *, k: int = 0, limits: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Find the lowest selected score in each matrix row of `scores` `[R, N]`. Returns a `Row`
    struct of select.cu for each matrix row, int64 `[R, 2]`.

    Without `limits`, the best `k` float32 scores of each matrix row are selected. With `limits`,
    the best `limits[b]` int32 scores of each matrix row of sequence `b` are selected.
    """
    (R, N), device = scores.shape, scores.device
    bits, each = _bits(N), R if limits is None else R // len(limits)
    state = torch.empty((R, 2), dtype=torch.int64, device=device)
    cleared = torch.zeros(R * (BINS + 4), dtype=torch.int32, device=device)
    histogram, extents, tickets = cleared.tensor_split([R * BINS, R * (BINS + 3)])
    grid, defines = (R, busy(device, R, N, 4096)), dict(VOTES=int(limits is not None))
    given: dict[str, Argument] = dict(scores=scores, valid=valid, tickets=tickets, state=state)
    given.update(strides("valid", valid, "batch"), n=N, rows_each=each, bits=bits)
    launch(
        "ops/select.cu",
        "range",
        grid,
        (THREADS,),
        arguments={**given, "limits": limits, "extents": extents, "k": k},
        **defines,
    )
    for _ in range(-(-(32 + bits) // DIGIT)):
        launch(
            "ops/select.cu",
            "digit",
            grid,
            (THREADS,),
            arguments={**given, "histogram": histogram},
            **defines,
        )
    return state


def _marks(rows: int, entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate two tensors for a kernel that marks entries of a matrix.

    The first tensor has one bit per entry, which is 1 if the entry is marked. The second tensor has
    the number of marked entries of each tile (a part of a matrix row). Both tensors are int32.
    """
    tiles = -(-entries // TILE)
    words = torch.empty((rows, tiles, TILE // 32), dtype=torch.int32, device=device)
    return words, torch.empty((rows, tiles), dtype=torch.int32, device=device)


def _placed(words: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(-1, dtype=torch.int64)
    width = int(ends[:, -1].max())
    ids = torch.full((len(ends), width), UNUSED, device=words.device)
    if width:
        arguments: dict[str, Argument] = dict(words=words, ends=ends, ids=ids, width=width)
        launch("ops/select.cu", "place", tuple(counts.shape), (THREADS,), arguments=arguments)
    return ids


def _entries(name: str, tensor: Tensor) -> int:
    """Return the size `N` of a tensor `[..., N]`. Raises ValueError if the kernels do not support
    so many entries."""
    if (N := tensor.shape[-1]) > MOST:
        raise ValueError(f"{name}: got {N} entries, allowed are up to {MOST}")
    return N


def _bits(entries: int) -> int:
    return (entries - 1).bit_length()

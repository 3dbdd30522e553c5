"""Sparse attention of a prompt: choose blocks of keys for each block of queries, and attend to
them."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from kvindex.ops.block_sparse import BLOCK, check_chosen
from kvindex_cuda.triton.kernels import block_sparse as kernels
from kvindex_cuda.triton.operands import DTYPES, Tile, launch

WIDEST = 2**15
"""Largest number of key blocks: 4 million tokens. A program reads the scores of all of them."""

MOST_WIDE = 256
"""Largest head dimension of the kernels."""

SUM_BYTES = 2**27
"""Most bytes of the sums of exponentials that `choose_sampled` has in memory at a time."""

PROGRAMS = 1024
"""Number of programs of a launch of `sum_blocks` that keeps a GPU busy."""


def attend_chosen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    chosen: Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend causally from the newest `T` tokens to the blocks of keys that are chosen for them.

    The arguments and results are those of `kvindex.ops.block_sparse.attend_chosen`. Queries, keys
    and values must have the same dtype, and be contiguous in the last dimension. The heads of a
    token of the output are stored one after the other.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, G, N, D]`.
        values: `[B, G, N, Dv]`.
        chosen: Bool `[B, H, QB, KB]`.
        scale: Factor of the logits.
        return_lse: Also return the log-sum-exp of the logits, float32 `[B, H, T]`.
        tile: Sizes of the launch: `columns` is the number of keys that a program reads at once, at
            most 128. None for the default.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A shape, dtype, stride or device does not fit.
    """
    check_chosen(queries, keys, values, chosen)
    for name, part in dict(queries=queries, keys=keys, values=values).items():
        if part.dtype != queries.dtype or part.dtype not in DTYPES:
            raise ValueError(
                f"{name}: got {part.dtype}, allowed is one of {DTYPES}, the same for all"
            )
        if part.stride(3) != 1 and part.shape[3] > 1:
            raise ValueError(
                f"{name}: got a stride of {part.stride(3)} in the last dimension, allowed is 1"
            )
    (B, H, T, D), (_, G, N, Dv) = queries.shape, values.shape
    _check_width(max(D, Dv))
    tile = tile_of(max(D, Dv), queries.element_size()) if tile is None else tile
    if BLOCK % tile.columns:
        raise ValueError(f"columns: got {tile.columns}, allowed is a divisor of {BLOCK}")
    listed, counts = _listed(chosen, (N - T) // BLOCK, tile)
    keys, values = _described(keys), _described(values)
    output = torch.empty((B, T, H, Dv), dtype=queries.dtype, device=queries.device)
    output = output.transpose(1, 2)
    wide, wide_v = (max(16, next_power_of_2(width)) for width in (D, Dv))
    lse = torch.empty((B, H, T), dtype=torch.float32, device=queries.device)
    launch(
        kernels.attend_chosen,
        (cdiv(T, BLOCK), B * H),
        tile,
        queries.device,
        queries=queries,
        keys=keys,
        values=values,
        key_blocks=_blocks(keys, tile.columns, wide),
        value_blocks=_blocks(values, tile.columns, wide_v),
        listed=listed,
        counts=counts,
        output=output,
        lse=lse,
        scale=float(scale),
        T=T,
        N=N,
        KB=chosen.shape[3],
        **_steps("query", queries),
        **_steps("key", keys),
        **_steps("value", values),
        **_steps("output", output),
        H=H,
        GROUP=H // G,
        D=D,
        DV=Dv,
        WIDE=wide,
        WIDE_V=wide_v,
        BLOCK=BLOCK,
        BLOCK_N=tile.columns,
        PIECES=BLOCK // tile.columns,
    )
    return (output, lse) if return_lse else output


def choose_pooled(
    queries: Tensor, means: Tensor, first: int, *, scale: float, mass: float
) -> Tensor:
    """Choose blocks of keys by the softmax weights of mean queries and mean keys.

    The result is that of `kvindex.selectors.PooledSelector(mass).choose`, up to rounding of
    weights near the threshold. If a score is NaN, all blocks before the own one are chosen.

    Args:
        queries: `[B, H, T, D]`, for the positions `first` to `first + T - 1`.
        means: Mean key of each block, float32 `[B, G, m, D]`, of all blocks before the last query's
            own block at least.
        first: Position of the first query, a multiple of 128.
        scale: Factor of the scores.
        mass: Fraction of the softmax weight to keep, in (0, 1].

    Returns:
        Bool `[B, H, QB, KB]`.

    Raises:
        ValueError: There are too many blocks of keys.

    Source: Lai et al., FlexPrefill (ICLR 2025), section 3.2.
    """
    (B, H, T, D), G = queries.shape, means.shape[1]
    QB, first_block = cdiv(T, BLOCK), first // BLOCK
    KB = first_block + QB
    if KB > WIDEST:
        raise ValueError(f"first: got {first}, allowed are prompts of {WIDEST * BLOCK} tokens")
    full = queries[:, :, : T - T % BLOCK].view(B, H, -1, BLOCK, D)
    parts = [full.mean(3, dtype=torch.float32)]
    if T % BLOCK:
        parts.append(queries[:, :, T - T % BLOCK :].mean(2, keepdim=True, dtype=torch.float32))
    pooled = torch.cat(parts, 2).view(B, G, H // G * QB, D)
    scores = (scale * pooled @ means[:, :, : KB - 1].mT).view(B, H, QB, KB - 1)
    chosen = torch.empty((B, H, QB, KB), dtype=torch.bool, device=queries.device)
    launch(
        kernels.choose_by_mass,
        (QB, B * H),
        _row_tile(KB),
        queries.device,
        scores=scores,
        chosen=chosen.view(torch.int8),
        mass=float(mass),
        first_block=first_block,
        QB=QB,
        KB=KB,
        WIDE=row_width(KB),
    )
    return chosen


def choose_sampled(
    queries: Tensor, keys: Tensor, first: int, *, scale: float, mass: float, count: int
) -> Tensor:
    """Choose blocks of keys by the exact attention weights of some queries of each block.

    The result is that of `kvindex.selectors.SampledSelector(mass, count).choose`, up to rounding of
    weights near the threshold. If a logit is NaN, all blocks before the own one are chosen.

    Args:
        queries: `[B, H, T, D]`, for the positions `first` to `first + T - 1`.
        keys: `[B, G, n · 128, D]`, of all blocks before the last query's own block at least, in the
            queries' dtype.
        first: Position of the first query, a multiple of 128.
        scale: Factor of the logits.
        mass: Fraction of the attention weight to keep, in (0, 1].
        count: Number of queries of a block that are taken, a divisor of 128.

    Returns:
        Bool `[B, H, QB, KB]`.

    Raises:
        ValueError: There are too many blocks of keys.
    """
    (B, H, T, D), G = queries.shape, keys.shape[1]
    QB, first_block = cdiv(T, BLOCK), first // BLOCK
    KB = first_block + QB
    if KB > WIDEST:
        raise ValueError(f"first: got {first}, allowed are prompts of {WIDEST * BLOCK} tokens")
    chosen = torch.empty((B, H, QB, KB), dtype=torch.bool, device=queries.device)
    if KB == 1:
        return chosen.fill_(True)
    _check_width(D)
    wide, keys = max(16, next_power_of_2(D)), _described(keys)
    tile = sampled_tile(H // G * count, wide * queries.element_size())
    rows, tiles = tile.rows, cdiv(H // G * count, tile.rows)
    # the buffer of sums limits how many blocks of queries are processed at a time
    some = max(1, SUM_BYTES // (4 * B * H * count * KB))
    for start in range(0, QB, some):
        part = queries[:, :, start * BLOCK : (start + some) * BLOCK]
        blocks = cdiv(part.shape[2], BLOCK)
        sums = torch.empty((B * H, blocks, count, KB - 1), device=queries.device)
        splits = max(1, min(KB - 1, PROGRAMS // (blocks * B * G * tiles)))
        launch(
            kernels.sum_blocks,
            (blocks, B * G * tiles, splits),
            tile,
            queries.device,
            queries=part,
            key_blocks=_blocks(keys, BLOCK, wide),
            sums=sums,
            first_block=first_block + start,
            T=part.shape[2],
            QB=blocks,
            KB=KB,
            scale=float(scale),
            **_steps("query", part),
            H=H,
            G=G,
            GROUP=H // G,
            D=D,
            WIDE=wide,
            COUNT=count,
            STEP=BLOCK // count,
            ROWS=rows,
            TILES=tiles,
            BLOCK=BLOCK,
        )
        these = torch.empty((B, H, blocks, KB), dtype=torch.bool, device=queries.device)
        launch(
            kernels.choose_by_sums,
            (blocks, B * H),
            _row_tile(KB),
            queries.device,
            sums=sums,
            chosen=these.view(torch.int8),
            mass=float(mass),
            first_block=first_block + start,
            QB=blocks,
            KB=KB,
            COUNT=count,
            WIDE=row_width(KB),
        )
        chosen[:, :, start : start + blocks] = these
    return chosen


def mean_keys(keys: Tensor) -> Tensor:
    """Return the mean key of each block, float32 `[B, G, n, D]`, of keys `[B, G, 128 n, D]`.

    Unlike `PooledSelector.summarize`, it does not raise an error for NaN.
    """
    B, G, N, D = keys.shape
    return keys.reshape(B, G, N // BLOCK, BLOCK, D).mean(3, dtype=torch.float32)


def tile_of(width: int, item_bytes: int) -> Tile:
    """Return the default tile of `attend_chosen` for a head dimension and the bytes of a number."""
    if item_bytes > 2:
        return Tile(columns=32, warps=8, stages=1)
    if width > 128:
        return Tile(columns=64, warps=8, stages=2)
    return Tile(columns=64, warps=4, stages=2)


def sampled_tile(pairs: int, row_bytes: int) -> Tile:
    """Return the tile of `sum_blocks`. Its queries and keys fit into shared memory (227 KiB).

    Args:
        pairs: Number of taken queries of all heads of a KV head.
        row_bytes: Bytes of a query or key in shared memory.
    """
    rows = max(16, min(128 if row_bytes <= 512 else 64, next_power_of_2(pairs)))
    stages = 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1
    return Tile(rows=rows, columns=BLOCK, warps=8 if rows > 64 else 4, stages=stages)


def _check_width(width: int) -> None:
    """Raise ValueError for a head dimension that does not fit into shared memory."""
    if width > MOST_WIDE:
        raise ValueError(
            f"D: got a head dimension of {width}, allowed is up to {MOST_WIDE} for sparse "
            "attention on a GPU; use full attention (prefill='dense')"
        )


def _listed(chosen: Tensor, first_block: int, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the numbers of the chosen blocks, int32 `[B, H, QB, KB]`, and their counts `[B, H,
    QB]`."""
    B, H, QB, KB = chosen.shape
    if KB > WIDEST:
        raise ValueError(f"chosen: got {KB} blocks of keys, allowed are up to {WIDEST}")
    listed = torch.empty((B, H, QB, KB), dtype=torch.int32, device=chosen.device)
    counts = torch.empty((B, H, QB), dtype=torch.int32, device=chosen.device)
    launch(
        kernels.list_chosen,
        (QB, B * H),
        _row_tile(KB),
        chosen.device,
        chosen=chosen.contiguous().view(torch.int8),
        listed=listed,
        counts=counts,
        KB=KB,
        first_block=first_block,
        QB=QB,
        WIDE=row_width(KB),
    )
    return listed, counts


def _described(part: Tensor) -> Tensor:
    """Return keys or values whose address and strides are multiples of 16 bytes, as the tensor
    memory accelerator requires. Others are copied."""
    size = part.element_size()
    odd = part.data_ptr() % 16 or any(step * size % 16 for step in part.stride()[:3])
    if not odd:
        return part
    B, heads, tokens, width = part.shape
    room = part.new_empty(B, heads, tokens, -(-width * size // 16) * 16 // size)
    return room[..., :width].copy_(part)


def _blocks(part: Tensor, rows: int, wide: int) -> TensorDescriptor:
    """Describe keys or values `[B, G, N, D]` for loads of `rows` rows of one head at a time."""
    return TensorDescriptor(part, list(part.shape), list(part.stride()), [1, 1, rows, wide])


def row_width(KB: int) -> int:
    """Return for how many numbers the kernels that read `KB` numbers are compiled: 256, 1,024,
    4,096, … There are few such widths, because Triton compiles a kernel for each of them."""
    width = 256
    while width < KB:
        width *= 4
    return min(width, WIDEST)


def compiled_lengths(tokens: int) -> list[int]:
    """Return lengths of prompts for which Triton compiles all kernels that prompts of up to
    `tokens` tokens need: one length for each `row_width`, in multiples of 128."""
    blocks, width, found = min(tokens // BLOCK, WIDEST), 0, []
    while width < blocks:
        width = row_width(width + 1)
        found.append(min(width, blocks) * BLOCK)
    return found


def _row_tile(KB: int) -> Tile:
    """Return the tile of a launch in which a program reads `KB` numbers."""
    return Tile(warps=4 if row_width(KB) <= 2048 else 8, stages=1)


def _steps(name: str, part: Tensor) -> dict[str, int]:
    """Return the strides of a tensor `[B, heads, T, D]`, keyed by the kernel's parameters."""
    return {f"{name}_{axis}": part.stride(at) for at, axis in enumerate(("batch", "head", "token"))}

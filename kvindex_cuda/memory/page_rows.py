"""Kernels that write rows (keys and values) to the pages of an engine such as vLLM, or gather whole
sequences from the pages."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.memory.write_rows import MOST_BLOCKS, PIECE
from kvindex_cuda.runtime.arguments import CODES, busy, of_shape, of_type, steps, wide
from kvindex_cuda.runtime.constants import WRITE_THREADS
from kvindex_cuda.runtime.launch import launch, load

WRITE, GATHER = "append/write_pages.cu", "append/gather_pages.cu"


PLAIN = dict(FP8_PAGES=0, DTYPE=0)
"""Macros of the kernels for pages that are not in FP8. These kernels do not use `DTYPE`."""

NUMBERS = 8
"""Numbers that a thread converts to FP8 at a time."""


def load_kernels(device: torch.device, *, fp8: torch.dtype | None = None) -> None:
    """Compile and load the kernels `write_pages` and `gather_pages` on a device in advance. During
    the capture of a CUDA graph, kernels cannot be compiled.

    Args:
        device: The device.
        fp8: If pages are in FP8: dtype of the keys and values that are written.
    """
    defines = PLAIN if fp8 is None else _converting(fp8)
    load(WRITE, "write_pages", device, **defines)
    load(GATHER, "gather_pages", device, **defines)


def write_pages(
    pages: Pages,
    layer: int,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    cache: RowCache | None = None,
) -> None:
    """Write the keys and values of new tokens to a layer's pages. A CUDA graph can capture this
    call.

    If pages are in FP8, numbers are divided by the layer's scale and rounded to the nearest e4m3
    number (ties to even), at most 448, as vLLM does on a GPU.

    Args:
        pages: Pages of all layers.
        layer: Number of the layer.
        keys: `[T, G, D]`, in the dtype of the pages. If pages are in FP8, float32, float16 or
            bfloat16.
        values: `[T, G, D]`, in the dtype of the keys.
        slots: Where each token is written, int64 `[T]`: `page · tokens + offset`, or a number below
            0 to skip the token.
        cache: The layer's row cache, with one group per KV head. Rows that this call overwrites are
            removed from the cache.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    rows, (given, defines) = pages.rows[layer], _pieces(pages, keys, values)
    key_scale, value_scale = pages.scales[layer] if pages.scales else (None, None)
    of_shape("slots", of_type("slots", slots, torch.int64), len(keys))
    total = _counted(prod(keys.shape[:2]) * given["pieces"])
    launch(
        WRITE,
        "write_pages",
        (min(-(-total // WRITE_THREADS), MOST_BLOCKS),),
        (WRITE_THREADS,),
        arguments=dict(
            keys=keys,
            values=values,
            slots=slots,
            base=pages.bases[layer],
            tags=cache.tags if cache else None,
            count=len(slots),
            kv_heads=keys.shape[1],
            most=len(rows) * pages.tokens,
            parts=pages.codes[layer].shape[2],
            rows_page=pages.strides["rows_page"],
            rows_part=pages.strides["rows_part"],
            rows_head=steps(rows)[1] * rows.element_size(),
            row_bytes=rows.stride(2) * rows.element_size(),
            cached=cache.capacity if cache else 0,
            key_scale=key_scale,
            value_scale=value_scale,
            **given,
        ),
        **defines,
    )


def gather_pages(
    pages: Pages,
    layer: int,
    copy: Tensor,
    *,
    tables: Tensor,
    lengths: Tensor,
    starts: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Copy the rows of whole sequences to `copy`, page by page in the order of tokens.

    Entries of `copy` beyond a sequence's last token stay unchanged.

    Args:
        pages: Pages of all layers. Each page must be contiguous.
        layer: Number of the layer.
        copy: `[R, width, G, tokens, 2 D]`, on the device of the codes.
        tables: Pages of each sequence, int32 `[R, blocks]`.
        lengths: Length of each sequence including its new tokens, int32 `[R]`.
        starts: Index of each sequence's first new token among all new tokens, then the number of
            all new tokens, int32 `[R + 1]`.
        keys: Keys of all new tokens, `[T, G, D]`. Rows of new tokens come from `keys` and `values`,
            not from the pages. If pages are in FP8, they are converted as `write_pages` does.
        values: Values of all new tokens, `[T, G, D]`.

    Raises:
        ValueError: Shapes, dtypes, strides or devices do not fit.
    """
    rows, (given, defines) = pages.rows[layer], _pieces(pages, keys, values)
    key_scale, value_scale = pages.scales[layer] if pages.scales else (None, None)
    if not rows.is_contiguous():
        raise ValueError(f"pages: got strides {rows.stride()}, allowed is a contiguous tensor")
    count, width = copy.shape[:2]
    of_shape("copy", of_type("copy", copy, rows.dtype), count, width, *rows.shape[1:])
    of_shape("lengths", of_type("lengths", lengths, torch.int32), count)
    of_shape("starts", of_type("starts", starts, torch.int32), count + 1)
    if not copy.is_contiguous():
        raise ValueError(f"copy: got strides {copy.stride()}, allowed is a contiguous tensor")
    total = _counted(width * prod(rows.shape[1:3]) * given["pieces"])
    launch(
        GATHER,
        "gather_pages",
        (busy(copy.device, count, total, WRITE_THREADS), count),
        (WRITE_THREADS,),
        arguments=dict(
            tables=of_type("tables", tables, torch.int32),
            lengths=lengths,
            starts=starts,
            keys=keys,
            values=values,
            base=pages.bases[layer],
            copy=copy,
            width=width,
            table=tables.stride(0),
            pages=len(rows),
            tokens=pages.tokens,
            kv_heads=keys.shape[1],
            key=given["width"],
            key_scale=key_scale,
            value_scale=value_scale,
            **{name: step for name, step in given.items() if name != "width"},
        ),
        **defines,
    )


def _counted(pieces: int) -> int:
    """Return `pieces`. Raises ValueError if this number does not fit into the 32 bits in which the
    kernels count."""
    if pieces >= 2**31:
        raise ValueError(
            f"rows: got {pieces} pieces of 16 bytes (or, in FP8, of {NUMBERS} numbers), allowed "
            "are fewer than 2^31"
        )
    return pieces


def _converting(dtype: torch.dtype) -> dict[str, int]:
    """Return the macros of the kernels that convert keys and values of a dtype to FP8."""
    return dict(FP8_PAGES=1, DTYPE=CODES[dtype])


def _pieces(pages: Pages, keys: Tensor, values: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes and strides of `keys` and `values` as arguments for the kernels, and the macros
    of the kernels.

    The sizes of a key (`width`) and of a row (`pieces`) are in pieces: 16 bytes, or 8 numbers if
    pages are in FP8. The strides between tokens and between KV heads are in units of 16 bytes.
    Raises ValueError for a dtype, shape or stride that the kernels do not support.
    """
    rows, fp8 = pages.rows[0], pages.scales is not None
    of_type("keys", keys, *(CODES if fp8 else [rows.dtype]))
    size = keys.element_size()
    numbers = NUMBERS if fp8 else PIECE // size
    given: dict[str, int] = {}
    for name, part in (("key", keys), ("value", values)):
        of_type(f"{name}s", part, keys.dtype)
        of_shape(f"{name}s", part, len(keys), rows.shape[1], rows.shape[3] // 2)
        if not wide(part) or part.stride(2) != 1 or part.shape[2] % numbers:
            raise ValueError(
                f"{name}s: got shape {tuple(part.shape)} with strides {part.stride()}, allowed are "
                f"contiguous rows of a multiple of {numbers} numbers, whose address and strides "
                f"are multiples of {PIECE} bytes"
            )
        token, head = (step * size // PIECE for step in steps(part)[:2])
        given |= {f"{name}_token": token, f"{name}_head": head}
    width = keys.shape[2] // numbers
    given |= dict(width=width, pieces=2 * width)
    return given, _converting(keys.dtype) if fp8 else PLAIN

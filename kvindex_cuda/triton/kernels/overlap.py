"""Functions for kernels that use programmatic dependent launch.

Such a kernel can start before the previous kernel has ended. While it waits for the previous
kernel, it can prefetch weights.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until the previous kernel and all kernels before it have ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Allow the next kernel to start. It starts once all programs have called this function."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait for the results of the previous kernel, and let the next kernel start."""
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)


@triton.jit
def bring_own(weight, N, K, BLOCK_N: tl.constexpr, FIRST: tl.constexpr):
    """Prefetch the matrix rows of a program into L2, from column `FIRST` on. Does not wait for the
    data.

    Each thread prefetches one matrix row, with `cp.async.bulk.prefetch` (PTX, from compute
    capability 9.0). The ranges begin and end at multiples of 16 bytes.
    """
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    first = tl.program_id(0) * BLOCK_N
    row_bytes = K * SIZE
    count = tl.where(K > FIRST, tl.minimum(BLOCK_N, N - first), 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        .reg .u32 thread;
        .reg .u64 at;
        mov.u32 thread, %tid.x;
        setp.lt.u32 asks, thread, $2;
        mul.wide.u32 at, thread, $3;
        add.u64 at, at, $1;
        @asks cp.async.bulk.prefetch.L2.global [at], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [
            weight.to(tl.int64, bitcast=True) + first.to(tl.int64) * row_bytes + FIRST * SIZE,
            count,
            row_bytes,
            row_bytes - FIRST * SIZE,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bring_rows(weight, rows, N, K, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    """If kernels overlap, prefetch the first `BLOCK_K` weights of each matrix row into L2."""
    if OVERLAP:
        SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = (BLOCK_K * SIZE + 127) // 128
        columns = tl.minimum(tl.arange(0, LINES) * (128 // SIZE), K - 1)
        at = weight + tl.minimum(rows, N - 1)[:, None].to(tl.int64) * K + columns[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.int64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

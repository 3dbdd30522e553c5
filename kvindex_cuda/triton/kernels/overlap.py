"""What launches of a chain share: waiting for the one before, asking for weights before that."""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until the launch before has ended, and with it all before that."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """When all programs have come here the next launch may begin, up to its own wait."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait for what the launch before wrote, and let the next one begin."""
    wait_for_previous(OVERLAP)
    let_next_begin(OVERLAP)


@triton.jit
def bring_own(weight, N, K, BLOCK_N: tl.constexpr, FIRST: tl.constexpr):
    """Ask for all of a program's rows of a matrix from column `FIRST` on, a thread a row.

    By `cp.async.bulk.prefetch` (PTX, from compute capability 9.0): what is asked for begins and
    ends at multiples of 16 bytes. Nothing waits for it.
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
    """Where launches overlap, ask for the first `BLOCK_K` weights of a matrix's rows."""
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

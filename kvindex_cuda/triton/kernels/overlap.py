"""What launches of a chain share: waiting for the one before, bringing in what the next reads."""

import triton
import triton.language as tl

LINE = 128
"""Bytes that one prefetch brings into L2."""


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait for what the launch before wrote, and let the next one begin."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def bring(ahead, AHEAD_LINES: tl.constexpr, LINES: tl.constexpr):
    """Each program asks for its share of `AHEAD_LINES` lines at an address, `LINES` at a time."""
    if AHEAD_LINES > 0:
        for first in range(tl.program_id(0) * LINES, AHEAD_LINES, tl.num_programs(0) * LINES):
            lines = tl.minimum(first + tl.arange(0, LINES), AHEAD_LINES - 1).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [ahead.to(tl.int64, bitcast=True) + lines * 128],
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


@triton.jit
def prefetch(ahead, AHEAD_LINES: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr):
    """Bring memory into L2 and do nothing else."""
    bring(ahead, AHEAD_LINES, LINES)
    after_previous(OVERLAP)

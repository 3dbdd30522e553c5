"""Constants that are used by kernels and by the Python code that launches them. The compiler gets
them as macros (`-D`)."""

from __future__ import annotations

from functools import cache

from kvindex.core import check
from kvindex.ops import coarse, codes, priority, transform
from kvindex.pariskv import block_layout, row_budget
from kvindex.pariskv import sign_votes as votes
from kvindex.pariskv import step_state as step
from kvindex.pariskv import tiered_votes as table
from kvindex.storage.codecs import BITS, CodecNumber

TOKENS = block_layout.BLOCK
"""Tokens of a block of codes or rows."""

BINS, EDGE, BUCKETS = step.BINS, 1024, step.BUCKETS
"""BINS: bins of a histogram of votes or scores. EDGE: entries of the bin that contains the
selection threshold, for which shared memory has room. BUCKETS: partial sums of exponentials, each
for a range of 16 octaves."""

APART = 32
"""Distance between the counters of two groups, in int32. Counters are apart because atomic
operations on the same memory line wait for each other."""

SAMPLED = votes.SAMPLED
"""Number of keys per group whose votes `prepare_query` samples to find a threshold."""

SCAN_WARPS, SCAN_STAGES, SCAN_BINNED = 8, 2, 65535
"""For a thread block of `scan`: number of warps, blocks of keys in flight for each warp, and
entries that its histogram in shared memory can count."""

SELECT_THREADS, SELECT_ENTRIES = 512, 8
"""For `select_rows`: threads per block, and entries per thread."""

VOTE_STAGES = 3
"""Number of blocks of keys in the shared memory of `vote_latents`. All but one are in flight."""

TAKE_THREADS = 512
"""Threads per block of `take_candidates`."""

MOST_SPLITS, HEADS_AT_ONCE, ATTEND_AHEAD = 16, 4, 4
"""For `attend`: most thread blocks per group, heads that are merged at a time, and rows in flight
for each team of lanes that reads a row together (2 for wide rows)."""

LATENT_ROWS, LATENT_SPLITS = 16, 128
"""For `attend_latents`: rows that a thread block processes at a time, and most thread blocks per
group, which is about the number of multiprocessors."""

WAYS = 4
"""Slots in a set of the row cache."""

CHUNK, PIECES, POINTS = table.CHUNK, table.PIECES, table.POINTS
"""For tiered votes. CHUNK: keys that a thread block processes at a time. PIECES: number of parts of
the sequence in which ties are counted separately. POINTS: a number above all votes."""

STAGE_THREADS, UPDATE_THREADS, WRITE_THREADS = 128, 256, 256
"""Threads per block of `stage_token`, of `update_state` and `read_pages`, and of kernels that
copy."""

ENCODE_WARPS = 8
"""Warps per thread block of `encode`."""

CODES_THREADS, MOST_BITS = 256, 7
"""For `ops/codes.cu`: threads per block, and most magnitude bits."""

SAMPLE_THREADS = 1024
"""Threads per block of `sample_rows`."""

DIGIT, TILE, SORTED = 11, 2048, 2048
"""For `ops/select.cu`: bits of a digit of the radix selection (`2^11 = BINS`), entries that a
thread block marks, and entries that a thread block sorts."""

ROTATE_TALL, ROTATE_BROAD = 32, 64
"""For `rotate`: vectors, and coordinates of results, per thread block."""

LENGTHS = 32
"""Number of length classes of the sequences in an engine's pages: a length has up to 31 binary
digits."""

EVERYWHERE = dict(
    TOKENS=TOKENS,
    BINS=BINS,
    APART=APART,
    LONGEST=int(transform.LONGEST),
    OCTAVES=codes.OCTAVES,
)
ATTENTION_WEIGHTS = dict(EDGE=EDGE, BUCKETS=BUCKETS)
STEP, CENTERS = dict(STEP=priority.STEP), dict(CENTERS=priority.CENTERS)
NOISE = dict(
    SPREAD=priority.SPREAD,
    ADDED=priority.ADDED,
    **{f"FACTOR_{i}": factor for i, factor in enumerate(priority.FACTORS)},
    **{f"CURVE_{i}": factor for i, factor in enumerate(priority.CURVE)},
)
CODECS = {f"CODEC_{n.name}": int(n) for n in CodecNumber if n.name.lower() not in BITS}
NO_PAGES = dict(PAGED=0, FP8_PAGES=0)
PIECEWISE = dict(CHUNK=CHUNK, PIECES=PIECES, POINTS=POINTS)

FILES: dict[str, dict[str, int]] = {
    "step/prepare_query.cu": dict(
        NOISE | STEP | CENTERS | NO_PAGES, SAMPLED=SAMPLED, LIMITED=0, WAYS=WAYS
    ),
    "step/scan.cu": dict(NOISE, WARPS=SCAN_WARPS, STAGES=SCAN_STAGES, BINNED=SCAN_BINNED),
    "step/rerank.cu": NOISE | STEP | ATTENTION_WEIGHTS,
    "step/select_rows.cu": dict(
        NOISE | ATTENTION_WEIGHTS,
        THREADS=SELECT_THREADS,
        ENTRIES=SELECT_ENTRIES,
        WAYS=WAYS,
        COUNTS=0,
        FEWEST=row_budget.LEAST,
    ),
    "step/attend.cu": dict(
        CODECS,
        MOST_SPLITS=MOST_SPLITS,
        HEADS_AT_ONCE=HEADS_AT_ONCE,
        AHEAD=ATTEND_AHEAD,
        WAYS=WAYS,
        MEASURED=0,
    ),
    "step/prepare_latents.cu": NOISE | CENTERS,
    "step/sample_latents.cu": dict(NOISE | STEP, SAMPLED=SAMPLED),
    "step/vote_latents.cu": dict(NOISE, STAGES=VOTE_STAGES),
    "step/estimate_latents.cu": dict(NOISE | STEP | ATTENTION_WEIGHTS, THREADS=TAKE_THREADS),
    "step/select_latents.cu": dict(
        NOISE | ATTENTION_WEIGHTS, THREADS=SELECT_THREADS, COUNTS=0, FEWEST=row_budget.LEAST
    ),
    "step/resident_latents.cu": NO_PAGES,
    "step/attend_latents.cu": dict(CODECS, ROWS=LATENT_ROWS, MOST_SPLITS=LATENT_SPLITS),
    "step/query_table.cu": dict(TIERS=len(coarse.TIERS)),
    "step/vote.cu": PIECEWISE,
    "step/candidates.cu": PIECEWISE,
    "step/rerank_blocks.cu": dict(BUCKETS=BUCKETS),
    "step/stage_token.cu": dict(THREADS=STAGE_THREADS),
    "append/update_state.cu": dict(THREADS=UPDATE_THREADS),
    "append/read_pages.cu": dict(THREADS=UPDATE_THREADS, LENGTHS=LENGTHS),
    "append/measure_outputs.cu": dict(THREADS=WRITE_THREADS),
    "append/write_rows.cu": dict(THREADS=WRITE_THREADS),
    "append/write_pages.cu": dict(THREADS=WRITE_THREADS, WAYS=WAYS),
    "append/gather_pages.cu": dict(THREADS=WRITE_THREADS),
    "append/encode.cu": dict(WARPS=ENCODE_WARPS, OCTAVES=codes.OCTAVES, LARGEST=int(check.LARGEST)),
    "ops/coarse.cu": dict(WIDE=0, FACTORS=0, TABLES=1),
    "ops/codes.cu": dict(THREADS=CODES_THREADS, MOST_BITS=MOST_BITS),
    "ops/sampling.cu": dict(THREADS=SAMPLE_THREADS),
    "ops/select.cu": dict(VOTES=0, DIGIT=DIGIT, TILE=TILE, SORTED=SORTED),
    "ops/transform.cu": dict(TALL=ROTATE_TALL, BROAD=ROTATE_BROAD),
}
"""File of a kernel -> its macros in addition to `EVERYWHERE`, unless the Python launcher sets
others."""


@cache
def constants(file: str) -> dict[str, int]:
    """Return the macros that a kernel's source file needs from this module. Its launcher passes
    further macros."""
    return EVERYWHERE | FILES.get(file, {})

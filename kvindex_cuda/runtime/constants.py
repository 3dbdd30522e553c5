"""Numbers that kernels and their launchers share. Kernels get them as macros (`-D`)."""

from __future__ import annotations

from functools import cache

from kvindex.core import check
from kvindex.ops import coarse, codes, priority, transform
from kvindex.pariskv import block_layout
from kvindex.pariskv import sign_votes as votes
from kvindex.pariskv import step_state as step
from kvindex.pariskv import tiered_votes as table
from kvindex.storage.codecs import BITS, CodecNumber

TOKENS = block_layout.BLOCK
"""Tokens of a block of codes or rows."""

BINS, EDGE, BUCKETS = step.BINS, 1024, step.BUCKETS
"""Bins of a histogram of votes or scores. Then the entries of the cut's bin that shared memory has
room for, and the buckets of exponentials, 16 octaves each."""

APART = 32
"""int32 from a group's counter to the next one's, since atomics to one memory line wait for each
other."""

SAMPLED = votes.SAMPLED
"""Keys of a group whose votes `prepare_query` samples for a threshold."""

SCAN_WARPS, SCAN_STAGES, SCAN_BINNED = 8, 2, 65535
"""Of a thread block of `scan`: warps, blocks of keys in flight for each warp, and entries that its
histogram in shared memory has room for."""

SELECT_THREADS, SELECT_ENTRIES = 512, 8
"""Of `select_rows`: threads of a block, and entries of a thread."""

VOTE_STAGES = 3
"""Blocks of keys in the shared memory of `vote_latents`, of which all but one are in flight."""

TAKE_THREADS = 512
"""Threads of a block of `take_candidates`."""

MOST_SPLITS, HEADS_AT_ONCE, ATTEND_AHEAD = 16, 4, 4
"""Of `attend`: most thread blocks of a group, heads that are merged together, and rows in flight
for a team of lanes (2 for wide rows)."""

LATENT_ROWS, LATENT_SPLITS = 16, 128
"""Of `attend_latents`: rows that a thread block processes at a time, and most thread blocks of a
group, about the number of multiprocessors."""

WAYS = 4
"""Slots in a set of the row cache."""

CHUNK, PIECES, POINTS = table.CHUNK, table.PIECES, table.POINTS
"""Of tiered votes: keys that a thread block processes at a time, pieces of the tokens by which ties
are counted, and a number above all votes."""

STAGE_THREADS, UPDATE_THREADS, WRITE_THREADS = 128, 256, 256
"""Threads of a block of `stage_token`, `update_state` (and `read_pages`), and kernels that copy."""

ENCODE_WARPS = 8
"""Warps of a block of `encode`."""

CODES_THREADS, MOST_BITS = 256, 7
"""Of `ops/codes.cu`: threads of a block, and most magnitude bits."""

SAMPLE_THREADS = 1024
"""Threads of a block of `draw`."""

DIGIT, TILE, SORTED = 11, 2048, 2048
"""Of `ops/select.cu`: bits of a digit (`2^11 = BINS`), entries that a thread block marks, and
entries that a thread block sorts."""

ROTATE_TALL, ROTATE_BROAD = 32, 64
"""Vectors and outputs of a thread block of `rotate`."""

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
PIECEWISE = dict(CHUNK=CHUNK, PIECES=PIECES, POINTS=POINTS)

FILES: dict[str, dict[str, int]] = {
    "step/prepare_query.cu": dict(NOISE | STEP | CENTERS, SAMPLED=SAMPLED),
    "step/scan.cu": dict(NOISE, WARPS=SCAN_WARPS, STAGES=SCAN_STAGES, BINNED=SCAN_BINNED),
    "step/rerank.cu": NOISE | STEP | ATTENTION_WEIGHTS,
    "step/select_rows.cu": dict(
        NOISE | ATTENTION_WEIGHTS, THREADS=SELECT_THREADS, ENTRIES=SELECT_ENTRIES, WAYS=WAYS
    ),
    "step/attend.cu": dict(
        CODECS, MOST_SPLITS=MOST_SPLITS, HEADS_AT_ONCE=HEADS_AT_ONCE, AHEAD=ATTEND_AHEAD, WAYS=WAYS
    ),
    "step/prepare_latents.cu": NOISE | CENTERS,
    "step/sample_latents.cu": dict(NOISE | STEP, SAMPLED=SAMPLED),
    "step/vote_latents.cu": dict(NOISE, STAGES=VOTE_STAGES),
    "step/estimate_latents.cu": dict(NOISE | STEP | ATTENTION_WEIGHTS, THREADS=TAKE_THREADS),
    "step/select_latents.cu": dict(NOISE | ATTENTION_WEIGHTS, THREADS=SELECT_THREADS),
    "step/attend_latents.cu": dict(CODECS, ROWS=LATENT_ROWS, MOST_SPLITS=LATENT_SPLITS),
    "step/query_table.cu": dict(TIERS=len(coarse.TIERS)),
    "step/vote.cu": PIECEWISE,
    "step/candidates.cu": PIECEWISE,
    "step/rerank_blocks.cu": dict(BUCKETS=BUCKETS),
    "step/stage_token.cu": dict(THREADS=STAGE_THREADS),
    "append/update_state.cu": dict(THREADS=UPDATE_THREADS),
    "append/read_pages.cu": dict(THREADS=UPDATE_THREADS),
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
"""Kernel's file -> macros in addition to `EVERYWHERE`, unless its launcher sets others."""


@cache
def constants(file: str) -> dict[str, int]:
    """Return the macros of a kernel's file, without those that its launcher defines."""
    return EVERYWHERE | FILES.get(file, {})

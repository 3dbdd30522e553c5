"""Keys to codes: that they are right, and how fast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvindex
from benchmarks.decode.setting import synthetic
from benchmarks.decode.timing import Timed, Times
from kvindex.core.geometry import Geometry
from kvindex.ops import codes
from kvindex.ops.learn import SEEN
from kvindex_cuda.memory.code_blocks import Fill
from kvindex_cuda.memory.layout import BLOCK, Layout

INDEX = "pariskv"

CHECKED = (8000, 12_345, 256)
"""Tokens of the appends that are checked."""

FLIPPED = 1e-4
"""Share of coordinates that rounding may put on the other side of an edge
(tests/cuda/test_encode.py looks at each of them)."""

TIPPED = 1e-3
"""Share of centers' coordinates that sums in float32 may round to the number beside the
reference's (the same test looks at how near they are)."""


def index_of(geometry: Geometry, backend: str = "cuda", store: str = "device") -> Any:
    """An empty index."""
    g = geometry
    return kvindex.create(
        INDEX,
        q_heads=g.q_heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        dtype=g.dtype,
        device=g.device,
        backend=backend,
        store=store,
    )


def keys_of(geometry: Geometry, sequence: int, count: int) -> Tensor:
    """Synthetic keys `[1, G, count, D]`, drawn in pieces."""
    g, piece = geometry, 2**16
    keys = torch.empty((1, g.kv_heads, count, g.head_dim), dtype=g.dtype, device=g.device)
    for start in range(0, count, piece):
        some = min(piece, count - start)
        keys[:, :, start : start + some] = synthetic(g, sequence, start, some)
    return keys


def check(geometry: Geometry) -> dict[str, Any]:
    """Appends by kernels against those in torch. Raises SystemExit if they are not the same."""
    mine, theirs = (index_of(geometry, backend) for backend in ("cuda", "torch"))
    keys, start = keys_of(geometry, 99, sum(CHECKED)), 0
    for count in CHECKED:
        some = keys[:, :, start : start + count]
        for index in (mine, theirs):
            index.append(some, some)
        start += count
    wrong = [
        name
        for name, t in theirs._learned.items()
        if name != "centers" and not torch.equal(mine._learned[name], t)
    ]
    got, want = (index._learned["centers"] for index in (mine, theirs))
    apart = got != want
    size = want.float().abs()
    near = (got.float() - want.float()).abs() <= 2.0**-7 * size + 2.0**-16 * size.amax()
    tipped = int(apart.sum()) / apart.numel()
    if tipped > TIPPED or not near.all():
        wrong.append("centers")
    flipped = sum(
        int(codes.unpack(mine._codes[name] ^ theirs._codes[name]).sum())
        for name in ("signs", "magnitudes")
    ) / len(keys.flatten())
    if wrong or flipped > FLIPPED:
        raise SystemExit(f"append is wrong: learned {wrong} differ, {flipped:.2%} of codes")
    learned = f"{tipped:.1e} of centers rounded another way" if tipped else "equal"
    return {"tokens": list(CHECKED), "flipped": flipped, "learned": learned}


def bytes_of(geometry: Geometry, tokens: int) -> dict[str, int]:
    """Bytes that must move: `encode` reads keys and writes centers twice, and codes; `learn` reads
    the first keys, and a last segment that has only begun with the one that it leans on.
    """
    g, layout = geometry, Layout(geometry.head_dim, 3)
    of_key = g.kv_heads * g.head_dim * g.dtype.itemsize
    begun = tokens % BLOCK
    edge = min(tokens, begun + BLOCK) if begun else 0
    centers = -(-tokens // BLOCK) * g.kv_heads * 2 * g.head_dim
    written = tokens * g.kv_heads * (layout.stride * 4 + 3)
    return {
        "learn": (min(tokens, SEEN) + edge) * of_key,
        "encode": tokens * of_key + 2 * centers + written,
    }


def measure(
    geometry: Geometry, tokens: int, piece: int, timed: Timed, read_gb_s: float
) -> dict[str, Any]:
    """Each kernel alone, and both: in one go, and in pieces as a prefill would append them."""
    keys, index = keys_of(geometry, 0, tokens), index_of(geometry)
    writer, blocks = index._writer, index._codes
    blocks.reserve(Fill(1, tokens, lambda table: None))

    def append(size: int) -> None:
        learned: dict[str, Tensor] = {}
        for start in range(0, tokens, size):
            some = keys[:, :, start : start + size]
            begun = writer.learn(some, None, learned, start=start)
            writer.codes(some, None, begun, start=start).write(blocks.table)
            learned = begun.learned

    begun = writer.learn(keys, None, {}, start=0)
    write = writer.codes(keys, None, begun, start=0).write
    must = bytes_of(geometry, tokens)
    runs = {
        "learn": (lambda: writer.learn(keys, None, {}, start=0), must["learn"]),
        "encode": (lambda: write(blocks.table), must["encode"]),
        "in_one_go": (lambda: append(tokens), must["encode"]),
        "in_pieces": (lambda: append(piece), must["encode"]),
    }
    found: dict[str, Any] = {"tokens": tokens, "piece": piece}
    for name, (run, moved) in runs.items():
        found[name] = rated(timed(run, 1), moved, read_gb_s)
    return found


def rated(times: Times, moved: int, read_gb_s: float) -> dict[str, Any]:
    """Times with bytes, and the share of the read-only rate that they are moved at."""
    rate = moved / times["median_us"] / 1e3
    return {**times, "bytes": moved, "GB_s": rate, "of_reading": rate / read_gb_s}

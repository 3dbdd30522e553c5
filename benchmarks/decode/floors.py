"""What each stage must move, and how fast this machine moves it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode.setting import Setting
from benchmarks.decode.timing import Timed, read_all, read_pieces
from kvindex_cuda.memory.layout import BLOCK, SubspaceLayout
from kvindex_cuda.pariskv import step as steps
from kvindex_cuda.pariskv.base_step import APART, COUNTERS

SECTOR = 32
"""Bytes that memory moves at least."""

READ_BYTES, COPY_BYTES, PINNED_BYTES = 2**32, 2**32, 2**30
"""Moved to measure rates."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that a stage must move: on the device, and from the host."""

    device: float
    host: float = 0

    def floor_us(self, read_gb_s: float, host_gb_s: float) -> float:
        """Microseconds at the measured rates, both at once."""
        return max(self.device / read_gb_s, self.host / host_gb_s) / 1e3


def stage_bytes(
    setting: Setting, tokens: int, batch: int, listed: float, place: str = "host"
) -> dict[str, Bytes]:
    """Bytes of each kernel of a step, by its name: inputs once, outputs once, gathers by sectors.

    listed: entries of the scan's list per KV head, on average. Left out: what a kernel counts,
    and what it reads again from the L2 cache.
    """
    g, layout = setting.geometry, setting.layout
    size, groups = g.dtype.itemsize, batch * g.kv_heads
    heads, group, width = batch * g.q_heads, g.group_size, layout.stride
    S, C = -(-tokens // BLOCK), min(setting.candidates(tokens), listed)
    planes = (
        4 if setting.index.config.query_max < 8 else 6 if setting.index.config.query_max < 32 else 8
    )
    row = (g.head_dim + g.value_dim) * size
    cleared = 4 * (2 * group * steps.BUCKETS + steps.BINS + COUNTERS * APART)

    def sectors(count: int) -> int:
        return -(-count // SECTOR) * SECTOR

    turn = 4 * (g.head_dim + g.head_dim // (g.head_dim & -g.head_dim))  # signs and waves
    asked = turn + heads * g.head_dim * (size + 4 + planes / 8) + groups * cleared
    part = sectors(32 * width) + sectors(32) + sectors(2 * g.head_dim) + SECTOR
    sampled = steps.SAMPLED // 32 * part + 8 * steps.SAMPLED
    key = sectors(width) + sectors(layout.magnitude_bits * width) + sectors(2)
    scanned = tokens * (width + 1) + S * (2 * g.head_dim + 4 * group) + 8 * listed
    agreed = 8 * listed + C * (4 * group + 8)
    resident = groups * setting.resident * row + 2 * heads * g.head_dim * size
    rows = groups * min(setting.k, C) * row
    other = {} if setting.kind == "votes" else others(setting, tokens, batch, listed)
    return {
        "ask": Bytes(asked + groups * sampled),
        "scan": Bytes(groups * scanned + batch * S * BLOCK / 8),
        "rerank": Bytes(
            groups * (8 * listed + C * (key + 4 * group) + 4 * group * S + 4 * steps.BINS)
        ),
        "agree": Bytes(groups * agreed),
        "attend": Bytes(
            resident + (rows if place == "device" else 0),
            rows if place == "host" else 0,
        ),
    } | other


def others(setting: Setting, tokens: int, batch: int, listed: float) -> dict[str, Bytes]:
    """As `stage_bytes`, of what the steps by other presets do in another way."""
    g, layout, kind = setting.geometry, setting.layout, setting.kind
    size, groups, group = g.dtype.itemsize, batch * g.kv_heads, g.group_size
    S, M, width, sets = -(-tokens // BLOCK), g.head_dim // 8, layout.stride, -(-group // 4)
    center = S * (2 * g.head_dim + 4 * group) if setting.index.config.center else 0
    turned = groups * group * g.head_dim * (size + 4) + 4 * g.head_dim**2
    turned += groups * 4 * (2 * group * steps.BUCKETS + steps.BINS + COUNTERS * APART)
    entries = M * 256 * 4 * sets * dict(all=0, tiers=1, dots=2)[kind]
    counts = M * 256 * 8 if kind == "tiers" else 0
    span = layout.span if isinstance(layout, SubspaceLayout) else 2
    planes, beside = layout.magnitude_bits * width, 8 + 4 * group
    key = sum(-(-part // SECTOR) * SECTOR for part in (width, planes, span))
    voted = 4 * sets if kind == "tiers" else 4
    looked_up = tokens * (setting.scanned_bytes + voted) + center
    return {
        "turn": Bytes(turned + groups * (entries + counts)),
        "all": Bytes(groups * (tokens * (width + planes + span + beside) + center)),
        "count": Bytes(groups * (looked_up + entries)),
        "heads": Bytes(groups * (tokens * voted + 8 * listed)),
        "group": Bytes(groups * (tokens * voted + 8 * listed)),
        "weigh": Bytes(groups * listed * (8 + key + 4 * group)),
        "agree": Bytes(groups * listed * beside),
    }


def ceilings(
    timed: Timed, device: str, shrink: int = 1, record: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Reading alone (the best of some grids), copying on the device, copying to it: GB/s.

    shrink: divides the sizes, for tests; record: bytes that the scan reads of a record, and of the
    record: also reading those alone, as it does.
    """
    drawn = dict(dtype=torch.int32, device=device)
    data = torch.randint(-(2**31), 2**31 - 1, (READ_BYTES // shrink // 4,), **drawn)
    total = torch.zeros(1, dtype=torch.int32, device=device)
    read_all(data, total)
    if int(total) & 0xFFFFFFFF != int(data.sum(dtype=torch.int64)) & 0xFFFFFFFF:
        raise SystemExit("the kernel that reads everything does not: its sum is wrong")
    best: dict[str, Any] = {}
    for blocks in (264, 528, 1056, 2112, 8448):
        for loads in (2, 4, 8):
            times = timed(partial(read_all, data, total, blocks, loads), 1)
            if not best or times["median_us"] < best["median_us"]:
                best = {**times, "grid": blocks, "loads": loads}
    found = {"read": {**best, "bytes": data.nbytes, "GB_s": data.nbytes / best["median_us"] / 1e3}}
    if record:
        found["pieces"] = _pieces(timed, data, total, *record)
    other = torch.empty(COPY_BYTES // shrink // 4, dtype=torch.int32, device=device)
    times = timed(lambda: other.copy_(data[: len(other)]), 1)
    moved = 2 * other.nbytes
    found["copy"] = {**times, "bytes": moved, "GB_s": moved / times["median_us"] / 1e3}
    host = torch.ones(PINNED_BYTES // shrink, dtype=torch.uint8, pin_memory=device != "cpu")
    target = other.view(torch.uint8)[: len(host)]
    times = timed(lambda: target.copy_(host, non_blocking=True), 1)
    found["pinned"] = {
        **times,
        "bytes": host.nbytes,
        "GB_s": host.nbytes / times["median_us"] / 1e3,
    }
    return found


def _pieces(timed: Timed, data: Tensor, total: Tensor, piece: int, apart: int) -> dict[str, Any]:
    """Reading the first `piece` bytes of records of `apart` bytes."""
    records = data.nbytes // apart
    first = data[: records * apart // 4].view(records, apart // 4)[:, :128]
    total.zero_()
    read_pieces(data, total, piece, apart)
    if int(total) & 0xFFFFFFFF != int(first.sum(dtype=torch.int64)) & 0xFFFFFFFF:
        raise SystemExit("the kernel that reads pieces does not: its sum is wrong")
    times = timed(partial(read_pieces, data, total, piece, apart), 1)
    sizes = {"piece": piece, "apart": apart, "bytes": records * piece}
    return {**times, **sizes, "GB_s": records * piece / times["median_us"] / 1e3}

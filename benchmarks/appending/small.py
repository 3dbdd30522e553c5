"""The small kernels of decoding, each alone: of a token, of an update, and rows by their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.appending.update import UPDATE, Decode
from benchmarks.decode.floors import Bytes
from benchmarks.decode.setting import K
from benchmarks.decode.timing import Timed
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.write_rows import write_rows
from kvindex_cuda.ops.fetch import gather_blocks
from kvindex_cuda.ops.sampling import draw
from kvindex_cuda.pariskv.stage_token import stage_token
from kvindex_cuda.pariskv.update_state import update_state

POOL = 8
"""Rows that `pariskv+sample` draws from, over those that it reads."""

ROOM = 64
"""Of each `ResidentRows`: more tokens than a graph's warm-up holds."""


def bytes_of(geometry: Geometry, k: int = K) -> dict[str, Bytes]:
    """Bytes that each must move, where one layer is asked for `k` rows per KV head.

    `grow`, which writes a few words for each block of tokens, moves next to none.
    """
    g, layout = geometry, Layout(geometry.head_dim, 3)
    size, width = g.dtype.itemsize, g.head_dim + g.value_dim
    keys, rows = UPDATE * g.kv_heads * g.head_dim * size, g.kv_heads * width * size
    codes = UPDATE * g.kv_heads * (layout.stride * 4 + 3)
    queries, drawn = g.q_heads * g.head_dim * size, g.kv_heads * k
    return {
        "learn": Bytes(keys),
        "encode": Bytes(keys + codes),
        "keep": Bytes(UPDATE * rows, UPDATE * rows),
        "grow": Bytes(0),
        "hold": Bytes(3 * rows + 2 * queries),
        "gather_blocks": Bytes(8 * drawn + k * rows, k * rows),
        "draw": Bytes(12 * POOL * drawn + 12 * drawn),
    }


def measure(
    geometry: Geometry, tokens: int, layers: int, timed: Timed, rates: dict[str, Any], k: int = K
) -> dict[str, Any]:
    """Each in a graph over so many layers' indexes and buffers."""
    g, decode = geometry, Decode(geometry, tokens, layers, captured=False, k=k)
    found: dict[str, Any] = {"tokens": tokens, "layers": layers, "k": k}
    runs, must = runs_of(g, decode, layers, k), bytes_of(g, k)
    for name, run in runs.items():
        floor = must[name].floor_us(rates["read"]["GB_s"], rates["pinned"]["GB_s"])
        moved = {"bytes": must[name].device, "host_bytes": must[name].host, "floor_us": floor}
        found[name] = {**timed(run, layers), **moved}
    return found


def runs_of(g: Geometry, decode: Decode, layers: int, k: int = K) -> dict[str, Callable[[], None]]:
    """By name, what runs a kernel once for each layer."""
    for layer, index in enumerate(decode.indexes):
        index.append(*decode.tokens_of(layer))  # centers have room from here on
    held, device = len(decode.indexes[0]), g.device
    shape = (g.kv_heads, 1, g.head_dim + g.value_dim)
    token = torch.randn((layers, 1, *shape), device=device).to(g.dtype)
    parts = [Rows(one[..., : g.head_dim], one[..., g.head_dim :]) for one in token]
    places = [Rows(*(part.clone() for part in (one.keys, one.values))) for one in parts]
    residents, asked = (
        [ResidentRows(g, 1, ROOM) for _ in range(layers)],
        torch.empty_like(decode.queries),
    )
    ids = torch.rand((layers, 1, g.kv_heads, held), device=device).topk(k * POOL).indices
    logits = torch.randn(ids.shape, device=device).sort(descending=True).values
    begun = []
    for layer, index in enumerate(decode.indexes):
        keys = decode.tokens_of(layer)[0]
        index._codes.reserve_tokens(held + UPDATE)
        index._store.reserve_tokens(held + UPDATE)
        begun.append(index._writer.learn(keys, None, index._learned, start=held))

    def learn() -> None:
        for layer, index in enumerate(decode.indexes):
            index._writer.learn(decode.tokens_of(layer)[0], None, index._learned, start=held)

    def encode() -> None:
        for layer, index in enumerate(decode.indexes):
            keys = decode.tokens_of(layer)[0]
            index._writer.codes(keys, None, begun[layer], start=held).write(index._codes.table)

    def kept() -> None:
        for layer, index in enumerate(decode.indexes):
            write_rows(decode.tokens_of(layer), index._store.table, held)

    def grown() -> None:
        for index in decode.indexes:
            of = dict(
                first=held // BLOCK - 1, count=held, weight_scale=index._learned["weight_scale"]
            )
            update_state(index._fused._state, held, **of)

    def holds() -> None:
        for layer, resident in enumerate(residents):
            stage_token(resident, parts[layer], places[layer], decode.queries[layer], asked[layer])

    def gathered() -> None:
        for layer, index in enumerate(decode.indexes):
            sizes = dict(kv_heads=g.kv_heads, row_bytes=index._store.row_bytes, tokens=held)
            gather_blocks(index._store.table, ids[layer, ..., :k], **sizes)

    def draws() -> None:
        for layer in range(layers):
            draw(logits[layer], ids[layer], k, k // 2)

    return {
        **{"learn": learn, "encode": encode, "keep": kept, "grow": grown},
        **{"hold": holds, "gather_blocks": gathered, "draw": draws},
    }

"""ParisKV on compiled kernels: search, attend and a decoded token's step over the index's columns.

What a step makes on its way lies in buffers of the thread; its results are new each time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attended, Contents, Hits, Rows
from kvindex.core.resident import ResidentRows
from kvindex.cpu import threads
from kvindex.cpu.buffers import BUFFERS
from kvindex.cpu.kernels.numbers import KINDS
from kvindex.cpu.kernels.query import GROUP, prepare
from kvindex.cpu.kernels.scan import scan
from kvindex.cpu.kernels.select import SAMPLED
from kvindex.cpu.kernels.step import attend_groups, find_rows
from kvindex.cpu.state import ResidentState, State
from kvindex.indexes.pariskv import ParisKVConfig
from kvindex.ops import codes as coding
from kvindex.ops.block_layout import BLOCK
from kvindex.storage.columns import BlockColumns
from kvindex.storage.store import TensorStore

SERVED: dict[str, Any] = dict(
    coarse="dots",
    candidates_per="group",
    block="key",
    weights="log",
    weight_bits=16,
    single_stage_below=0,
    draw="none",
)

POLICIES = "mean_share", "max_share"

FEW_KEYS = 2**14
"""So many keys of all groups are scanned by one thread: another takes as long to begin."""


def refusal(config: ParisKVConfig, geometry: Geometry) -> str | None:
    """Why ops run one by one, by the first option in the way; None where kernels serve it."""
    got = {field.name: value for field in fields(config) for value in [vars(config)[field.name]]}
    for name, value in SERVED.items():
        if got[name] != value:
            return f"{name}: got {got[name]!r}, allowed is {value!r}"
    if config.group not in POLICIES and geometry.group_size > 1:
        return f"group: got {config.group!r}, allowed is {' or '.join(map(repr, POLICIES))}"
    if query_max_of(config, geometry) * geometry.head_dim >= 2**15:
        return f"query_max: got {config.query_max}, allowed is below 2^15 over head_dim"
    return None


def query_max_of(config: ParisKVConfig, geometry: Geometry) -> int:
    """Largest coordinate of a rounded query."""
    return min(config.query_max, 2**15 // geometry.head_dim)


def unreadable(rows: object) -> str | None:
    """Why kernels do not attend to the rows of a store, None where they do."""
    if not isinstance(rows, TensorStore):
        return f"store: got {type(rows).__name__}, allowed is TensorStore"
    if rows.row_codec != "plain":
        return f"row_codec: got {rows.row_codec!r}, allowed is 'plain'"
    return None


@dataclass(frozen=True)
class Constants:
    """What follows from geometry and configuration, for kernels.

    rotation float32 `[D, D]`; levels: signed, float32 `[2 · 2^bits]`; sizes: of weights by their
    codes, float32 `[2^16]`; spread: a byte's bits as bytes, uint64 `[256]`; factors: int32 `[256]`.
    """

    rotation: np.ndarray
    levels: np.ndarray
    sizes: np.ndarray
    spread: np.ndarray
    factors: Tensor
    level: float
    query_max: int

    @staticmethod
    def of(
        geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
    ) -> Constants:
        """Those of an index with this rotation and these levels."""
        spread = coding.unpack(torch.arange(256, dtype=torch.uint8))
        return Constants(
            rotation=rotation.contiguous().numpy(),
            levels=torch.cat([-levels, levels]).numpy(),
            sizes=coding.log_weights(torch.arange(2**16), 16).numpy(),
            spread=spread.contiguous().numpy().view(np.uint64)[:, 0],
            factors=coding.log_factors(config.weight_bits),
            level=coding.lloyd_max(geometry.head_dim, 0)[0],
            query_max=query_max_of(config, geometry),
        )


@dataclass(frozen=True)
class Found:
    """Rows of a search: ids int64 `[B·G, k]`, best first, then -1; scores float32 `[B·G, k]`;
    found int32 `[B·G]`.
    """

    ids: np.ndarray
    scores: np.ndarray
    found: np.ndarray


class ParisKVExecutor:
    """`ParisKV` on a CPU's kernels: a `kvindex.core.protocol.Executor`."""

    encodes = False
    length = None

    _contents: Contents  # since the first `update`

    def __init__(
        self, geometry: Geometry, config: ParisKVConfig, constants: Constants, codes: BlockColumns
    ) -> None:
        self._geometry, self._config, self._constants = geometry, config, constants
        self.codes = codes
        self._state: State | None = None
        self._resident: ResidentState | None = None

    @staticmethod
    def of(
        geometry: Geometry, config: ParisKVConfig, rotation: Tensor, levels: Tensor
    ) -> ParisKVExecutor:
        """The executor of an empty index."""
        constants = Constants.of(geometry, config, rotation, levels)
        return ParisKVExecutor(geometry, config, constants, BlockColumns(config.center or BLOCK))

    @property
    def attends(self) -> bool:
        """As `Executor.attends`."""
        return unreadable(self._contents.rows) is None

    def explain(self) -> str:
        """As `Executor.explain`."""
        return "\n".join(
            [
                "executor: compiled by Numba",
                "append: codes are made op by op",
                f"attend: {unreadable(self._contents.rows) or 'in one go'}",
            ]
        )

    def update(self, contents: Contents) -> ParisKVExecutor:
        """As `Executor.update`."""
        if contents.codes is not self.codes:
            if not isinstance(contents.codes, BlockColumns):
                name = type(contents.codes).__name__
                raise TypeError(f"codes: got {name}, allowed is BlockColumns")
            other = ParisKVExecutor(self._geometry, self._config, self._constants, contents.codes)
            return other.update(contents)
        self._contents, self._state = contents, None
        return self

    def prepare(
        self, keys: Tensor, valid: Tensor | None, *, beyond: int, wrong: Tensor | None = None
    ) -> Any:
        """As `Executor.prepare`: never."""
        raise RuntimeError("prepare: got codes that no kernel writes, allowed if it `encodes`")

    def discard(self) -> None:
        """As `Executor.discard`: there is nothing."""

    def warm_up(self, k: int, tokens: int) -> None:
        """As `Executor.warm_up`: the first search compiles, and buffers grow by themselves."""

    def reserve(self, tokens: int) -> None:
        """As `Executor.reserve`: columns grow by themselves."""

    def search(self, queries: Tensor, k: int) -> Hits:
        """As `Executor.search`."""
        hits, find = self._scanned(self._folded(queries), k)
        threads.run(find, self._most_parts())
        shape = (len(queries), self._geometry.kv_heads, k)
        ids, scores = torch.from_numpy(hits.ids), torch.from_numpy(hits.scores)
        return Hits(ids.view(shape), scores.view(shape))

    def attend(
        self, queries: Tensor, resident: ResidentRows, k: int, wrong: Tensor | None = None
    ) -> Attended:
        """As `Executor.attend`."""
        folded = self._folded(queries)
        hits, find = self._scanned(folded, min(k, int(self._contents.counts.max())))
        output, lse, attend = self._attending(folded, hits.ids, None, resident)

        def part(i: int, parts: int) -> None:
            find(i, parts)
            attend(i, parts)

        threads.run(part, self._most_parts())
        return self._attended(queries, output, lse, hits.found)

    def attend_hits(self, queries: Tensor, hits: Hits, resident: ResidentRows) -> Attended:
        """As `Executor.attend_hits`."""
        folded = self._folded(queries)
        ids = hits.ids.contiguous().view(len(folded), -1).numpy()
        output, lse, attend = self._attending(folded, ids, hits.log_weight, resident)
        threads.run(attend, self._most_parts())
        return self._attended(queries, output, lse, (ids >= 0).sum(1, dtype=np.int32))

    def decode_step(
        self,
        queries: Tensor,
        token: Rows,
        resident: ResidentRows,
        window: Rows,
        k: int,
        wrong: Tensor | None,
        graphs: bool,
    ) -> Attended:
        """As `Executor.decode_step`."""
        stage_token(token, resident, window)
        return self.attend(queries, resident, k, wrong)

    # What kernels read and write

    def _folded(self, queries: Tensor) -> np.ndarray:
        """Queries `[B, H, D]` as float32 `[B·G, g, D]`."""
        g = self._geometry
        floats = queries.float().reshape(-1, g.group_size, g.head_dim)
        return floats.numpy()

    def _ready(self) -> State:
        if self._state is None:
            heads, factors = self._geometry.kv_heads, self._constants.factors
            self._state = State.of(self._contents, self.codes, heads, factors)
        return self._state

    def _limits(self, k: int) -> np.ndarray:
        """Candidates `C` of each group for `k` rows, int64 `[B·G]`."""
        state, counts = self._ready(), self._contents.counts.tolist()
        if k not in state.limits:
            candidates = [self._config.candidates(n, k) for n in counts]
            state.limits[k] = np.repeat(candidates, self._geometry.kv_heads)
        return state.limits[k]

    def _most_parts(self) -> int:
        """Threads that are worth their beginning."""
        groups = len(self._contents.counts) * self._geometry.kv_heads
        return groups if groups * self._contents.length > FEW_KEYS else 1

    def _scanned(self, queries: np.ndarray, k: int) -> tuple[Found, threads.Part]:
        """Room for the `k` rows of queries `[B·G, g, D]`, all keys' votes being there, and what
        finds them, a part of the groups at a time.
        """
        state, constants, array = self._ready(), self._constants, BUFFERS.array
        (groups, heads, D), block = queries.shape, self._config.center or BLOCK
        blocks = -(-state.length // block)
        rotated = array("rotated", np.float32, groups, heads, D)
        units = array("units", np.float64, groups, heads)
        digits = 1 if constants.query_max < 2 ** (GROUP - 1) else 2
        planes = array("planes", np.uint64, groups, heads, digits * GROUP, -(-D // 64))
        totals = array("totals", np.int32, groups, heads)
        products = array("products", np.float32, groups, blocks, heads)
        votes = array("votes", np.int32, groups, state.length)
        highest = array("highest", np.int32, groups, blocks)
        turned = constants.rotation, constants.query_max
        prepare(queries, *turned, state.scales, constants.level, rotated, units, planes, totals)

        def scan_part(i: int, parts: int) -> None:
            codes = state.signs, state.weights, state.centers, state.valid
            sizes = state.length, state.full, block
            asked = state.factors, queries, units, planes, totals
            scan(i, parts, *codes, *sizes, *asked, products, votes, highest)

        few = groups * state.length <= FEW_KEYS
        threads.run(scan_part, 1 if few else groups * blocks)
        if not self._config.center:
            products.fill(0)
        return self._finding(k, rotated, products, (votes, highest))

    def _finding(
        self,
        k: int,
        rotated: np.ndarray,
        products: np.ndarray,
        scanned: tuple[np.ndarray, np.ndarray],
    ) -> tuple[Found, threads.Part]:
        """As `_scanned`, of what `scan` has written."""
        state, constants, array = self._ready(), self._constants, BUFFERS.array
        (groups, heads, _), g, config = rotated.shape, self._geometry, self._config
        limits = self._limits(k)
        most, entries = int(limits.max()), state.length + 2 * SAMPLED
        parts = threads.parts_of(self._most_parts())
        room = (
            array("chosen", np.int32, parts, most),
            array("estimates", np.float32, parts, heads, most),
            array("agreed", np.float32, parts, most),
            array("listed", np.int64, parts, entries),
            array("entries", np.int64, parts, entries),
        )
        hits = Found(
            np.empty((groups, k), np.int64),
            np.empty((groups, k), np.float32),
            np.empty(groups, np.int32),
        )

        def find(i: int, parts: int) -> None:
            sizes = state.length, state.full, config.center or BLOCK
            codes = state.signs, state.magnitudes, state.weights, state.fractions
            tables = constants.levels, constants.sizes, constants.spread
            policy = g.scale, g.softcap or 0.0, config.group == "max_share"
            asked = rotated, products, *tables, *policy
            outputs = hits.ids, hits.scores, hits.found
            bits = config.magnitude_bits
            find_rows(i, parts, *scanned, limits, *sizes, *codes, bits, *asked, *room, *outputs)

        return hits, find

    def _attending(
        self,
        queries: np.ndarray,
        ids: np.ndarray,
        log_weight: Tensor | None,
        resident: ResidentRows,
    ) -> tuple[np.ndarray, np.ndarray, threads.Part]:
        """Room for output float32 `[B·G, g, Dv]` and lse `[B·G, g]`, and what writes them."""
        g, array, state, count = self._geometry, BUFFERS.array, self._ready(), len(resident)
        (groups, heads, _), K = queries.shape, ids.shape[1]
        weights = array("none", np.float32, groups, heads, 0)
        if log_weight is not None:
            weights = log_weight.contiguous().view(groups, heads, K).numpy()
        beside = self._resident = ResidentState.of(resident, self._resident)
        rows = state.rows, state.row_bytes, weights
        others = beside.rows, beside.row_bytes, beside.mask, count
        room = (
            array("addresses", np.int64, groups, K + count),
            array("logits", np.float32, groups, heads, K + count),
        )
        output = np.empty((groups, heads, g.value_dim), np.float32)
        lse = np.empty((groups, heads), np.float32)

        def attend(i: int, parts: int) -> None:
            policy = KINDS[g.dtype], g.scale, g.softcap or 0.0
            attend_groups(i, parts, queries, ids, *rows, *others, *policy, *room, output, lse)

        return output, lse, attend

    def _attended(
        self, queries: Tensor, output: np.ndarray, lse: np.ndarray, found: np.ndarray
    ) -> Attended:
        g, (batch, heads, _) = self._geometry, queries.shape
        return Attended(
            torch.from_numpy(output).view(batch, heads, g.value_dim).to(g.dtype),
            torch.from_numpy(lse).view(batch, heads),
            torch.from_numpy(found).view(batch, -1),
        )


def stage_token(token: Rows, resident: ResidentRows, window: Rows) -> None:
    """Put a token's rows behind the resident ones and into its places in the window.

    Raises ValueError for other shapes or no room, before anything is written.
    """
    batch, heads, room, wide = resident.rows.shape
    D = token.keys.shape[-1]
    key, value = (batch, heads, 1, D), (batch, heads, 1, wide - D)
    shapes = {"keys": key, "values": value, "window.keys": key, "window.values": value}
    given = token.keys, token.values, window.keys, window.values
    for (name, shape), tensor in zip(shapes.items(), given, strict=True):
        if tensor.shape != shape or tensor.dtype != resident.rows.dtype:
            raise ValueError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, allowed is "
                f"{resident.rows.dtype} {shape}"
            )
    if len(resident) >= room:
        raise ValueError(
            f"resident: got {len(resident)} rows, allowed are fewer than its room of {room}"
        )
    resident.add(token.keys, token.values, None)
    window.keys.copy_(token.keys)
    window.values.copy_(token.values)

"""A decode step of the minimal decoder, with random weights and layers that contain tokens.

The decoder reads no text: keys are synthetic, each decode step gets a new random token as input,
and there is no rotary embedding. The sharpness of attention (`sharpen`) determines how many of a
step's rows were also retrieved by the previous steps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvindex
from benchmarks.common import workload
from benchmarks.common.shapes import Shape, sharpen, weights_of
from benchmarks.common.timing import Figures, drained, of_tokens, settled
from kvindex.core.capability import required
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Reserves
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.placement import default_placement
from kvindex_adapters.common.token_ring import TokenRing
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.graph import TokenGraph
from kvindex_adapters.decoder.quantized import PLAIN
from kvindex_adapters.decoder.sampling import Sampler, Sampling
from kvindex_adapters.decoder.session import Attention, Session
from kvindex_adapters.llama.fused import Fused, refusal
from kvindex_adapters.llama.weights import Weights
from kvindex_cuda.memory.row_cache import RowCache

SINK, LOCAL, UPDATE, K = 64, 256, 256, 100
"""Sizes of sink and local window, tokens between updates, and rows to retrieve: the defaults of
`attach`."""


WARM, REFILLED = 24, 128
"""Number of tokens that are generated before any is timed: after a change, and if the caches of
rows may be empty."""


class Everything:
    """Full attention over exactly `N` rows, in torch's fused kernel. The last row is the token's.

    This is a lower bound for full attention in a graph: no row is masked, and no buffer grows.
    """

    def __init__(self, g: Geometry, tokens: int, batch: int = 1) -> None:
        self._scale = g.scale
        shape = (2, batch, g.kv_heads, tokens, g.head_dim)
        self._keys, self._values = torch.empty(shape, dtype=g.dtype, device=g.device).normal_()

    def capture_refusal(self) -> str | None:
        """Return what `AttentionLayer` returns."""
        return None

    def prepare_replay(self) -> object:
        """Return what `AttentionLayer` returns."""
        return self

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Run as in `AttentionLayer`."""
        self._keys[:, :, -1:].copy_(keys)
        self._values[:, :, -1:].copy_(values)
        return sdpa(queries, self._keys, self._values, scale=self._scale, enable_gqa=True)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Run as in `AttentionLayer`."""
        return self.captured_step(queries, keys, values)

    def count_replay(self) -> None:
        """Run as in `AttentionLayer`."""


def dense(
    shape: Shape, g: Geometry, tokens: int, room: int, batch: int = 1
) -> list[DenseAttention]:
    """Return the decoder's own layers of full attention, with `tokens` tokens of each sequence."""
    made = []
    for number in range(shape.layers):
        layer = DenseAttention(g.scale, tokens + room)
        for keys, values in workload.tokens_of(g, number, batch, tokens):
            layer.append(keys, values)
        made.append(layer)
    return made


class Nothing(Everything):
    """No attention, to time a decode step without it."""

    def __init__(self) -> None:
        """Make a layer without keys and values."""

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the queries."""
        return queries


Draw = Callable[[Geometry, int, int, int], Iterator[tuple[Tensor, Tensor]]]
"""A function that yields keys and values of a layer, as `workload.tokens_of` does."""


def indexed(
    g: Geometry,
    spec: str,
    tokens: int,
    layers: int,
    room: int,
    batch: int = 1,
    *,
    k: int | None = None,
    draw: Draw = workload.tokens_of,
) -> list[AttentionLayer]:
    """Return layers that contain tokens in an index, a sink and a window, with memory for more.

    k: Number of rows that a step retrieves per KV head; None: `K`.
    draw: A function that generates the keys and values.
    """
    made = []
    for number in range(layers):
        index = kvindex.create(spec, **g.options(), **default_placement(g.device, spec))
        options = dict(sink=SINK, local_window=LOCAL, update_every=UPDATE, dense_below=0, k=k or K)
        layer = AttentionLayer(index, update_phase=number / layers, **options)
        keys, values = next(draw(g, number, batch, first()))
        layer.step(keys.repeat_interleave(g.group_size, dim=1), keys, values)
        fill(layer, number, tokens, room, draw)
        made.append(layer)
    settled()
    return made


def first() -> int:
    """Return how many tokens a layer must read before some move from its window into the index."""
    return LOCAL + max(UPDATE, SINK)


def fill(
    layer: AttentionLayer,
    number: int,
    tokens: int,
    room: int,
    draw: Draw = workload.tokens_of,
) -> None:
    """Fill the layer with a number of tokens, and reserve memory for more.

    The layer reads the first `first()` tokens, which include its sink. The other tokens are
    appended directly to its index.
    """
    index, read = layer.index, len(layer)
    for keys, values in draw(index.geometry, number, layer.batch_size, tokens):
        index.append(keys[:, :, read:], values[:, :, read:])
        read = 0
    required(index, Reserves).reserve(tokens + room)


def fits(g: Geometry, tokens: int, layers: int) -> bool:
    """Return True if all keys and values take at most nine tenths of the free memory."""
    need = 2 * layers * tokens * g.kv_heads * g.head_dim * g.dtype.itemsize
    return g.device.type != "cuda" or need < 0.9 * torch.cuda.mem_get_info(g.device)[0]


class Plan:
    """A decoder that generates with graphs of whole decode steps; how: options of its kernels."""

    def __init__(
        self,
        shape: Shape,
        g: Geometry,
        weights: Weights,
        layers: Sequence[Attention],
        *,
        batch: int = 1,
        graphs: bool = True,
        fused: bool = True,
        **how: bool | None,
    ) -> None:
        config = DecoderConfig(
            shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim, shape.vocabulary, g.scale
        )
        kernels = Fused(weights, **how) if fused and refusal(weights, batch) is None else None
        self._session = Session(weights, config, layers, [0] * batch, kernels)
        sampler = Sampler(Sampling(), g.device, kernels)
        self._graph = TokenGraph(self._session, sampler, graphs=graphs)
        self._ids = torch.randperm(shape.vocabulary, device=g.device)
        self._written = 0

    def tokens(self, count: int) -> list[list[int]]:
        """Generate `count` tokens of each sequence, one after another."""
        made = []
        for _ in range(count):
            self._graph.step()
            made.append(self._session.token[:, 0].tolist())
        return made

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return logits `[n, V]` after each of `ids` of one sequence.

        If a decode step can be a graph, this runs the same work as the graph, operation by
        operation.
        """
        session, made = self._session, []
        for number in ids:
            token = torch.full_like(session.token, number)
            if session.prepare_replay() is None:
                made.append(session.step(token[:, 0]))
                continue
            session.token.copy_(token)
            made.append(session.captured_step().clone())
            session.count_replay()
        return torch.cat(made)

    def turn(self, count: int, before: Callable[[], None] | None = None) -> Figures:
        """Generate `count` tokens. Return milliseconds per token, of the device and of the host.

        The host's time is between two tokens as it reads them. All tokens are launched and read in
        this turn, which begins when the device is idle. `before` is called before each token, and
        its time is not part of the device's time.
        """
        drained()
        token = self._session.token
        batch, ring = len(token), TokenRing(len(token), token.device)
        marks, at = [], [time.perf_counter()]

        def take() -> None:
            ring.take()
            at.append(time.perf_counter())

        for _ in range(count):
            # replace the sampled tokens by ids that did not occur before
            first = self._written % (len(self._ids) - batch)
            token.copy_(self._ids[first : first + batch, None])
            self._written += batch
            if before is not None:
                before()
            start = Mark(token.device)
            self._graph.step()
            marks.append((start, Mark(token.device)))
            ring.put(token[:, 0])
            if len(ring) > self._graph.ahead:
                take()
        while len(ring):
            take()
        return {"device_ms": [start.until(stop) for start, stop in marks], **of_tokens(at)}


class Mark:
    """A point in time: on the device's current stream, or on the host if the device is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Mark) -> float:
        """Wait for the later point. Return the milliseconds between the two points."""
        if self._event is None or later._event is None:
            return 1e3 * (later._at - self._at)
        later._event.synchronize()
        return self._event.elapsed_time(later._event)


def check(
    shape: Shape,
    g: Geometry,
    spec: str,
    tokens: int = 4096,
    count: int = 20,
    fused: bool = True,
    kind: str = PLAIN,
    batch: int = 1,
) -> None:
    """Raise SystemExit if a model of two layers gives different tokens with graphs and without."""
    few = shape._replace(layers=2)
    weights = weights_of(few, g, kind)
    made = []
    for graphs in (True, False):
        layers = indexed(g, spec, tokens, few.layers, count, batch)
        how = dict(batch=batch, graphs=graphs, fused=fused)
        made.append(Plan(few, g, weights, layers, **how).tokens(count))
    if made[0] != made[1]:
        raise SystemExit(f"tokens by graphs are {made[0]}, by steps {made[1]}; nothing is timed")


def caches() -> list[RowCache]:
    """Return all device caches of rows that exist in this process."""
    return [found for found in gc.get_objects() if type(found) is RowCache]


class Hits:
    """Measures the hit rate of the caches of rows between two calls of `rate`."""

    def __init__(self) -> None:
        self._before = self._counts()

    def rate(self) -> float:
        """Return the hit rate since the last call; 0 if nothing was looked up."""
        before, self._before = self._before, self._counts()
        looked_up, found = (self._before - before).tolist()
        return found / looked_up if looked_up else 0.0

    def _counts(self) -> Tensor:
        counts = [cache.counts.sum(0).cpu() for cache in caches()]
        return torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.int64)


MOST_SHARPENED = 640
"""Maximum number of tokens that `sharpen_for` generates."""


def sharpen_for(weights: Weights, plan: Plan, wanted: float, count: int = 40) -> float:
    """Bisect the sharpness of attention until the hit rate is `wanted`. Return the sharpness."""
    hits, sharpness, step = Hits(), 1.0, 4.0
    nearest = math.inf, sharpness
    while step > 1.01:  # the precision of 16-bit weights is about 1/128
        plan.turn(count)
        hits.rate()
        plan.turn(count)
        rate = hits.rate()
        nearest = min(nearest, (abs(rate - wanted), sharpness))
        factor = step if rate > wanted else 1 / step
        sharpen(weights, factor)
        sharpness, step = sharpness * factor, math.sqrt(step)
    sharpen(weights, nearest[1] / sharpness)
    return nearest[1]


def read_rate(device: torch.device) -> float:
    """Return the largest bytes per second at which a sum over a tensor reads memory."""
    data = torch.ones(2**30 if device.type == "cuda" else 2**20, device=device)
    best = math.inf
    for _ in range(6):
        start = Mark(device)
        data.sum()
        best = min(best, start.until(Mark(device)))
    return data.nbytes / best * 1e3

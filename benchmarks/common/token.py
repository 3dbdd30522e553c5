"""Decode steps of kvindex's decoder with random weights and synthetic keys and values.

The decoder reads no text: each decode step gets a new random token as input, and there is no rotary
embedding. A factor of the attention logits (`sharpen`) determines how many of the tokens that a
step retrieves were retrieved by earlier steps.
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
"""The defaults of `attach`: sizes of the sink and the local window, number of tokens that leave the
window together, and number of tokens to retrieve per KV head."""


WARM, REFILLED = 24, 128
"""Number of tokens that are generated, but not timed, before a measurement.

`REFILLED` tokens are generated if the device caches of keys and values may be empty.
"""


class Everything:
    """A layer with full attention over exactly `tokens` tokens, in torch's fused kernel.

    Its time is a lower bound for full attention in a CUDA graph, because no token is masked and no
    buffer grows. Each decode step overwrites the last token.
    """

    def __init__(self, g: Geometry, tokens: int, batch: int = 1) -> None:
        self._scale = g.scale
        shape = (2, batch, g.kv_heads, tokens, g.head_dim)
        self._keys, self._values = torch.empty(shape, dtype=g.dtype, device=g.device).normal_()

    def capture_refusal(self) -> str | None:
        """Return None: a CUDA graph can contain the decode step."""
        return None

    def prepare_replay(self) -> object:
        """Return the same object in each call: one CUDA graph can be replayed in all steps."""
        return self

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute attention for the newest token of each sequence, for a CUDA graph to capture."""
        self._keys[:, :, -1:].copy_(keys)
        self._values[:, :, -1:].copy_(values)
        return sdpa(queries, self._keys, self._values, scale=self._scale, enable_gqa=True)

    def step(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Tensor:
        """Compute attention for the newest token of each sequence, without a CUDA graph."""
        return self.captured_step(queries, keys, values)

    def count_replay(self) -> None:
        """Do nothing: the number of tokens does not change."""


def dense(
    shape: Shape, g: Geometry, tokens: int, room: int, batch: int = 1
) -> list[DenseAttention]:
    """Return the decoder's full-attention layers, filled with `tokens` tokens per sequence.

    Memory is reserved for `room` more tokens.
    """
    made = []
    for number in range(shape.layers):
        layer = DenseAttention(g.scale, tokens + room)
        for keys, values in workload.tokens_of(g, number, batch, tokens):
            layer.append(keys, values)
        made.append(layer)
    return made


class Nothing(Everything):
    """A layer that computes no attention, to time the rest of a decode step."""

    def __init__(self) -> None:
        """Make a layer that stores no keys and values."""

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the queries in place of attention outputs."""
        return queries


Draw = Callable[[Geometry, int, int, int], Iterator[tuple[Tensor, Tensor]]]
"""Function that yields the keys and values of a layer, as `workload.tokens_of` does."""


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
    """Return attention layers with an index, filled with synthetic tokens.

    Args:
        g: Shapes of a layer.
        spec: Name and options of the index.
        tokens: Number of tokens in each layer and sequence.
        layers: Number of layers.
        room: Number of further tokens for which memory is reserved.
        batch: Number of sequences.
        k: Number of tokens that a step retrieves per KV head; None for the default `K`.
        draw: Function that generates the keys and values.
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
    """Return after how many tokens a layer has appended its first tokens to its index."""
    return LOCAL + max(UPDATE, SINK)


def fill(
    layer: AttentionLayer,
    number: int,
    tokens: int,
    room: int,
    draw: Draw = workload.tokens_of,
) -> None:
    """Fill a layer with `tokens` tokens, and reserve memory for `room` more.

    The layer has already read the first tokens, among them its sink. The other tokens are appended
    to the index directly, which is faster.
    """
    index, read = layer.index, len(layer)
    for keys, values in draw(index.geometry, number, layer.batch_size, tokens):
        index.append(keys[:, :, read:], values[:, :, read:])
        read = 0
    required(index, Reserves).reserve(tokens + room)


def fits(g: Geometry, tokens: int, layers: int) -> bool:
    """Return True if the keys and values of all layers take less than 90% of the free memory."""
    need = 2 * layers * tokens * g.kv_heads * g.head_dim * g.dtype.itemsize
    return g.device.type != "cuda" or need < 0.9 * torch.cuda.mem_get_info(g.device)[0]


class Plan:
    """A decoder that generates tokens, with each decode step as one CUDA graph if `graphs` is True.

    `how` contains options of the decoder's fused kernels.
    """

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
        """Generate `count` tokens for each sequence. Return a list of token ids for each step."""
        made = []
        for _ in range(count):
            self._graph.step()
            made.append(self._session.token[:, 0].tolist())
        return made

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Read `n` given tokens of one sequence, and return the logits `[n, V]` after each token.

        The operations are those of a CUDA graph of the decode step, if there can be a graph, but
        are launched one by one.
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
        """Generate `count` tokens, and return the milliseconds per token.

        `device_ms` is the time of a decode step on the device. `token_ms` and `between_ms` are
        times between two tokens as the host receives them. The first step begins on an idle device.
        `before`, if given, is called before each step. It is not part of `device_ms`.
        """
        drained()
        token = self._session.token
        batch, ring = len(token), TokenRing(len(token), token.device)
        marks, at = [], [time.perf_counter()]

        def take() -> None:
            ring.take()
            at.append(time.perf_counter())

        for _ in range(count):
            # replace the sampled tokens by token ids that have not occurred yet
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
    """A point in time, on the current stream of a GPU, or on the host if the device is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Mark) -> float:
        """Wait for the point `later`, and return the milliseconds from this point to `later`."""
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
    """Raise SystemExit if CUDA graphs change the tokens that a model of two layers generates."""
    few = shape._replace(layers=2)
    weights = weights_of(few, g, kind)
    made = []
    for graphs in (True, False):
        layers = indexed(g, spec, tokens, few.layers, count, batch)
        how = dict(batch=batch, graphs=graphs, fused=fused)
        made.append(Plan(few, g, weights, layers, **how).tokens(count))
    if made[0] != made[1]:
        raise SystemExit(
            f"with CUDA graphs, a small model generates {made[0]}, without graphs {made[1]}; "
            "nothing is timed"
        )


def caches() -> list[RowCache]:
    """Return all device caches of rows (keys and values from host memory) in this process."""
    return [found for found in gc.get_objects() if type(found) is RowCache]


class Hits:
    """Measures the hit rate of all device caches of rows between two calls of `rate`.

    A hit is a key and value that the cache contains, so that it is not read from host memory.
    """

    def __init__(self) -> None:
        self._before = self._counts()

    def rate(self) -> float:
        """Return the hit rate since the last call, or 0 if the caches were not used."""
        before, self._before = self._before, self._counts()
        looked_up, found = (self._before - before).tolist()
        return found / looked_up if looked_up else 0.0

    def _counts(self) -> Tensor:
        counts = [cache.counts.sum(0).cpu() for cache in caches()]
        return torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.int64)


MOST_SHARPENED = 640
"""Maximum number of tokens that `sharpen_for` generates."""


def sharpen_for(weights: Weights, plan: Plan, wanted: float, count: int = 40) -> float:
    """Find the factor of the attention logits with which the caches of rows have a given hit rate.

    The weights are changed, and the factor is returned. It is found by bisection.
    """
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
    """Return the memory bandwidth in bytes per second, measured by the sum over a large tensor."""
    data = torch.ones(2**30 if device.type == "cuda" else 2**20, device=device)
    best = math.inf
    for _ in range(6):
        start = Mark(device)
        data.sum()
        best = min(best, start.until(Mark(device)))
    return data.nbytes / best * 1e3

"""Decode steps of kvindex's decoder with random weights and synthetic keys and values.

The decoder reads no text: each decode step gets a new random token as input, and there is no rotary
embedding. `sharpen_for` multiplies the attention logits by a factor. The
factor determines how often decode steps retrieve tokens that earlier steps have retrieved too. So
it sets the hit rate of the cache that stores recently retrieved tokens on the GPU.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.common.placement import default_placement
from kvindex_adapters.common.token_ring import TokenRing
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.draft_graphs import DraftGraphs
from kvindex_adapters.decoder.graph import TokenGraph
from kvindex_adapters.decoder.quantized import PLAIN
from kvindex_adapters.decoder.sampling import Sampler, Sampling
from kvindex_adapters.decoder.session import Attention, Session
from kvindex_adapters.llama.fused import Fused, refusal
from kvindex_adapters.llama.weights import Weights
from kvindex_cuda.memory.row_cache import RowCache

SINK, LOCAL, UPDATE, K = 64, 256, 256, DEFAULT_K
"""The defaults of `attach` in tokens: size of the sink, size of the local window, number of tokens
that move from the window into the index together, and number to retrieve per KV head."""


WARM, REFILLED = 24, 128
"""Number of tokens that are generated, but not timed, before a measurement.

It is `WARM`, or the larger number `REFILLED` if the device caches of keys and values may be empty.
"""


class Everything:
    """A layer with full attention over a fixed number of tokens, computed by torch's SDPA.

    Each decode step overwrites the last token. So no buffer grows and no mask is needed, and full
    attention in a CUDA graph cannot be faster than this layer.
    """

    def __init__(self, g: Geometry, tokens: int, batch: int = 1) -> None:
        self._scale = g.scale
        shape = (2, batch, g.kv_heads, tokens, g.head_dim)
        self._keys, self._values = torch.empty(shape, dtype=g.dtype, device=g.device).normal_()

    def capture_refusal(self, tokens: int = 1, *, full: bool | None = None) -> str | None:
        """Return None, because nothing prevents a CUDA graph of the decode step."""
        return None

    def prepare_replay(self, tokens: int = 1) -> object:
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

    def prepare_next(self, tokens: int = 1, ahead: int = 0) -> object:
        """Return the same object as `prepare_replay`."""
        return self

    def count_replay(
        self,
        kept: int | Sequence[int] = 1,
        of: int = 1,
        *,
        full: bool | None = None,
        held: bool = False,
    ) -> bool:
        """Return False: a decode step of this benchmark adds no token."""
        return False


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
    """A layer that computes no attention.

    With such layers, a benchmark measures how long a decode step takes without attention.
    """

    def __init__(self) -> None:
        """Make a layer that stores no keys and values."""

    def captured_step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the queries themselves, because no attention output is computed."""
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
    k: int | str | None = None,
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
        k: Number of tokens that a step retrieves per KV head, or "auto" for as many as the allowed
            error asks for; None for the default `K`.
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
    """Return how many tokens a layer must read before its index contains any token."""
    return LOCAL + max(UPDATE, SINK)


def fill(
    layer: AttentionLayer,
    number: int,
    tokens: int,
    room: int,
    draw: Draw = workload.tokens_of,
) -> None:
    """Fill a layer with `tokens` tokens, and reserve memory for `room` more.

    The layer must already contain its first tokens (see `first`), which include the sink. All later
    tokens are appended to the index directly, which is faster than reading them with the layer.
    """
    index, read = layer.index, len(layer)
    for keys, values in draw(index.geometry, number, layer.batch_size, tokens):
        index.append(keys[:, :, read:], values[:, :, read:])
        read = 0
    required(index, Reserves).reserve(tokens + room)


def fits(g: Geometry, tokens: int, layers: int) -> bool:
    """Return True if the keys and values of `tokens` tokens fit into GPU memory.

    They fit if those of all `layers` layers take less than 90% of the free memory. Always True on a
    CPU.
    """
    need = 2 * layers * tokens * g.kv_heads * g.head_dim * g.dtype.itemsize
    return g.device.type != "cuda" or need < 0.9 * torch.cuda.mem_get_info(g.device)[0]


class Plan:
    """A decoder that generates tokens. Each decode step is one CUDA graph if `graphs` is True.

    `how` contains options of `Fused`, the decoder's fused kernels.
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
        if isinstance(layers[0], AttentionLayer):
            self._session.length = len(layers[0])
        sampler = Sampler(Sampling(), g.device, kernels)
        self._graph = TokenGraph(self._session, sampler, graphs=graphs)
        self._drafts, self._captures = partial(DraftGraphs, self._session, sampler), graphs
        self._of_drafts: dict[int, DraftGraphs] = {}
        self._verifies: dict[int, DraftGraphs] = {}
        self._ids = torch.randperm(shape.vocabulary, device=g.device)
        self._written = 0

    def tokens(self, count: int) -> list[list[int]]:
        """Generate `count` tokens for each sequence. Return one list per step: a token id for each
        sequence."""
        made = []
        for _ in range(count):
            self._graph.step()
            made.append(self._session.token[:, 0].tolist())
        return made

    def logits(self, ids: Tensor) -> Tensor:
        """Run a decode step for each of `n` given tokens of each sequence.

        No CUDA graph is captured here. If a step could be captured, its operations are those of the
        graph (`captured_step`), launched one by one. Otherwise they are those of a normal step.

        Args:
            ids: Int64 `[B, n]`.

        Returns:
            The logits `[B, n, V]` after each token.
        """
        session, made = self._session, []
        for token in ids.unbind(1):
            if session.prepare_replay() is None:
                made.append(session.step(token))
                continue
            session.token.copy_(token[:, None])
            made.append(session.captured_step().clone())
            session.count_replay()
        return torch.stack(made, dim=1)

    def turn(self, count: int, before: Callable[[], None] | None = None) -> Figures:
        """Generate `count` tokens, and return the milliseconds per token.

        `device_ms` is the time of each decode step on the device. `token_ms` and `between_ms` are
        times between two tokens as the host receives them (see `of_tokens`). The first step begins
        on an idle device. If `before` is given, it is called before each step, and `device_ms` does
        not include its time.
        """
        drained()
        token = self._session.token
        batch, ring = len(token), TokenRing(len(token), token.device)
        marks, at = [], [time.perf_counter()]

        def take() -> None:
            ring.take()
            at.append(time.perf_counter())

        for _ in range(count):
            # Instead of the tokens that it has generated, the model reads random token ids that
            # have not occurred yet.
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

    def turn_drafts(self, steps: int, drafts: int) -> Figures:
        """Run decode steps of one token and `drafts` drafted ones, of which half are accepted.

        Returns:
            The milliseconds per step as for `turn`. The host reads the results of a step and counts
            its tokens before the next step begins.
        """
        drained()
        at = [time.perf_counter()]
        for _ in range(steps):
            ids = self._unused(drafts + 1)
            self.scored(ids, uneven(1 + drafts // 2, drafts + 1, len(ids)))
            at.append(time.perf_counter())
        return of_tokens(at)

    def _unused(self, count: int) -> Tensor:
        """Return `count` token ids for each sequence, int64 `[B, count]`, that have not been read
        yet. Ids are repeated when all have been read."""
        batch = len(self._session.token)
        first = self._written % (len(self._ids) - batch * count)
        self._written += batch * count
        return self._ids[first : first + batch * count].view(batch, count)

    def turn_verified(self, rounds: int, drafts: int, kept: int) -> Figures:
        """Generate tokens in rounds of `drafts` drafts, which full attention verifies.

        The model writes drafts as in `turn`, but one after the other. `kept` tokens of each round
        stay. In a batch, this is the mean (`uneven`), if the verification is a CUDA graph.

        Returns:
            The milliseconds per token: the time of a round divided by `kept`. The first two rounds
            are left out, because they capture the graph of the verification.
        """
        session, between = self._session, list[float]()
        graphs = self._verifies.setdefault(drafts, self._drafts(drafts + 1, full=True))
        drained()
        at = time.perf_counter()
        for _ in range(CAPTURES + rounds):
            ids, start = self._unused(drafts + 1), session.length
            with session.speculating(drafts + 1):
                for place in range(drafts):
                    session.token.copy_(ids[:, place, None])
                    self._graph.step(drafts=True)
                session.keep(start)
                scores = graphs.score(ids)
                if scores is None:
                    session.score(ids, full=True).argmax(-1).tolist()
                    session.keep(start + kept)
                else:
                    graphs.count(uneven(kept, drafts + 1, len(ids)), scores)
            now = time.perf_counter()
            between.append(1e3 * (now - at) / kept)
            at = now
        timed = between[CAPTURES:]
        return {"between_ms": timed, "token_ms": [statistics.fmean(timed)]}

    def verified(self, ids: Tensor) -> Tensor:
        """Append the tokens `ids`, int64 `[B, T]`, with full attention. Return logits `[B, T,
        V]`."""
        session, count = self._session, ids.shape[1]
        how = dict(full=True, graphs=self._captures)
        graphs = self._verifies.setdefault(count - 1, self._drafts(count, **how))
        with session.speculating(count):
            scores = graphs.score(ids)
            if scores is None:
                return session.score(ids, full=True)
            graphs.count(count, scores)
            return scores.logits.clone()

    def scored(self, ids: Tensor, kept: int | list[int]) -> Tensor:
        """Run a decode step of several tokens, of which the first `kept` stay.

        Args:
            ids: Int64 `[B, T]`.
            kept: Number of tokens that stay, or one number for each sequence.

        Returns:
            Logits `[B, T, V]`.
        """
        count = ids.shape[1]
        graphs = self._of_drafts.setdefault(count, self._drafts(count))
        scores = graphs.score(ids)
        if scores is None:
            raise SystemExit(f"drafts: {self._session.capture_refusal(count)}")
        self._session.count_replay(kept, scores.count)
        return scores.logits


def uneven(kept: int, most: int, batch: int) -> int | list[int]:
    """Return how many tokens of a step of `most` tokens each sequence keeps: `kept` in the mean.

    Every second sequence keeps one token less, and the one after it keeps one more, so that
    sequences get padding as they do with real drafts. All keep `kept` if it is 1 or `most`.
    """
    if batch == 1 or not 1 < kept < most:
        return kept
    pairs = batch // 2
    return [*[kept - 1, kept + 1] * pairs, *[kept] * (batch % 2)]


class Mark:
    """A point in time, to measure the time until another one.

    The constructor records the current time: on a GPU with a CUDA event in the current stream, on
    a CPU with the clock of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Mark) -> float:
        """Wait until the device has reached `later`. Return the milliseconds between the marks."""
        if self._event is None or later._event is None:
            return 1e3 * (later._at - self._at)
        later._event.synchronize()
        return self._event.elapsed_time(later._event)


def check_verified(
    shape: Shape, g: Geometry, spec: str, drafts: int, batch: int = 1, **how: bool
) -> None:
    """Check that steps with full attention compute the same logits in a CUDA graph and without.

    Uses a model of two layers over 4,096 tokens, and the limit of `check_drafts`.
    """
    few = shape._replace(layers=2)
    weights, sizes = weights_of(few, g), (4096, few.layers, 40, batch)
    mine, theirs = (
        Plan(few, g, weights, indexed(g, spec, *sizes), batch=batch, graphs=graphs, **how)
        for graphs in (True, False)
    )
    for plan in (mine, theirs):
        plan.tokens(3)
    ids = torch.arange(batch * (drafts + 1), device=g.device).view(batch, -1)
    for number in range(4):
        off = _difference(*(plan.verified(ids) for plan in (mine, theirs)))
        if off > 0.1:
            raise SystemExit(
                f"verified: step {number} with full attention gives logits that differ by "
                f"{off:.3f} of their standard deviation with a CUDA graph; nothing is timed"
            )


def _difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of logits, divided by their standard deviation."""
    return float((mine - theirs).float().abs().max() / theirs.float().std())


def check_drafts(
    shape: Shape,
    g: Geometry,
    spec: str,
    drafts: int,
    kind: str = PLAIN,
    batch: int = 1,
    **how: bool,
) -> None:
    """Check that a step of several tokens computes the logits of as many steps of one token.

    Uses a model of two layers over 4,096 tokens. Raise SystemExit if logits differ by more than a
    tenth of their standard deviation, in bfloat16 mostly rounding.
    """
    few = shape._replace(layers=2)
    weights, sizes = weights_of(few, g, kind), (4096, few.layers, 40, batch)
    one, several = (
        Plan(few, g, weights, indexed(g, spec, *sizes), batch=batch, **how) for _ in range(2)
    )
    for plan in (one, several):
        plan.tokens(3)  # after the first steps, graphs can be captured
    ids = torch.arange(batch * (drafts + 1), device=g.device).view(batch, -1)
    for number in range(4):  # the first step compiles, and the second one is captured
        mine, theirs = several.scored(ids, drafts + 1), one.logits(ids)
        off = _difference(mine, theirs)
        if off > 0.1:
            raise SystemExit(
                f"drafts: step {number} of {drafts + 1} tokens gives logits that differ by "
                f"{off:.3f} of their standard deviation from those of single tokens; nothing is "
                "timed"
            )


def check(
    shape: Shape,
    g: Geometry,
    spec: str,
    tokens: int = 4096,
    count: int = 20,
    fused: bool = True,
    kind: str = PLAIN,
    batch: int = 1,
    k: int | str | None = None,
) -> None:
    """Check that CUDA graphs do not change the tokens that a model of two layers generates.

    If the tokens with and without CUDA graphs differ, raise SystemExit.
    """
    few = shape._replace(layers=2)
    weights = weights_of(few, g, kind)
    made = []
    for graphs in (True, False):
        layers = indexed(g, spec, tokens, few.layers, count, batch, k=k)
        how = dict(batch=batch, graphs=graphs, fused=fused)
        made.append(Plan(few, g, weights, layers, **how).tokens(count))
    if made[0] != made[1]:
        raise SystemExit(
            "check: a small model generates different tokens with and without CUDA graphs; nothing "
            f"is timed. The tokens are {made[0]} with graphs, and {made[1]} without."
        )


def caches() -> list[RowCache]:
    """Return all device caches of rows (keys and values from host memory) in this process."""
    return [found for found in gc.get_objects() if type(found) is RowCache]


class Hits:
    """Measures the hit rate of all device caches for keys and values that are in host memory.

    A hit is a retrieved token whose key and value are in a cache, so that they are not read from
    host memory. Each call of `rate` returns the hit rate since the call before.
    """

    def __init__(self) -> None:
        self._before = self._counts()

    def rate(self) -> float:
        """Return the hit rate of the row caches since the last call, or 0 if they were not used."""
        before, self._before = self._before, self._counts()
        looked_up, found = (self._before - before).tolist()
        return found / looked_up if looked_up else 0.0

    def _counts(self) -> Tensor:
        counts = [cache.counts.sum(0).cpu() for cache in caches()]
        return torch.stack(counts).sum(0) if counts else torch.zeros(2, dtype=torch.int64)


def rows_found(layers: Sequence[AttentionLayer]) -> Tensor:
    """Return how often searches have found each number of rows, int64 `[L, 1025]`, on the CPU.

    The layers were created with `k="auto"`.
    """
    found = [layer.traffic.found for layer in layers]
    return torch.stack([one.cpu() for one in found if one is not None])


def mean_rows(found: Tensor) -> Tensor:
    """Return the mean number of rows of a histogram of such numbers, float64 `[...]`.

    found: int64 `[..., 1025]`.
    """
    numbers = torch.arange(found.shape[-1], dtype=torch.float64)
    return (found * numbers).sum(-1) / found.sum(-1).clamp_min(1)


def allow_errors(
    layers: Sequence[AttentionLayer], plan: Plan, wanted: Sequence[int], count: int = 8
) -> list[float]:
    """Set the allowed error of each layer so that searches find a given number of rows on average.

    A bisection finds the errors. All layers are measured in the same decode steps.

    Args:
        layers: The layers, with `k="auto"`.
        plan: Runs decode steps of these layers.
        wanted: Mean number of rows per KV head for each layer.
        count: Number of decode steps after which the errors change.

    Returns:
        The allowed error of each layer.
    """
    low, high = [1e-4] * len(layers), [10.0] * len(layers)
    plan.turn(WARM)
    for _ in range(14):
        before = rows_found(layers)
        for layer, few, many in zip(layers, low, high, strict=True):
            layer.error = math.sqrt(few * many)
        plan.turn(count)
        means = mean_rows(rows_found(layers) - before).tolist()
        for i, (mean, layer) in enumerate(zip(means, layers, strict=True)):
            assert layer.error is not None
            (low if mean > wanted[i] else high)[i] = layer.error
    return [layer.error or 0.0 for layer in layers]


CAPTURES = 2
"""Number of rounds that `Plan.turn_verified` runs before those that it times."""

MOST_SHARPENED = 640
"""Maximum number of tokens that `sharpen_for` generates."""


def sharpen_for(weights: Weights, plan: Plan, wanted: float, count: int = 40) -> float:
    """Multiply attention logits by a factor, so that device caches have the hit rate `wanted`.

    A bisection finds the factor. The function changes the model's weights so that they produce
    these logits, and returns the factor.
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

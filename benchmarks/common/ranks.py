"""Time decode steps on several GPUs of one host. The GPUs share the heads or the tokens."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, Shape, sharpen, weights_of
from benchmarks.common.timing import Figures, captured, in_turns
from kvindex.core.geometry import Geometry
from kvindex.core.graphs import GRAPHS
from kvindex.core.ranks import Ranks
from kvindex_adapters.common import parallel
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.shards import shard
from kvindex_adapters.llama.weights import Weights

ROOM = 4096
"""Number of tokens for which memory is reserved after the context. Fewer tokens are generated."""

WAIT_S = 300
"""Seconds that a rank waits for a message. It waits four times as long while memory is pinned."""

CHECKED, ALL, CLOSE = 700, 512, 3e-2
"""Constants of the check: tokens of a layer; rows that a step retrieves; largest distance of logits
relative to their norm.

The distance is for two layers in bfloat16 with rows of eight bits per number.
"""

TRIED = 20
"""Number of generated tokens that are compared."""

SUMS = 64
"""Number of all-reduce sums in a graph: two for each of 32 layers."""


class Silent(HeadRanks):
    """Ranks that exchange nothing. Results are wrong, but show the time without collectives."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return this rank's part."""
        return partial

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return this rank's logits in place of all ranks' logits."""
        return logits.repeat(1, self.count)

    def first(self, tokens: Tensor) -> Tensor:
        """Return this rank's tokens."""
        return tokens


class Together:
    """The ranks, the shapes that they measure, and a way to wait for each other without the GPU."""

    def __init__(self, shape: Shape, g: Geometry, spec: str) -> None:
        self.shape, self.g, self.spec = shape, g, spec
        self.rank, self.count = parallel.rank()
        limit = timedelta(seconds=4 * WAIT_S)
        self._waiting = dist.new_group(backend="gloo", timeout=limit) if self.count > 1 else None

    def told(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. All ranks must call this."""
        values = [value]
        if self._waiting is not None:
            dist.broadcast_object_list(values, src=0, group=self._waiting)
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if self._waiting is not None:
            dist.barrier(self._waiting)

    def ranks(self, kind: type[HeadRanks] = HeadRanks, **how: bool) -> HeadRanks:
        """Return ranks that share the heads."""
        return kind(Ranks.of(None, WAIT_S), self.g.device, **how)

    def sharded(self, block: int) -> str:
        """Return the spec of the index with its tokens distributed over all ranks."""
        return f"{self.spec}+sharded:block={block}:timeout_s={WAIT_S}"

    @property
    def own(self) -> tuple[Shape, Geometry]:
        """Return shape and geometry of this rank's heads."""
        shape = self.shape._replace(
            q_heads=self.shape.q_heads // self.count, kv_heads=self.shape.kv_heads // self.count
        )
        return shape, shape.geometry(self.g.dtype, str(self.g.device))

    def draw(
        self, g: Geometry, number: int, batch: int, tokens: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of `workload.tokens_of`, but only for this rank's heads."""
        part = slice(self.rank * g.kv_heads, (self.rank + 1) * g.kv_heads)
        for keys, values in workload.tokens_of(self.g, number, batch, tokens):
            yield keys[:, part].contiguous(), values[:, part].contiguous()


def with_ranks(weights: Weights, ranks: HeadRanks) -> Weights:
    """Return the same weights with other `ranks`, which add up activations in another way."""
    layers = tuple(replace(layer, ranks=ranks) for layer in weights.layers)
    return replace(weights, layers=layers)


# The check


def check(together: Together, block: int) -> dict[str, float]:
    """Return the distances of logits from those of full attention in one process, by part.

    Raises SystemExit on all ranks if a distance is too large, or if the tokens that graphs generate
    differ from the tokens of the same launches without a graph.
    """
    few, (own, g) = together.shape._replace(layers=2), together.own
    own = own._replace(layers=2)
    whole = weights_of(few, together.g)
    ids = range(5, 5 + TRIED)
    want = token.Plan(few, together.g, whole, dense(together), fused=False).logits(ids).float()
    shared, found = shard(whole, together.ranks()), {}
    size = dict(tokens=CHECKED, layers=2, room=64)
    parts: dict[str, Callable[..., token.Plan]] = {
        "heads": lambda k: token.Plan(
            own, g, shared, token.indexed(g, together.spec, **size, k=k, draw=together.draw)
        ),
        "tokens": lambda k: token.Plan(
            few, together.g, whole, token.indexed(together.g, together.sharded(block), **size, k=k)
        ),
    }
    for name, plan in parts.items():
        got = plan(ALL).logits(ids).float()
        found[name] = float((got - want).norm() / want.norm())
        torch.manual_seed(0)
        graphs = plan(None).tokens(TRIED)
        with op_by_op(together.g.device):
            steps = plan(None).tokens(TRIED)
        right = found[name] < CLOSE and graphs == steps
        wrong = [one for one in gathered(together, right) if not one]
        if wrong:
            raise SystemExit(
                f"{name}: logits are {found[name]:.3f} from those of one process, tokens by graphs "
                f"{graphs}, op by op {steps}; nothing is timed"
            )
    return found


def gathered(together: Together, value: bool) -> list[bool]:
    """Return the values of all ranks."""
    if together.count == 1:
        return [value]
    said = [torch.tensor([value], device=together.g.device)]
    return Ranks.of(None, WAIT_S).gather(*said)[0].flatten().tolist()


def dense(together: Together) -> list[DenseAttention]:
    """Return two layers of full attention over the same tokens that `token.indexed` appends."""
    g, made = together.g, []
    for number in range(2):
        layer = DenseAttention(g.scale, CHECKED + 64)
        layer.append(*next(workload.tokens_of(g, number, 1, token.first())))
        for keys, values in workload.tokens_of(g, number, 1, CHECKED):
            layer.append(keys[:, :, token.first() :], values[:, :, token.first() :])
        made.append(layer)
    return made


@contextmanager
def op_by_op(device: torch.device) -> Iterator[None]:
    """Within the context, a graph's replay runs its work again, operation by operation."""

    class Again:
        def __init__(self, device: torch.device, work: Callable[[], Any], draws: Any) -> None:
            self.replay = work

    before = GRAPHS.get(device.type)
    GRAPHS[device.type] = Again
    try:
        yield
    finally:
        del GRAPHS[device.type]
        if before is not None:
            GRAPHS[device.type] = before


# What is timed


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results after each part. All ranks yield the figures that rank 0 measured."""
    shape, start = SHAPES[given.decoder], time.monotonic()
    g = shape.geometry(getattr(torch, given.dtype), given.device)
    together = Together(shape, g, given.index)
    about: dict[str, Any] = dict(shape=shape._asdict(), ranks=together.count, k=token.K)
    about |= dict(context=given.context, sink=token.SINK, window=token.LOCAL)
    about |= dict(update_every=token.UPDATE, check=check(together, given.block), hit_rates={})
    rounds = given.written // given.turn

    def timed(turns: Mapping[str, Callable[[], Figures]]) -> None:
        for warm in turns.values():
            warm()
        for found in in_turns(turns, rounds, float("inf"), next(iter(turns))):
            about.update({name: found[name] for name in turns if found["rounds"]})

    def by_hits(name: str, plan: token.Plan) -> dict[str, Callable[[], Figures]]:
        hits, about["hit_rates"][name] = token.Hits(), []

        def turn() -> Figures:
            plan.turn(token.WARM)
            hits.rate()
            found = plan.turn(given.turn)
            about["hit_rates"][name].append(hits.rate())
            return found

        return {name: turn}

    def noted() -> dict[str, Any]:
        if "one" in about:
            one = about["one"]["device_ms"]
            names = [name for name in ("tokens", *HEADS) if name in about]
            about["ratio"] = {name: about[name]["device_ms"] / one for name in names}
        about["seconds"] = time.monotonic() - start
        return about

    sharpness = 0.0
    if together.rank == 0:
        weights = weights_of(shape, g)
        layers = token.indexed(g, given.index, given.context, shape.layers, ROOM)
        plan = token.Plan(shape, g, weights, layers)
        plan.turn(token.WARM)
        sharpness = token.sharpen_for(weights, plan, given.hit_rate)
        timed(by_hits("one", plan))
        del weights, layers, plan
    about["sharpness"] = sharpness = together.told(sharpness)
    yield noted()
    empty()
    weights = weights_of(shape, g)
    sharpen(weights, sharpness)
    if "tokens" in given.parts:
        spec, context = together.sharded(given.block), together.count * given.context
        layers = token.indexed(g, spec, context, shape.layers, ROOM)
        together.wait()
        torch.manual_seed(0)  # so that all ranks sample the same ids
        timed(by_hits("tokens", token.Plan(shape, g, weights, layers)))
        del layers
        yield noted()
    if "heads" in given.parts:
        own, geometry = together.own
        shared = shard(weights, together.ranks())
        del weights
        empty()
        workload.free()  # the next rows have other sizes
        size = given.context, shape.layers, ROOM
        layers = token.indexed(geometry, given.index, *size, draw=together.draw)
        together.wait()
        ways = {"heads": together.ranks(), "silent": together.ranks(Silent)}
        shot = together.ranks(one_shot=True)
        if shot.one_shot:
            ways["one_shot"] = shot
        turns: dict[str, Callable[[], Figures]] = {}
        for name, ranks in ways.items():
            torch.manual_seed(0)
            way = with_ranks(shared, ranks)
            turns |= by_hits(name, token.Plan(own, geometry, way, layers))
        timed(turns)
        talking = {name: ranks for name, ranks in ways.items() if name != "silent"}
        about["sum_us"] = {name: sum_us(ranks, g, shape.hidden) for name, ranks in talking.items()}
        yield noted()


HEADS = ("heads", "one_shot", "silent")
"""Ways to add up activations over ranks that share the heads."""


def sum_us(ranks: HeadRanks, g: Geometry, hidden: int) -> float:
    """Return the microseconds of one sum of a token's activations, in a graph of `SUMS` sums."""
    part = torch.zeros((1, hidden), dtype=g.dtype, device=g.device)

    def run() -> None:
        for _ in range(SUMS):
            ranks.sum(part)

    replay = captured(run).replay if g.device.type == "cuda" else run
    times = []
    for _ in range(20):
        start = token.Mark(g.device)
        replay()
        times.append(start.until(token.Mark(g.device)))
    return 1e3 * sorted(times)[len(times) // 2] / SUMS


def empty() -> None:
    """Free unused memory of the device. Pinned memory is kept for the next rows."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

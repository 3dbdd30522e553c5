"""Time decode steps if several GPUs of one host share the heads or the tokens of a model."""

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
"""Number of tokens after the context for which memory is reserved. Fewer tokens are generated."""

WAIT_S = 300
"""Time in seconds that a rank waits for a message. While memory is pinned, it waits four times as
long."""

CHECKED, ALL, CLOSE = 700, 512, 3e-2
"""Constants of the check: `CHECKED` tokens are in each layer, and a step retrieves `ALL` of them.

`CLOSE` is the largest allowed difference of logits, relative to their norm. It is chosen for a
model of two layers in bfloat16 whose keys and values have eight bits per number.
"""

TRIED = 20
"""Number of generated tokens that the check compares."""

SUMS = 64
"""Number of all-reduce operations in a timed CUDA graph: two for each of 32 layers."""


class Silent(HeadRanks):
    """Ranks that exchange no data, used to measure the time of a decode step without communication.

    The results of such a decode step are wrong.
    """

    def sum(self, partial: Tensor) -> Tensor:
        """Return `partial` unchanged, instead of the sum of this tensor over all ranks."""
        return partial

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of this rank, copied `count` times, instead of gathering all ranks'.

        So the result has the right shape, but needs no communication.
        """
        return logits.repeat(1, self.count)

    def first(self, tokens: Tensor) -> Tensor:
        """Return `tokens` unchanged, instead of the tokens that rank 0 sampled."""
        return tokens


class Together:
    """Describes the group of ranks, the rank of this process, and the shapes that are measured.

    With its methods, ranks can exchange values and wait for each other without using the GPU.
    """

    def __init__(self, shape: Shape, g: Geometry, spec: str) -> None:
        self.shape, self.g, self.spec = shape, g, spec
        self.rank, self.count = parallel.rank()
        limit = timedelta(seconds=4 * WAIT_S)
        self._waiting = dist.new_group(backend="gloo", timeout=limit) if self.count > 1 else None

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. All ranks must call this method."""
        values = [value]
        if self._waiting is not None:
            dist.broadcast_object_list(values, src=0, group=self._waiting)
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks have called this method."""
        if self._waiting is not None:
            dist.barrier(self._waiting)

    def ranks(self, kind: type[HeadRanks] = HeadRanks, **how: bool) -> HeadRanks:
        """Create the `HeadRanks` object that divides the heads of the model among the ranks."""
        return kind(Ranks.of(None, WAIT_S), self.g.device, **how)

    def sharded(self, block: int) -> str:
        """Return the name and options of an index that stores only the tokens of this rank.

        The wrapper `+sharded` gives `block` successive tokens to each rank in turn.
        """
        return f"{self.spec}+sharded:block={block}:timeout_s={WAIT_S}"

    @property
    def own(self) -> tuple[Shape, Geometry]:
        """Shapes for this rank if the ranks share the heads: of the model, and of a layer.

        Both count only the heads of this rank.
        """
        shape = self.shape._replace(
            q_heads=self.shape.q_heads // self.count, kv_heads=self.shape.kv_heads // self.count
        )
        return shape, shape.geometry(self.g.dtype, str(self.g.device))

    def draw(
        self, g: Geometry, number: int, batch: int, tokens: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield synthetic keys and values of a layer, only for the heads of this rank."""
        part = slice(self.rank * g.kv_heads, (self.rank + 1) * g.kv_heads)
        for keys, values in workload.tokens_of(self.g, number, batch, tokens):
            yield keys[:, part].contiguous(), values[:, part].contiguous()


def with_ranks(weights: Weights, ranks: HeadRanks) -> Weights:
    """Return a copy of `weights` whose layers add up their outputs over the ranks in `ranks`."""
    layers = tuple(replace(layer, ranks=ranks) for layer in weights.layers)
    return replace(weights, layers=layers)


# The check


def check(together: Together, block: int) -> dict[str, float]:
    """Check the output of a small model that runs on several ranks.

    The check runs twice: first each rank has a part of the heads, then a part of the tokens.

    Returns:
        The relative difference of the logits from those of full attention in one process, for each
        of the two runs: "heads" and "tokens".

    Raises:
        SystemExit: On any rank, a difference is too large, or the model generates other tokens with
            CUDA graphs than without. All ranks then raise it.
    """
    few, (own, g) = together.shape._replace(layers=2), together.own
    own = own._replace(layers=2)
    whole = weights_of(few, together.g)
    ids = torch.arange(5, 5 + TRIED, device=together.g.device)[None]
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
                f"{name}: the check failed; nothing is timed. The relative difference of the "
                f"logits from those of one process is {found[name]:.3f}, allowed is less than "
                f"{CLOSE}. The generated tokens are {graphs} with CUDA graphs and {steps} without."
            )
    return found


def gathered(together: Together, value: bool) -> list[bool]:
    """Collect the value of each rank. Return the values of all ranks; all ranks get the same."""
    if together.count == 1:
        return [value]
    said = [torch.tensor([value], device=together.g.device)]
    return Ranks.of(None, WAIT_S).gather(*said)[0].flatten().tolist()


def dense(together: Together) -> list[DenseAttention]:
    """Return two layers of full attention, filled with the tokens that `token.indexed` appends."""
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
    """Run without CUDA graphs in a `with` block: a "replay" calls the captured function again."""

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
    """Measure one GPU, then several GPUs with the tokens split among them, then with the heads
    split.

    Yield the results so far after each of these three measurements. All ranks yield the times of
    rank 0.
    """
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
    about["sharpness"] = sharpness = together.broadcast(sharpness)
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
        workload.free()  # the next keys and values have other shapes
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
"""Ways to add up activations if ranks share the heads: with NCCL, in one kernel, or not at all."""


def sum_us(ranks: HeadRanks, g: Geometry, hidden: int) -> float:
    """Return how many microseconds it takes to add up a token's activations over all ranks.

    The time is measured with a CUDA graph that adds up activations `SUMS` times.
    """
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
    """Free unused device memory. Pinned host memory stays reserved for the next layers."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""Time decode steps on several GPUs of one host, among which heads or tokens are divided."""

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

`CLOSE` is the largest allowed distance of logits, relative to their norm. It fits two layers in
bfloat16 whose keys and values have eight bits per number.
"""

TRIED = 20
"""Number of generated tokens that the check compares."""

SUMS = 64
"""Number of all-reduce operations in a timed CUDA graph: two for each of 32 layers."""


class Silent(HeadRanks):
    """Ranks that exchange no data. Results are wrong, but show the time without communication."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return this rank's tensor without adding those of the other ranks."""
        return partial

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of this rank, repeated in place of the logits of the other ranks."""
        return logits.repeat(1, self.count)

    def first(self, tokens: Tensor) -> Tensor:
        """Return the tokens of this rank in place of those of the first rank."""
        return tokens


class Together:
    """This process as one of several ranks, with the shapes that are measured.

    Ranks can wait for each other without using the GPU.
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
        """Return the ranks as `HeadRanks`, which divide the heads of the model among them."""
        return kind(Ranks.of(None, WAIT_S), self.g.device, **how)

    def sharded(self, block: int) -> str:
        """Return the name and options of an index whose tokens are distributed over all ranks."""
        return f"{self.spec}+sharded:block={block}:timeout_s={WAIT_S}"

    @property
    def own(self) -> tuple[Shape, Geometry]:
        """Return the shape of the model and of a layer with only the heads of this rank."""
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
    """Return weights that use `ranks` to add up activations, and are otherwise the same."""
    layers = tuple(replace(layer, ranks=ranks) for layer in weights.layers)
    return replace(weights, layers=layers)


# The check


def check(together: Together, block: int) -> dict[str, float]:
    """Check a small model whose heads, and then whose tokens, are divided among the ranks.

    Returns:
        The relative distance of the logits from those of full attention in one process, for
        "heads" and for "tokens".

    Raises:
        SystemExit: On any rank, a distance is too large, or the tokens that CUDA graphs generate
            differ from those of the same operations without graphs. All ranks raise it.
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
                f"{name}: logits are {found[name]:.3f} from those of one process (relative), and "
                f"CUDA graphs generate {graphs}, single operations {steps}; nothing is timed"
            )
    return found


def gathered(together: Together, value: bool) -> list[bool]:
    """Return the values of all ranks on each rank."""
    if together.count == 1:
        return [value]
    said = [torch.tensor([value], device=together.g.device)]
    return Ranks.of(None, WAIT_S).gather(*said)[0].flatten().tolist()


def dense(together: Together) -> list[DenseAttention]:
    """Return two layers of full attention with the same tokens that `token.indexed` appends."""
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
    """Within a `with` block, replace CUDA graphs: a replay runs the captured function again."""

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
    """Measure one GPU alone, then GPUs that divide the tokens, then GPUs that divide the heads.

    Yield the results so far after each of the three. All ranks yield the times of rank 0.
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
"""Ways to add up activations over the ranks among which the heads are divided."""


def sum_us(ranks: HeadRanks, g: Geometry, hidden: int) -> float:
    """Return how many microseconds it takes to add up a token's activations over all ranks.

    The time is measured with a CUDA graph that contains `SUMS` such sums.
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

"""Buffers of steps that all indexes of a shape share, one after another; what each asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.streams import raw_stream
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.dispatch import options_of
from kvindex_cuda.pariskv.steps.base import BaseStep
from kvindex_cuda.pariskv.steps.latents import LatentsStep
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.pariskv.steps.tiered_votes import TieredVotesStep
from kvindex_cuda.runtime.arguments import multiprocessors
from kvindex_cuda.runtime.launch import capturing

HEADROOM = 2**16
"""Of buffers: they are made anew past it."""


class SharedStep(BaseStep):
    """A step that several indexes run one after another, whatever the stream."""

    _stream: torch.cuda.Stream | None = None
    _handle: int | None = None  # its own
    _fixed: tuple[Tensor, Tensor] | None = None

    def acquire(self) -> None:
        """What the current stream runs from here on comes after what another one has run.

        Not so for a captured stream: a graph is replayed when its owner says so.
        """
        device = self.geometry.device
        if device.type != "cuda" or raw_stream(device.index) == self._handle or capturing(device):
            return
        current = torch.cuda.current_stream(device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._handle = current, current.cuda_stream

    # What graphs of steps share

    def fixed(self) -> tuple[Tensor, Tensor]:
        """Where a graph reads queries `[B, H, D]`, and where it writes `parts`, both contiguous."""
        if self._fixed is None:
            g, output = self.geometry, self.output
            words = (self.lse.nbytes + self.found.nbytes) // output.element_size()
            asked = output.new_empty((self.batch, g.q_heads, g.head_dim))
            self._fixed = asked, output.new_empty(output.numel() + words)
        return self._fixed

    def parts(self, answer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`output` `[B, H, Dv]`, `lse` `[B, H]`, `found` `[B, G]`: of one tensor, for one copy."""
        g, B = self.geometry, self.batch
        H, G, Dv = g.q_heads, g.kv_heads, g.value_dim
        output = answer.as_strided((B, H, Dv), (H * Dv, Dv, 1))
        sums, words = answer.view(torch.float32), answer.view(torch.int32)
        start = len(words) - B * G
        lse = sums.as_strided((B, H), (H, 1), start - B * H)
        return output, lse, words.as_strided((B, G), (G, 1), start)


@dataclass
class Use:
    """A step, and what an index asks of it: wanted int32 `[B]`, never more than it has room for.

    places: `0` to `k - 1`; captured: whether a graph holds it, so that it must stay; need: what it
    must have room for now; reads: what it read last beside a `ResidentRows`, and of what that was
    made.
    """

    step: SharedStep
    wanted: Tensor
    places: Tensor
    captured: bool = False
    need: int = 0
    reads: tuple[tuple[object, ...], State] | None = None

    def want(self, candidates: list[int], need: int) -> list[int]:
        """Have so many candidates asked for, of each row of the batch, for which room is needed.

        Gives what `wanted` must then hold.
        """
        self.need = need
        return [min(each, self.step.most) for each in candidates]

    @property
    def outgrown(self) -> bool:
        """Whether there is room for fewer than that."""
        return self.need > self.step.most


class _SignVotes(SharedStep, SignVotesStep):
    """`SignVotesStep`, shared."""


class _TieredVotes(SharedStep, TieredVotesStep):
    """`TieredVotesStep`, shared."""


class _Latents(SharedStep, LatentsStep):
    """`LatentsStep`, shared."""


SHARED: dict[str, type[SharedStep]] = dict(
    sign_votes=_SignVotes, tiered_votes=_TieredVotes, latents=_Latents
)
"""By kind (`dispatch.kind_of`)."""

_alive: WeakValueDictionary[tuple[Any, ...], SharedStep] = WeakValueDictionary()


def shared(
    geometry: Geometry,
    layout: Layout,
    kind: str,
    config: Any,
    *,
    batch: int,
    blocks: int,
    k: int,
    most: int,
    ragged: bool = False,
) -> SharedStep:
    """A step of a kind for `k` rows with room for at least `most`: the one in use, or a new one.

    config: a `ParisKVConfig`; blocks: `S` of the tables that it will read; ragged: as
    of `BaseStep`.
    """
    g = geometry
    sizes = (g.q_heads, g.kv_heads, g.head_dim, g.value_dim, g.scale, g.softcap, g.dtype, g.device)
    options = options_of(kind, config)
    key = (*sizes, layout, kind, *options.values(), batch, blocks, k, ragged)
    step = _alive.get(key)
    if step is None or step.most < most:
        options |= dict(batch=batch, k=k, most=most, ragged=ragged)
        options["multiprocessors"] = multiprocessors(g.device)
        step = SHARED[kind](g, layout, **options)
        _alive[key] = step
    return step


def with_headroom(need: int) -> int:
    """Room over what is needed, and no more than as much again."""
    return need + min(need, HEADROOM)

"""Objects that run the kernels of a decode step, and store their buffers.

All indexes of the same shape share one such object and use it one after another.
"""

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
"""Most spare entries of a step's buffers. When an index needs more room, it gets a step with new
buffers."""


class SharedStep(BaseStep):
    """The buffers and kernel launches of a decode step.

    Several indexes may share this object. They use it one after another, possibly on different
    CUDA streams.
    """

    _stream: torch.cuda.Stream | None = None
    _handle: int | None = None  # handle of the stream that used the step last
    _fixed: tuple[Tensor, Tensor] | None = None

    def acquire(self) -> None:
        """Make the current stream wait for the stream that used the buffers last.

        This does nothing during the capture of a CUDA graph, because the graph's owner determines
        the order of replays.
        """
        device = self.geometry.device
        if device.type != "cuda" or raw_stream(device.index) == self._handle or capturing(device):
            return
        current = torch.cuda.current_stream(device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._handle = current, current.cuda_stream

    # Tensors that graphs of steps share

    def fixed(self) -> tuple[Tensor, Tensor]:
        """Return two contiguous tensors that all CUDA graphs of this step use.

        The graphs read queries `[B, H, D]` from the first tensor, and write results to the second.
        The method `parts` splits the results into views.
        """
        if self._fixed is None:
            g, output = self.geometry, self.output
            words = (self.lse.nbytes + self.found.nbytes) // output.element_size()
            asked = output.new_empty((self.batch, g.q_heads, g.head_dim))
            self._fixed = asked, output.new_empty(output.numel() + words)
        return self._fixed

    def parts(self, answer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split a tensor of results into views: `output` `[B, H, Dv]`, `lse` `[B, H]` and `found`
        `[B, G]`. One copy of this tensor copies all three."""
        g, B = self.geometry, self.batch
        H, G, Dv = g.q_heads, g.kv_heads, g.value_dim
        output = answer.as_strided((B, H, Dv), (H * Dv, Dv, 1))
        sums, words = answer.view(torch.float32), answer.view(torch.int32)
        start = len(words) - B * G
        lse = sums.as_strided((B, H), (H, 1), start - B * H)
        return output, lse, words.as_strided((B, G), (G, 1), start)


@dataclass
class Use:
    """Data of one index for a decode step whose buffers and launches several indexes share.

    Attributes:
        step: The shared object with the buffers and launches of the decode step.
        wanted: Number of candidates that the index requests for each sequence, int32 `[B]`, at most
            the number that fits into the buffers of `step`.
        places: The numbers `0` to `k - 1` as a tensor on the device.
        captured: True if a CUDA graph contains the step, so that its buffers must stay allocated.
        need: Number of tokens or candidates for which this index needs room in the buffers;
            `step.most` is the number for which there is room.
        reads: The last `State` that the step read for this index, with the objects from which that
            `State` was made.
    """

    step: SharedStep
    wanted: Tensor
    places: Tensor
    captured: bool = False
    need: int = 0
    reads: tuple[tuple[object, ...], State] | None = None

    def want(self, candidates: list[int], need: int) -> list[int]:
        """Record for how many tokens or candidates this index needs room in the step's buffers.

        Args:
            candidates: Number of candidates that the index requests for each sequence.
            need: Number of tokens or candidates for which the index needs room.

        Returns:
            The numbers `candidates`, each reduced to `step.most` if it is larger. This is the
            number of tokens or candidates for which the buffers have room.
        """
        self.need = need
        return [min(each, self.step.most) for each in candidates]

    @property
    def outgrown(self) -> bool:
        """True if the step's buffers are too small for the present length of the index."""
        return self.need > self.step.most


class _SignVotes(SharedStep, SignVotesStep):
    """A `SignVotesStep` whose buffers several indexes share."""


class _TieredVotes(SharedStep, TieredVotesStep):
    """A `TieredVotesStep` whose buffers several indexes share."""


class _Latents(SharedStep, LatentsStep):
    """A `LatentsStep` whose buffers several indexes share."""


SHARED: dict[str, type[SharedStep]] = dict(
    sign_votes=_SignVotes, tiered_votes=_TieredVotes, latents=_Latents
)
"""Kind of step (`dispatch.kind_of`) -> its class."""

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
    limited: bool = False,
    one_sequence: bool = False,
    sequences: int = 1,
) -> SharedStep:
    """Return a decode step object for `k` rows whose buffers have room for `most` tokens or
    candidates. An existing object is returned if one fits.

    Args:
        geometry: Geometry of the layer.
        layout: Layout of the blocks of codes.
        kind: A key of `dispatch.STEPS`.
        config: A `ParisKVConfig`.
        batch: Number of sequences, `B`.
        blocks: Number of blocks per sequence in the tables that the step will read.
        k: Rows to select per KV head.
        most: Number of tokens or candidates for which the step must have room (`dispatch.room_of`).
        ragged: See `BaseStep`.
        limited: See `BaseStep`.
        one_sequence: See `BaseStep`.
        sequences: See `BaseStep`.
    """
    g = geometry
    sizes = (g.q_heads, g.kv_heads, g.head_dim, g.value_dim, g.scale, g.softcap, g.dtype, g.device)
    options = options_of(kind, config)
    how: dict[str, Any] = dict(ragged=ragged, limited=limited)
    how |= dict(one_sequence=one_sequence, sequences=sequences)
    key = (*sizes, layout, kind, *options.values(), batch, blocks, k, *how.values())
    step = _alive.get(key)
    if step is None or step.most < most:
        options |= dict(batch=batch, k=k, most=most, **how)
        options["multiprocessors"] = multiprocessors(g.device)
        step = SHARED[kind](g, layout, **options)
        _alive[key] = step
    return step


def with_headroom(need: int) -> int:
    """Return twice `need`, but at most `need + HEADROOM`."""
    return need + min(need, HEADROOM)

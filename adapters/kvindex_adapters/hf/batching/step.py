"""`Step`: one step of continuous batching, divided into its requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One request's part of a step.

    Args:
        request: Transformers' object for the request. A request that starts again gets a new
            object.
        tokens: Positions of the request's new tokens among those of the step.
        slots: Positions of the request's slots among those of the step.
        length: Number of tokens of the request, including the new ones.
    """

    request: Any
    tokens: slice
    slots: slice
    length: int

    @property
    def count(self) -> int:
        """Number of new tokens."""
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True)
class Step:
    """The requests of one call of the model.

    Args:
        parts: The parts of the step in order.
        active: All requests that have slots in the cache.
    """

    parts: Sequence[Part]
    active: Sequence[Any]

    @staticmethod
    def of(processor: Any) -> Step:
        """Read the step that transformers' `ContinuousBatchProcessor` has prepared."""
        parts, token, slot = list[Part](), 0, 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            count, length = future.query_length, future.state.position_offset
            tokens, slots = slice(token, token + count), slice(slot, slot + length)
            parts.append(Part(future.state, tokens, slots, length))
            token, slot = token + count, slot + length
        return Step(parts, list(processor.scheduler.active_requests.values()))


def places(slices: Iterable[slice], device: torch.device) -> Tensor:
    """Return the positions that slices cover, concatenated, int64."""
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in slices])

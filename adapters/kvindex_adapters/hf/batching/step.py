"""One step of continuous batching: which tokens of it are of which request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What a step has of one request.

    request: transformers' own object for it, which is another one once it begins anew; tokens: the
    new ones, among those of the step; slots: where the slots of all its tokens are, among those of
    the step; length: tokens, the new ones included.
    """

    request: Any
    tokens: slice
    slots: slice
    length: int

    @property
    def count(self) -> int:
        """New tokens."""
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True)
class Step:
    """What the model is called with: parts of requests, one after the other; active: all requests
    that hold a place in the cache.
    """

    parts: Sequence[Part]
    active: Sequence[Any]

    @staticmethod
    def of(processor: Any) -> Step:
        """The one that a `ContinuousBatchProcessor` has prepared."""
        parts, token, slot = list[Part](), 0, 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            count, length = future.query_length, future.state.position_offset
            tokens, slots = slice(token, token + count), slice(slot, slot + length)
            parts.append(Part(future.state, tokens, slots, length))
            token, slot = token + count, slot + length
        return Step(parts, list(processor.scheduler.active_requests.values()))


def places(slices: Iterable[slice], device: torch.device) -> Tensor:
    """The places in slices, one after the other, int64."""
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in slices])

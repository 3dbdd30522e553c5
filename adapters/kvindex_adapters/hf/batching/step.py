"""`Step`: the requests in one forward pass of continuous batching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One request in a forward pass.

    Args:
        request: The object of transformers for the request. A restarted request gets a new object.
        tokens: Range of the request's new tokens in the concatenated new tokens of all requests.
        slots: Range of the request's slots in the concatenated slots of all requests.
        length: Number of tokens of the request, including the new ones.
    """

    request: Any
    tokens: slice
    slots: slice
    length: int

    @property
    def count(self) -> int:
        """Number of new tokens of the request."""
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True)
class Step:
    """The requests in one forward pass.

    Args:
        parts: The requests in this forward pass, in the order of their tokens.
        active: All requests that have slots in the paged cache.
    """

    parts: Sequence[Part]
    active: Sequence[Any]

    @staticmethod
    def of(processor: Any) -> Step:
        """Read the batch that transformers' `ContinuousBatchProcessor` has prepared."""
        parts, token, slot = list[Part](), 0, 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            count, length = future.query_length, future.state.position_offset
            tokens, slots = slice(token, token + count), slice(slot, slot + length)
            parts.append(Part(future.state, tokens, slots, length))
            token, slot = token + count, slot + length
        return Step(parts, list(processor.scheduler.active_requests.values()))


def places(slices: Iterable[slice], device: torch.device) -> Tensor:
    """Convert ranges to one int64 tensor with all of their positions, in the same order."""
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in slices])

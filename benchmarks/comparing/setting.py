"""Which tokens of a text are where, and after which ones the index is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """Of a text of `tokens`, and some that were written after it, whose queries ask.

    sink: first ones, always attended to; local: the newest ones before a query that asks, which
    with all after them are attended to as well. All others are the index's. generated: how many of
    the text's last tokens come after the prompt was sealed, where the text comes in pieces; every:
    in pieces of how many (`kvindex.layer.attention_layer`).
    """

    tokens: int
    sink: int = 64
    local_window: int = 256
    generated: int = 2048
    every: int = 256

    def __post_init__(self) -> None:
        least = self.sink + self.local + self.generated
        if self.tokens <= least:
            raise ValueError(
                f"tokens: got {self.tokens}, allowed is more than sink + local + generated, {least}"
            )

    @property
    def points(self) -> list[int]:
        """Tokens of the text that have come where is asked: the prompt's, then by quarters."""
        prompt = self.tokens - self.generated
        return [prompt, *(prompt + self.generated * share // 4 for share in (1, 2)), self.tokens]

    def valid(self, start: int, stop: int, device: Any) -> Tensor:
        """Which of these the index may find, bool `[1, stop - start]`."""
        return torch.arange(start, stop, device=device)[None] >= self.sink

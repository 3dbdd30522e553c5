"""When tokens come, and who is told of them."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvindex_adapters.hf.reading import Progress


class Clock(BaseStreamer):
    """Notes when tokens come, and passes them on.

    prompt: ids int64 `[N]`, which `inner` gets first, whatever came before them in the cache;
    total: longest answer in tokens. At the end `progress` is told how long the answer became.
    """

    def __init__(
        self, inner: BaseStreamer | None, progress: Progress | None, prompt: Tensor, total: int
    ) -> None:
        self._inner, self._progress = inner, progress
        self._prompt, self._total, self._tokens = prompt, total, 0
        self._prompt_seen = False
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """A batch of tokens: the prompt first, then one at a time."""
        now, answer, self._prompt_seen = time.perf_counter(), self._prompt_seen, True
        if answer:
            self.last = now
            if self._tokens == 0:
                self.first = now
                read = len(self._prompt)
                self._report("prefill", read, read)  # before any answer appears
            self._tokens += value.numel()
        if self._inner:
            self._inner.put(value if answer else self._prompt[None].cpu())
        if answer:
            self._report("decode", self._tokens, self._total)

    def end(self) -> None:
        """No more tokens come."""
        if self._tokens < self._total:
            self._report("decode", self._tokens, self._tokens)
        if self._inner:
            self._inner.end()

    def _report(self, *progress: Any) -> None:
        if self._progress:
            self._progress(*progress)

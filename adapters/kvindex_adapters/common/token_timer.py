"""`TokenTimer`: a streamer that notes when tokens arrive, for latency and progress."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvindex_adapters.common.prompt_chunks import Progress


class TokenTimer(BaseStreamer):
    """Times the first and the last token of an answer, and passes tokens on to `inner`.

    prompt: ids int64 `[N]`, which `inner` gets first, whatever came before them in the cache;
    total: longest answer in tokens; progress: called with the answer's length so far.
    """

    def __init__(
        self, inner: BaseStreamer | None, progress: Progress | None, prompt: Tensor, total: int
    ) -> None:
        self._inner, self._progress = inner, progress
        self._prompt, self._total, self._tokens = prompt, total, 0
        self._prompt_seen = False
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Take a batch of tokens: the prompt first, then one at a time."""
        now, answer, self._prompt_seen = time.perf_counter(), self._prompt_seen, True
        if answer:
            self.last = now
            if self._tokens == 0:
                self.first = now
                length = len(self._prompt)
                self._report("prefill", length, length)  # before any answer appears
            self._tokens += value.numel()
        if self._inner:
            self._inner.put(value if answer else self._prompt[None].cpu())
        if answer:
            self._report("decode", self._tokens, self._total)

    def end(self) -> None:
        """End the answer."""
        if self._tokens < self._total:
            self._report("decode", self._tokens, self._tokens)
        if self._inner:
            self._inner.end()

    def _report(self, *progress: Any) -> None:
        if self._progress:
            self._progress(*progress)

"""`TokenTimer`: a streamer that records when tokens arrive, and reports progress."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvindex_adapters.common.prompt_chunks import Progress


class TokenTimer(BaseStreamer):
    """Records the times of the first and the last token of an answer.

    Args:
        inner: A streamer to which tokens are passed on, or None.
        progress: Called with the phase, the tokens done and the tokens in total, or None.
        prompt: Int64 `[N]`, the ids of the prompt, which `inner` gets first. They are given here
            because transformers may pass other ids to a streamer, including those of earlier tokens
            in the cache.
        total: Maximum number of tokens of the answer.
    """

    def __init__(
        self, inner: BaseStreamer | None, progress: Progress | None, prompt: Tensor, total: int
    ) -> None:
        self._inner, self._progress = inner, progress
        self._prompt, self._total, self._tokens = prompt, total, 0
        self._prompt_seen = False
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Receive the prompt in the first call, and one token in each later call."""
        now, answer, self._prompt_seen = time.perf_counter(), self._prompt_seen, True
        if answer:
            self.last = now
            if self._tokens == 0:
                self.first = now
                length = len(self._prompt)
                self._report("prefill", length, length)  # before a token of the answer appears
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

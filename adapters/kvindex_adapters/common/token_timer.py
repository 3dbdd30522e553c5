"""`TokenTimer`: a transformers streamer that times each token, and reports progress."""

from __future__ import annotations

import time
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvindex_adapters.common.prompt_chunks import Progress


@runtime_checkable
class Streamer(Protocol):
    """A streamer of transformers, or another object with its method `put`."""

    def put(self, value: Tensor) -> None:
        """Receive the ids of the prompt, or those of new tokens."""
        ...


class TokenTimer(BaseStreamer):
    """A streamer that records when the first and the last token of an answer arrive.

    Args:
        inner: Another streamer, which also gets the prompt and the tokens, or None.
        progress: Called with the phase, the number of tokens done and the total number, or None.
        prompt: Int64 `[N]`, the ids of the prompt, which `inner` gets first. The ids that
            transformers passes to a streamer may also include earlier tokens in the cache.
        total: Maximum number of tokens of the answer.

    Raises:
        TypeError: `inner` is not a streamer.
    """

    def __init__(
        self, inner: BaseStreamer | None, progress: Progress | None, prompt: Tensor, total: int
    ) -> None:
        self._inner: BaseStreamer | None = inner
        if not isinstance(inner, Streamer | None):
            raise TypeError(
                f"streamer: got {inner!r}, allowed is None or a streamer of transformers, for "
                "example TextStreamer(tokenizer)"
            )
        self._progress, self._prompt, self._total, self._tokens = progress, prompt, total, 0
        self._prompt_seen = False
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Receive token ids from `model.generate` and store the time.

        The first call passes the ids of the prompt. Each later call passes one generated token.
        """
        now, answer, self._prompt_seen = time.perf_counter(), self._prompt_seen, True
        if answer:
            self.last = now
            if self._tokens == 0:
                self.first = now
                length = len(self._prompt)
                # Report the end of the prompt before the wrapped streamer `inner` prints the
                # first token of the answer.
                self._report("prefill", length, length)
            self._tokens += value.numel()
        if self._inner:
            self._inner.put(value if answer else self._prompt[None].cpu())
        if answer:
            self._report("decode", self._tokens, self._total)

    def end(self) -> None:
        """Report that the answer is complete, and call `end` of the wrapped streamer `inner`."""
        if self._tokens < self._total:
            self._report("decode", self._tokens, self._tokens)
        if self._inner:
            self._inner.end()

    def _report(self, *progress: Any) -> None:
        if self._progress:
            self._progress(*progress)

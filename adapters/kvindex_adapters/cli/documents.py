"""`Document`: a text that a model reads once, before `kvindex generate` asks questions about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.decoder import Decoder, OpenSession
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.generation.conversation import StoredTokens, check_follows
from kvindex_adapters.hf.generation.plain_cache import PlainCache
from kvindex_adapters.hf.generation.prefill import read
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.wrapped import unwrapped


class Document(Protocol):
    """A text that a model has read, with its keys and values in an index. Prompts can follow it."""

    @property
    def ids(self) -> Tensor | None:
        """Ids of the document's tokens, int64 `[N]`, or None if the ids are unknown."""
        ...

    def read(self, ids: Tensor, report: Progress) -> None:
        """Let the model read tokens with ids int64 `[N]`, and append them to the document."""
        ...

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, and remove all others. `ids` must not be None."""
        ...

    def save(self, folder: Path) -> None:
        """Save the tokens with their keys and values in a new folder."""
        ...

    def load(self, folder: Path) -> None:
        """Fill this empty document from a folder that `save` wrote."""
        ...

    def options(self, *, branch: bool) -> dict[str, Any]:
        """Return the options to pass to `Engine.generate`, for a prompt that follows this document.

        Args:
            branch: If True, the document remains unchanged. If False, the prompt and the answer are
                appended to it.
        """
        ...


class CacheDocument:
    """A `Document` of a transformers model, stored in a cache of `attach` or in a `PlainCache`."""

    def __init__(self, model: Any, tokenizer: Any, cache: StoredTokens) -> None:
        self._model, self._tokenizer, self._cache = model, tokenizer, cache

    @staticmethod
    @contextmanager
    def opened(
        model: Any,
        tokenizer: Any,
        branch: bool,
        index: str | None,
        k: int | str,
        attach_options: dict[str, Any],
    ) -> Iterator[Document]:
        """Open an empty document of a transformers model, in an index or in a plain cache (None).

        Raises:
            ValueError: An argument of `attach` is invalid.
            UnsupportedError: `branch` is True and the model has linear attention, whose state
                cannot be restored after each question.
        """
        if index is None:
            yield CacheDocument(model, tokenizer, PlainCache(unwrapped(model)))
            return
        options = punctuated(index, tokenizer, attach_options)
        with attach(model, index=index, k=k, **options) as cache:
            check_follows(cache, "branch" if branch else "continue")
            yield CacheDocument(model, tokenizer, cache)

    @property
    def ids(self) -> Tensor | None:
        """Ids of the document's tokens, int64 `[N]`, or None if the ids are unknown."""
        return self._cache.ids

    def read(self, ids: Tensor, report: Progress) -> None:
        """Let the model read tokens with ids int64 `[N]`, and append them to the document."""
        given = self._model, self._tokenizer, ids
        read(*given, cache=self._cache, used="continue", on_progress=report)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, and remove all others."""
        if (ids := self._cache.ids) is not None:
            self._cache.crop(length - len(ids))
            self._cache.ids = ids[:length]

    def save(self, folder: Path) -> None:
        """Save the tokens with their keys and values in a new folder."""
        self._cache.save(folder)

    def load(self, folder: Path) -> None:
        """Fill this empty document from a folder that `save` wrote."""
        self._cache.load(folder)

    def options(self, *, branch: bool) -> dict[str, Any]:
        """Return the options that the engine needs to answer a prompt about this document.

        Args:
            branch: True if the document must stay unchanged. If False, the prompt and the answer
                are appended to it.
        """
        return {"cache": self._cache, "used": "branch" if branch else "continue"}


class SessionDocument:
    """A `Document` of kvindex's own decoder, stored in a decoder session.

    With an index, each question is answered in a fork of the session, which shares its memory.
    Without one, a fork would copy all keys and values. So questions are answered in the session
    itself, which is then truncated to the document.
    """

    def __init__(self, decoder: Decoder, session: OpenSession, *, forks: bool) -> None:
        self._decoder, self._session, self._forks = decoder, session, forks
        self._length = 0
        self._asked: OpenSession | None = None  # the fork in which the last question was answered

    @staticmethod
    @contextmanager
    def opened(
        decoder: Decoder,
        branch: bool,
        index: str | None,
        k: int | str,
        attach_options: dict[str, Any],
    ) -> Iterator[Document]:
        """Open an empty document in a new session of the decoder."""
        session = decoder.session(index=index, k=k, attach_options=attach_options)
        yield SessionDocument(decoder, session, forks=index is not None)

    @property
    def ids(self) -> Tensor | None:
        """Ids of the document's tokens, int64 `[N]`, or None if the ids are unknown."""
        return self._session.ids

    def read(self, ids: Tensor, report: Progress) -> None:
        """Append the tokens with ids int64 `[N]` to the document, and let the model read them."""
        self._decoder.read(ids, self._session, on_progress=report)
        self._length = self._session.length

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, and remove all others."""
        self._session.truncate(length)
        self._length = self._session.length

    def save(self, folder: Path) -> None:
        """Save the tokens with their keys and values in a new folder."""
        self._session.save(folder)

    def load(self, folder: Path) -> None:
        """Fill this empty document from a folder that `save` wrote."""
        self._session.load(folder)
        self._length = self._session.length

    def options(self, *, branch: bool) -> dict[str, Any]:
        """Return options with which the engine answers a prompt that follows this text.

        Args:
            branch: Whether the stored text remains unchanged. If False, the prompt and the answer
                are appended to it.
        """
        if branch and not self._forks:
            self._session.truncate(self._length)  # remove the question and answer before this one
        if not (branch and self._forks):
            return {"session": self._session}
        fork = self._session.fork()
        if self._asked is not None and self._asked.drafter is not None:
            # its draft model has read the text. No copy, because the last fork is not used again.
            fork.drafter = self._asked.drafter
        self._asked = fork
        return {"session": fork}

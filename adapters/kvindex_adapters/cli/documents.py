"""Texts that the model of `kvindex generate` has read, to answer several questions about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.decoder import Decoder, OpenSession
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.conversation import check_follows
from kvindex_adapters.hf.generation.prefill import read
from kvindex_adapters.hf.generation.tokenizer import punctuated


class Document(Protocol):
    """Tokens that an index stores, to which prompts are appended."""

    @property
    def ids(self) -> Tensor | None:
        """Ids int64 `[N]` of the tokens, or None if unknown."""
        ...

    def read(self, ids: Tensor, report: Progress) -> None:
        """Append ids int64 `[N]`."""
        ...

    def crop(self, length: int) -> None:
        """Remove the tokens from position `length` on. The ids must be known."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokens to a new folder."""
        ...

    def load(self, folder: Path) -> None:
        """Fill this empty document from a folder that `save` wrote."""
        ...

    def options(self, *, branch: bool) -> dict[str, Any]:
        """Return the options of `Engine.generate` that answer a prompt after these tokens.

        Args:
            branch: Whether the document stays unchanged by the prompt and the answer.
        """
        ...


class CacheDocument:
    """A text whose tokens are in a cache of `attach`."""

    def __init__(self, model: Any, tokenizer: Any, cache: IndexCache) -> None:
        self._model, self._tokenizer, self._cache = model, tokenizer, cache

    @staticmethod
    @contextmanager
    def opened(
        model: Any, tokenizer: Any, branch: bool, index: str, k: int, attach_options: dict[str, Any]
    ) -> Iterator[Document]:
        """Open an empty document.

        Raises:
            ValueError: The caches of this model cannot be cropped; also whatever `attach` raises.
        """
        options = punctuated(index, tokenizer, attach_options)
        with attach(model, index=index, k=k, **options) as cache:
            check_follows(cache, "branch" if branch else "continue")
            yield CacheDocument(model, tokenizer, cache)

    @property
    def ids(self) -> Tensor | None:
        """See `Document.ids`."""
        return self._cache.ids

    def read(self, ids: Tensor, report: Progress) -> None:
        """See `Document.read`."""
        given = self._model, self._tokenizer, ids
        read(*given, cache=self._cache, used="continue", on_progress=report)

    def crop(self, length: int) -> None:
        """See `Document.crop`."""
        if (ids := self._cache.ids) is not None:
            self._cache.crop(length - len(ids))
            self._cache.ids = ids[:length]

    def save(self, folder: Path) -> None:
        """See `Document.save`."""
        self._cache.save(folder)

    def load(self, folder: Path) -> None:
        """See `Document.load`."""
        self._cache.load(folder)

    def options(self, *, branch: bool) -> dict[str, Any]:
        """See `Document.options`."""
        return {"cache": self._cache, "used": "branch" if branch else "continue"}


class SessionDocument:
    """A text whose tokens are in a session of the decoder."""

    def __init__(self, decoder: Decoder, session: OpenSession) -> None:
        self._decoder, self._session = decoder, session

    @staticmethod
    @contextmanager
    def opened(
        decoder: Decoder, branch: bool, index: str, k: int, attach_options: dict[str, Any]
    ) -> Iterator[Document]:
        """Open an empty document. Raises the errors of `Decoder.session`."""
        session = decoder.session(index=index, k=k, attach_options=attach_options)
        yield SessionDocument(decoder, session)

    @property
    def ids(self) -> Tensor | None:
        """See `Document.ids`."""
        return self._session.ids

    def read(self, ids: Tensor, report: Progress) -> None:
        """See `Document.read`."""
        self._decoder.read(ids, self._session, on_progress=report)

    def crop(self, length: int) -> None:
        """See `Document.crop`."""
        self._session.truncate(length)

    def save(self, folder: Path) -> None:
        """See `Document.save`."""
        self._session.save(folder)

    def load(self, folder: Path) -> None:
        """See `Document.load`."""
        self._session.load(folder)

    def options(self, *, branch: bool) -> dict[str, Any]:
        """See `Document.options`."""
        return {"session": self._session.fork() if branch else self._session}

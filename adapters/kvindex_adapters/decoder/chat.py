"""`Chat`: a conversation with the minimal decoder, whose session stays between turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvindex_adapters.common.context import check_keywords
from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.common.prompt import RenderedChat
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.decoder.decoder import Decoder
from kvindex_adapters.decoder.open_session import OpenSession
from kvindex_adapters.decoder.options import Options
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.chat import BaseChat
from kvindex_adapters.hf.generate import INDEX, Generation, K
from kvindex_adapters.hf.generation.plain_cache import check_saved_index, full_report

OF_CHAT = {"index", "k", "system", "template_options", "attach_options", "fused"}
"""Arguments of `Chat` that are no options of an answer."""

OF_ANSWERS = {*Options.__annotations__, "streamer", "on_progress"} - OF_CHAT
"""Options of one answer of a chat."""


class Chat(BaseChat):
    """A conversation with the minimal decoder, whose KV cache stays between turns.

    It has the methods of `kvhf.Chat`. Several chats may use one decoder.

    Args:
        decoder: The decoder, which needs a tokenizer with a chat template.
        index: As in `kvindex_adapters.decoder.options.Options`.
        k: As in `Options`.
        system: Text of the system message, or None.
        template_options: Further keyword arguments of `tokenizer.apply_chat_template` for all
            turns.
        attach_options: As in `Options`.
        fused: As in `Options`.
        **options: Options of every answer, as in `Decoder.generate`: `max_new_tokens`, `sampling`,
            `stop`, `chunk`, `graphs`, `speculative_tokens`, `verify`, `draft_model`, `streamer`,
            `on_progress`.

    Attributes:
        messages: The messages so far, answers included and documents excluded. They may be edited.
        documents: Texts of the documents, in the order of the calls of `read`. They may be edited.
        session: The session of the conversation. Its tokens may be those of an earlier turn.
        reused: Number of tokens of the last prompt that the session already stored.
        options: Options of every answer.
        template_options: Keyword arguments of `tokenizer.apply_chat_template` for all turns.

    Raises:
        TypeError: An option is unknown.
        ValueError: The tokenizer has no chat template, a chat sets the option itself, or
            `Decoder.session` raises the error.

    Examples:
        ```python
        chat = Chat(decoder, index="pariskv", max_new_tokens=200)
        print(chat.send("Who wrote Faust?").text)
        ```
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int | str = K,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        attach_options: Mapping[str, Any] | None = None,
        fused: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(decoder.tokenizer, system, template_options, options)
        check_keywords("Chat", {*OF_ANSWERS, *OF_CHAT}, options, index)
        self._decoder = decoder
        self._opened = partial(
            decoder.session, index=index, k=k, attach_options=attach_options, fused=fused
        )
        self.session: OpenSession = self._opened()
        """The session of the conversation. Its tokens may be those of an earlier turn."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the session stores."""
        return self.session.length

    def report(self) -> Report:
        """Report how many rows decode steps have read, and the memory of the session."""
        report = self.session.report()
        if report.layers:
            return report
        return full_report(self.tokens, report.plain_nbytes)

    def _answer(self, rendered: RenderedChat, **options: Any) -> Generation:
        if "fused" in options:
            raise ValueError(
                f"fused: got {options['fused']!r}, but it belongs to the session of the chat; pass "
                "fused to Chat"
            )
        check_keywords("send", {*OF_ANSWERS, "template_options"}, options, None)
        prompt: Any = rendered
        with self._renewed():
            return self._decoder.generate(prompt, session=self.session, **options)

    def _read(self, rendered: RenderedChat, on_progress: Progress | None) -> None:
        prompt: Any = rendered
        chunk = self.options.get("chunk")
        with self._renewed():
            self._decoder.read(prompt, self.session, chunk=chunk, on_progress=on_progress)

    @contextmanager
    def _renewed(self) -> Iterator[None]:
        """Context manager that opens an empty session if another call has added tokens whose ids
        are unknown. After an error, the chat has its previous session again."""
        before = self.session
        try:
            if before.length and before.ids is None:
                self.session = self._opened()
            yield
        except BaseException:  # including KeyboardInterrupt
            self.session = before
            raise

    def _fork_cache(self) -> None:
        self.session = self.session.fork()

    def _save(self, folder: Path) -> None:
        session, beginning = self.session, self._undone(self.session)
        if beginning is not None:
            session = session.fork()
            session.truncate(len(beginning.ids))
        session.save(folder)

    def _load(self, folder: Path) -> None:
        session = self._opened()
        check_saved_index(folder, indexed=session.report().layers > 0)
        session.load(folder)
        self.session = session

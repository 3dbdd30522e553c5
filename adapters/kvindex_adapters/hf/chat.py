"""`Chat`: a conversation whose KV cache stays between turns."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from transformers import PreTrainedModel

from kvindex.storage.saved import check_new, new_folder
from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.common.prompt import (
    Messages,
    RenderedChat,
    check_messages,
    common_length,
    messages_of,
    render_chat,
)
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.common.saved_chat import CACHE, CHAT, check_saved_chat
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.generate import (
    INDEX,
    Generation,
    K,
    check_attach_options,
    check_cache,
    check_full_attention,
    check_generate_options,
    generate,
)
from kvindex_adapters.hf.generation.conversation import (
    CannotForgetError,
    KnowsTokens,
    StoredTokens,
    answered,
    begins_with,
    check_model,
)
from kvindex_adapters.hf.generation.plain_cache import PlainCache, check_saved_index
from kvindex_adapters.hf.generation.prefill import read
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.info import one_call_error, reads_chunks
from kvindex_adapters.hf.model.wrapped import unwrapped

T = TypeVar("T")

INSTRUCTIONS = {"system", "developer"}
"""Roles of messages that may begin a conversation before the first message of the user."""

BORDER = 16
"""Number of tokens at the end of a cache that the first turn of a chat may remove without a
warning.

They end a message, or the tokenizer encodes them differently when more text follows.
"""

SET_BY_CHAT = {
    "used": "a chat always continues its own cache; for an answer that leaves the chat unchanged, "
    "send the message to chat.fork()",
    "cache": "a chat has its own cache; pass cache to kvhf.Chat, or continue from the state of a "
    "chat with chat.fork()",
    "session": "a chat opens its own session; to continue from the state of a chat, call "
    "chat.fork()",
    "prompt": "a chat makes the prompt from its messages; pass the message as the first argument "
    "of send()",
    "model": "a chat has one model; make another chat for another model",
    "tokenizer": "a chat has one tokenizer, with which it also finds stop_strings; leave "
    "tokenizer out",
    "index": "the index belongs to the cache of the chat; pass index to Chat",
    "k": "k belongs to the cache of the chat; pass k to Chat",
    "attach_options": "they belong to the cache of the chat; pass attach_options to Chat",
    "system": "it is not an option of one answer; pass system to Chat, or put a message with the "
    "role 'system' first into chat.messages",
}
"""Maps options that a chat sets itself to the reason and to what the caller can do instead."""


def is_path(document: str) -> bool:
    """Return True if a document's text is a short line that names an existing file."""
    try:
        return len(document) < 1000 and "\n" not in document and Path(document).is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL character
        return False


class BaseChat(ABC):
    """A conversation whose KV cache stays between turns.

    The attribute `messages` defines the conversation, and the cache only saves time. Each turn
    applies the chat template to all messages, keeps the longest prefix of the resulting ids that
    the cache already stores, and lets the model read the other ids. So messages may be edited
    between turns, and templates may drop the reasoning of earlier answers.

    The documents of `read` are not in `messages` but in `documents`, and are put before the first
    message of the user. So another chat that gets only the messages lacks the documents. To
    continue a conversation in two directions, call `fork`.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        system: Text of the system message, or None.
        template_options: Further keyword arguments of `tokenizer.apply_chat_template` for all
            turns, for example `{"enable_thinking": False}` or `{"tools": [...]}`.
        options: Options of every answer.

    Attributes:
        messages: The messages so far, answers included and documents excluded. They may be edited.
        documents: Texts of the documents, in the order of the calls of `read`. They may be edited.
        template_options: Keyword arguments of `tokenizer.apply_chat_template` for all turns.
        options: Options of every answer.
        reused: Number of tokens of the last prompt that the cache already stored.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None,
        template_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(tokenizer, PreTrainedModel):
            raise TypeError(
                f"tokenizer: got the model {type(tokenizer).__name__}, allowed is its tokenizer; "
                "the order is Chat(model, tokenizer)"
            )
        if system is not None and not isinstance(system, str):
            raise TypeError(f"system: got {type(system).__name__}, allowed is text or None")
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"tokenizer: got {type(tokenizer).__name__} without a chat template; set "
                "tokenizer.chat_template, or call generate() with text"
            )
        self.tokenizer = tokenizer
        check_options(options)
        self.messages: Messages = []
        """The messages so far, answers included and documents excluded. They may be edited."""
        self.documents: list[str] = []
        """Texts of the documents, which are put before the first message of the user. They may be
        edited."""
        self.template_options = dict(template_options or {})
        """Keyword arguments of `tokenizer.apply_chat_template` for all turns."""
        self.options = dict(options)
        """Options of every answer."""
        self.reused = 0
        """Number of tokens of the last prompt that the cache already stored."""
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def send(
        self,
        message: str | Messages,
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Send a message and return the model's answer, which becomes part of the conversation.

        A call that fails leaves the conversation unchanged.

        Args:
            message: Text of the user, or a list of messages. A list is either new messages, which
                follow `self.messages`, or a whole conversation, which replaces `self.messages`. It
                is a whole conversation in three cases: it begins with all of `self.messages`; its
                first message has the role `system` or `developer`; or a message before the last has
                the role `assistant`. If the last message has the role `assistant`, it is the
                beginning of the answer, and the model continues it.
            template_options: Further keyword arguments of `tokenizer.apply_chat_template` for this
                turn alone.
            **options: Options of this answer (`max_new_tokens`, `streamer`, …), which take
                precedence over those of the chat.

        Returns:
            The answer. Its `text` is only what the model has generated, and `prompt_ids` are the
            ids that had to be read.

        Raises:
            TypeError: `message` is neither text nor messages.
            ValueError: `message` is a blank text, the chat template does not accept the messages,
                an option is wrong, or the chat sets this option itself.
        """
        if isinstance(message, str) and not message.strip():
            raise ValueError(f"message: got {message!r}, allowed is a text that is not blank")
        given = {**self.options, **options}
        check_options(given)
        messages = self._conversation(message)
        rendered = self._render(messages, template_options)
        generation = self._answer(rendered, **given)
        self.reused = len(rendered.ids) - len(generation.prompt_ids)
        self.messages = answered(messages, generation.text)
        return generation

    def read(self, document: str, *, on_progress: Progress | None = None) -> None:
        """Add a document to the conversation, and read it into the cache before the next question.

        Documents come before the first message of the user, one after another. They are in
        `documents`, and not in `messages`. If messages were sent already, they are read again
        after the document.

        Args:
            document: Text of the document (not the path of a file). It is read in chunks of the
                option `chunk` of the chat.
            on_progress: As in `generate`.

        Raises:
            TypeError: The document is not a text.
            ValueError: The document is empty, or it is the path of a file.
        """
        if not isinstance(document, str):
            how = (
                "; read the file first: path.read_text()" if hasattr(document, "__fspath__") else ""
            )
            raise TypeError(
                f"document: got {type(document).__name__}, allowed is a text (str){how}"
            )
        if not document.strip():
            raise ValueError(f"document: got {document!r}, allowed is a text that is not blank")
        if is_path(document):
            raise ValueError(
                f"document: got {document!r}, which is the path of a file, allowed is a text: "
                f"Path({document!r}).read_text()"
            )
        check_documents(self.documents)
        self.documents.append(document)
        try:
            beginning = self._beginning()
            if len(beginning.ids) > 1:
                self._read(beginning, on_progress)
        except BaseException:
            self.documents.pop()
            raise

    def fork(self) -> Self:
        """Return an independent chat that continues from the state of this one.

        The new chat has copies of the messages, documents and options, and a fork of the cache. So
        the new chat reads only what is new to it. The two caches share the memory of the tokens
        that are stored in indexes. With full attention, `kvhf.Chat` shares the memory until
        one of the chats appends tokens, and the decoder copies it. `copy.deepcopy(chat)` does the
        same.

        Returns:
            The new chat. It uses the same attached model: a fork of `kvhf.Chat` can be used until
            the `with` block, or `close`, of the first chat ends, or until the caller's `attach`
            context ends.

        Raises:
            RuntimeError: The `attach` context has ended.
            TypeError: `documents` is not a list of texts.

        Examples:
            ```python
            chat.read(document)
            one, other = chat.fork(), chat.fork()
            print(one.send("Who wrote it?").text, other.send("When?").text)
            ```
        """
        check_documents(self.documents)
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other.messages, other.documents = deepcopy(self.messages), list(self.documents)
        other.template_options = dict(self.template_options)
        other.options = dict(self.options)
        other._fork_cache()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "chat: got pickle or copy.copy; use chat.fork() for an independent chat, or "
            "chat.save(folder) and chat.load(folder) for another process"
        )

    def undo(self) -> Messages:
        """Remove the last answer and the messages that it answers.

        Returns:
            The removed messages.

        Raises:
            ValueError: The conversation has no answer.
        """
        answers = [i for i, one in enumerate(self.messages) if one.get("role") == "assistant"]
        if not answers:
            raise ValueError("messages: got no answer to remove; undo() needs at least one answer")
        start = answers[-1]
        while start and self.messages[start - 1].get("role") not in {"assistant", *INSTRUCTIONS}:
            start -= 1
        removed, self.messages = self.messages[start:], self.messages[:start]
        return removed

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write messages, documents and the cache to a new folder.

        The folder contains no tokens that do not belong to the conversation any more, for example
        after `undo`. The chat itself stays unchanged.

        Args:
            folder: A new folder. If the call fails, or the process is killed, no folder with this
                name remains.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The conversation is empty, or the cache contains no tokens of it. Or a
                message cannot be written as JSON. Or the cache may contain tokens that do not
                belong to the conversation, and the chat template does not accept the messages.
        """
        check_new(folder)  # before work that takes time
        check_documents(self.documents)
        if not self.tokens:
            raise ValueError(self._no_tokens())
        try:
            text = json.dumps({"messages": self.messages, "documents": self.documents}, indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"messages: got a message that JSON cannot contain: {error}"
            ) from error
        with new_folder(folder) as path:
            self._save(path / CACHE)
            (path / CHAT).write_text(text, encoding="utf-8")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Replace this conversation by a saved one. A call that fails changes nothing.

        The saved messages and documents replace those of this chat, the system message included.
        The options of this chat stay.

        Args:
            folder: The folder that `save` has written.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder is damaged, or belongs to another model or index. For another
                index, the error names the index to pass.
        """
        messages, documents = read_saved(folder)
        self._load(Path(folder) / CACHE)
        self.messages, self.documents = messages, documents

    def _conversation(self, message: str | Messages) -> Messages:
        """Return the messages of the whole conversation after `message` was sent.

        `message` may itself be a whole conversation (see `send`).
        """
        if isinstance(message, str):
            return [*self.messages, {"role": "user", "content": message}]
        messages = deepcopy(check_messages(message))
        roles = [one.get("role") for one in messages]
        whole = messages[: len(self.messages)] == self.messages
        if whole or roles[0] in INSTRUCTIONS or "assistant" in roles[:-1]:
            return messages
        return [*self.messages, *messages]

    def _beginning(self) -> RenderedChat:
        """Return the token ids with which the conversation begins, whatever the next question is.

        The tokenizer may merge the end of the conversation and the beginning of a question into one
        token. So the conversation is rendered with two different questions, and the result has only
        the ids with which both begin.

        Raises:
            ValueError: The chat template does not accept the messages.
        """
        asked = [self._conversation(question) for question in ("1", "7")]
        every = [self._render(messages).ids for messages in asked]
        return RenderedChat(every[0][: common_length(every)], None)

    def _undone(self, past: KnowsTokens) -> RenderedChat | None:
        """Find out whether a cache contains tokens that do not belong to the conversation any more.

        The caller may have undone a turn, or edited `messages`.

        Args:
            past: The cache or session of this chat.

        Returns:
            None if all tokens belong to the conversation, or if the ids of the tokens are unknown.
            Otherwise the beginning of the conversation, up to the first of its tokens that the
            cache does not contain.

        Raises:
            ValueError: The cache contains no tokens of the conversation, or the chat template does
                not accept the messages.
        """
        if past.ids is None:
            return None
        known = messages_of(past.ids, past.conversation)
        try:
            *whole, _ = with_documents(self._conversation(""), self.documents)
            if known == whole:
                return None
            beginning = self._beginning()
        except ValueError:  # the chat template does not accept a question after these messages
            beginning = self._without_question()
        length = common_length([past.ids, beginning.ids])
        if length == len(past.ids):
            return None
        if not length:
            raise ValueError(self._no_tokens())
        return RenderedChat(beginning.ids[:length], beginning.messages)

    def _without_question(self) -> RenderedChat:
        """Return the token ids of the conversation so far. Raise ValueError if the chat template
        does not accept the messages."""
        try:
            return self._render(self.messages, cue=False)
        except ValueError as error:
            raise ValueError(
                "messages: got messages from which no prompt can be made, so tokens that do not "
                f"belong to the conversation cannot be found in the cache; the reason: {error}"
            ) from error

    def _no_tokens(self) -> str:
        """Return the text of the error if the cache contains no tokens of the conversation."""
        if self.messages or self.documents:
            return (
                "chat: got a cache that contains no tokens of the conversation; send a message "
                "first"
            )
        return (
            "chat: got an empty conversation, allowed is one with at least one message or "
            "document; send a message first"
        )

    def _render(
        self,
        messages: Messages,
        template_options: Mapping[str, Any] | None = None,
        *,
        cue: bool = True,
    ) -> RenderedChat:
        """Apply the chat template to a conversation and to the documents of this chat.

        With `cue`, add the generation prompt, if the last message is not from the assistant.
        """
        options = {**self.template_options, **(template_options or {})}
        whole = with_documents(messages, self.documents)
        return render_chat(self.tokenizer, whole, options, cue=cue)

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of tokens that the cache stores."""

    @abstractmethod
    def report(self) -> Report:
        """Report how many rows decode steps have read, and the memory of the cache."""

    @abstractmethod
    def _answer(self, rendered: RenderedChat, **options: Any) -> Generation:
        """Answer a rendered conversation. A call that fails leaves the cache unchanged."""

    @abstractmethod
    def _read(self, rendered: RenderedChat, on_progress: Progress | None) -> None:
        """Fill the cache with the tokens of a conversation, without generating an answer."""

    @abstractmethod
    def _fork_cache(self) -> None:
        """Replace the cache of this new chat, which is that of another chat, by a fork."""

    @abstractmethod
    def _save(self, folder: Path) -> None:
        """Write the cache to a new folder."""

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """Replace the cache by a saved one. A call that fails changes nothing."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of an answer that a chat sets itself."""
    for name in sorted(SET_BY_CHAT.keys() & options.keys()):
        raise ValueError(f"{name}: got {_shortened(options[name])}, but {SET_BY_CHAT[name]}")


def _shortened(value: object) -> str:
    """Return a short description of an argument, for an error text."""
    simple = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if simple and len(repr(value)) <= 80 else f"a {type(value).__name__}"


def read_saved(folder: str | os.PathLike[str], name: str = "folder") -> tuple[Messages, list[str]]:
    """Return the messages and the documents of a saved conversation.

    Args:
        folder: The folder that `BaseChat.save` has written.
        name: Name of the argument, for error messages.

    Raises:
        FileNotFoundError: The folder, or the file of the messages in it, does not exist.
        ValueError: The file was not written by `save`.
    """
    check_saved_chat(folder, name)
    try:
        found = json.loads((Path(folder) / CHAT).read_text(encoding="utf-8"))
        messages, documents = found["messages"], found["documents"]
        if messages != []:
            check_messages(messages)
        if not isinstance(documents, list) or not all(isinstance(d, str) for d in documents):
            raise TypeError("documents must be a list of texts")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name}: got {str(folder)!r}, whose {CHAT} is not what save() writes: {error!r}"
        ) from error
    return messages, documents


def check_documents(documents: object) -> None:
    """Raise TypeError if the documents of a chat are not a list of texts."""
    if not isinstance(documents, list):
        got = type(documents).__name__
    elif wrong := [type(one).__name__ for one in documents if not isinstance(one, str)]:
        got = f"a list with {wrong[0]}"
    else:
        return
    raise TypeError(f"documents: got {got}, allowed is a list of texts (str)")


def with_documents(messages: Messages, documents: Sequence[str]) -> Messages:
    """Return the messages with the documents before the text of the first message of the user.

    Raise TypeError if the documents are not a list of texts.
    """
    check_documents(documents)
    if not documents:
        return messages
    for number, one in enumerate(messages):
        if one.get("role") == "user":
            if not isinstance(text := one.get("content"), str):
                raise ValueError(
                    f"messages: got {type(text).__name__} as the content of the first message of "
                    "the user, allowed is text, because the documents of the chat are put before it"
                )
            whole = {**one, "content": "\n\n".join([*documents, text])}
            return [*messages[:number], whole, *messages[number + 1 :]]
    raise ValueError(
        "messages: got no message of the user, allowed is at least one, because the documents of "
        "the chat are put before it"
    )


class Chat(BaseChat):
    """A conversation with a model of transformers, whose KV cache stays between turns.

    Each turn reads only the tokens that the cache does not store yet. The model stays attached
    until the context ends or `close` is called.

    To continue one conversation in two directions, call `fork`. For several conversations with one
    model that do not continue a chat, call `attach`, and pass `cache=cache` to one chat and
    `cache=cache.fork()` to the others.

    The documents of `read` are not in `messages` but in `documents`, and are put before the first
    message of the user. So another chat that gets only the messages or the cache lacks them.

    Args:
        model: As in `attach`.
        tokenizer: The model's tokenizer, with a chat template.
        index: As in `attach`, by default "pariskv"; None for full attention with transformers' own
            cache.
        k: As in `attach`, by default 256.
        cache: A cache that the caller's `attach` yielded, instead of `index`, `k` and
            `attach_options`. The first turn removes the tokens in it that the conversation does not
            begin with, with a warning if these are more than the end of a message.
        system: Text of the system message, or None.
        template_options: Further keyword arguments of `tokenizer.apply_chat_template` for all
            turns, for example `{"enable_thinking": False}` or `{"tools": [...]}`.
        attach_options: Further keyword arguments of `attach`.
        **options: Options of every answer, as in `generate`: `max_new_tokens`, `chunk`, and those
            of `model.generate`.

    Attributes:
        messages: The messages so far, answers included and documents excluded. They may be edited.
        documents: Texts of the documents, in the order of the calls of `read`. They may be edited.
        cache: The cache of the conversation. Its tokens may be those of an earlier turn.
        reused: Number of tokens of the last prompt that the cache already stored.
        options: Options of every answer.
        template_options: Keyword arguments of `tokenizer.apply_chat_template` for all turns.

    Raises:
        ValueError: The tokenizer has no chat template, a chat sets the option itself, or `attach`
            raises the error.

    Examples:
        ```python
        with kvhf.Chat(model, tokenizer, index="pariskv", system="Answer briefly.") as chat:
            print(chat.send("Who wrote Faust?").text)
            print(chat.send("When?").text)
        ```
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int | str = K,
        cache: StoredTokens | None = None,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        attach_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, system, template_options, options)
        check_generate_options(options, index, also=inspect.signature(Chat.__init__).parameters)
        check_attach_options(attach_options)
        if not reads_chunks(unwrapped(model)):
            raise one_call_error(
                unwrapped(model),
                "so no turn can follow another; pass the whole conversation to kvhf.generate for "
                "each answer",
            )
        self._model, self._context = model, ExitStack()
        self._begun = cache is None
        if cache is None and index is None:
            check_full_attention(k, attach_options)
            cache = PlainCache(unwrapped(model))
        elif cache is None:
            assert index is not None
            given = punctuated(index, tokenizer, attach_options)
            cache = self._context.enter_context(attach(model, index=index, k=k, **given))
        else:
            check_cache(cache, "continue", index, k, attach_options)
            check_model(cache, unwrapped(model))
        self.cache: StoredTokens = cache
        """The cache of the conversation. Its tokens may be those of an earlier turn."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the cache stores."""
        return int(self.cache.get_seq_length())

    def report(self) -> Report:
        """Report how many rows decode steps have read, and the memory of the cache."""
        return self.cache.report()

    def close(self) -> None:
        """End the `attach` context of this chat. The messages of the chat stay.

        The cache of this chat, and those of its forks, cannot be used afterwards. For a fork, or a
        chat with a cache of the caller, this does nothing.
        """
        self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, rendered: RenderedChat, **options: Any) -> Generation:
        check_generate_options(options, None, also=inspect.signature(self.send).parameters)
        prompt: Any = rendered
        given: dict[str, Any] = {**options, "cache": self.cache, "used": "continue"}
        self._warn_of_removal(rendered)
        generation = self._again_if_needed(
            partial(generate, self._model, self.tokenizer, prompt, **given)
        )
        self._begun = True
        return generation

    def _read(self, rendered: RenderedChat, on_progress: Progress | None) -> None:
        prompt: Any = rendered
        given: dict[str, Any] = {"chunk": self.options.get("chunk"), "on_progress": on_progress}
        given |= {"cache": self.cache, "used": "continue"}
        call = partial(read, self._model, self.tokenizer, prompt, **given)
        self._warn_of_removal(rendered)
        self._again_if_needed(call)
        self._begun = True

    def _warn_of_removal(self, rendered: RenderedChat) -> None:
        """Warn if the first turn removes tokens that the caller's cache stores.

        There is no warning if the conversation continues the messages in the cache, or if at most
        `BORDER` tokens are removed.
        """
        stored, ids = self.tokens, self.cache.ids
        if self._begun or not stored:
            return
        kept = 0 if ids is None else common_length([ids, rendered.ids])
        known = messages_of(ids, self.cache.conversation)
        goes_on = known and rendered.messages and begins_with(rendered.messages, known)
        if goes_on or stored - kept <= BORDER:
            return
        reason = (
            "calls other than kvhf.read and kvhf.generate filled it, so their ids are unknown"
            if ids is None
            else "this conversation does not begin with them"
        )
        warnings.warn(
            f"cache: got a cache of {stored} tokens, of which this turn removes {stored - kept}, "
            f"because {reason}. To continue a chat with its documents and messages, use "
            "chat.fork() instead of a new Chat. To begin another conversation without this "
            "warning, call cache.reset() first",
            UserWarning,
            stacklevel=_outside(),
        )

    def _again_if_needed(self, call: Callable[[], T]) -> T:
        """Run the function `call`. If it fails, the cache is as before.

        If `call` needs to remove tokens from the cache and the cache cannot do this, empty the
        cache and run `call` again.
        """
        if self.tokens and self.cache.ids is None:  # another call has added tokens with unknown ids
            return self._with_empty_cache(call)
        try:
            return call()
        except CannotForgetError:
            return self._with_empty_cache(call)

    def _with_empty_cache(self, call: Callable[[], T]) -> T:
        """Empty the cache, and run the function `call`. If it fails, the cache is as before."""
        before: Any = self.cache.fork()
        try:
            self.cache.reset()
            return call()
        except BaseException:  # including KeyboardInterrupt
            self.cache.restore(before)
            raise

    def _fork_cache(self) -> None:
        self.cache.check_usable()
        self.cache = self.cache.fork()
        self._context = ExitStack()  # only the first chat ends its `attach` context

    def _save(self, folder: Path) -> None:
        self._without_undone().save(folder)

    def _without_undone(self) -> StoredTokens:
        """Return the cache or, if it contains tokens that do not belong to the conversation any
        more, a copy without these tokens."""
        beginning = self._undone(self.cache)
        if beginning is None:
            return self.cache
        other = self.cache.fork()
        try:
            other.crop(len(beginning.ids) - other.get_seq_length())
            other.ids = beginning.ids
        except (RuntimeError, ValueError):  # a layer cannot remove tokens: read the rest again
            other.reset()
            prompt: Any = beginning
            chunk = self.options.get("chunk")
            read(self._model, self.tokenizer, prompt, cache=other, used="continue", chunk=chunk)
        return other

    def _load(self, folder: Path) -> None:
        check_saved_index(folder, indexed=not isinstance(self.cache, PlainCache))
        other = self.cache.fork()
        other.reset()
        other.load(folder)
        self.cache, self._begun = other, True


def _outside() -> int:
    """Return the `stacklevel` with which a warning names the caller's line, and not this module."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    return level

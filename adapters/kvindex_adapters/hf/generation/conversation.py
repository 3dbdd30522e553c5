"""Continue or branch the token sequence, or the chat, that a cache already contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex_adapters.common.prompt import (
    Conversation,
    Messages,
    Prompt,
    RenderedChat,
    check_messages,
    common_length,
    encode_prompt,
    messages_of,
)
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.plain_cache import PlainCache

StoredTokens = IndexCache | PlainCache
"""A cache that prompts may follow, with an index or with full attention."""

USED = ("refuse", "continue", "branch")
"""Values of the option `used`, which says what `generate` does with a cache that already contains
tokens."""

HISTORY_OPTIONS: dict[str, Any] = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0)
"""Maps options of `model.generate` that depend on the ids of earlier tokens to the values that turn
the options off."""


def check_model(cache: StoredTokens | None, model: PreTrainedModel) -> None:
    """Raise UnsupportedError if a cache without an index belongs to another model.

    A cache with an index raises this error itself, during the forward pass.

    Args:
        cache: The cache, or None.
        model: The model, without the `PeftModel` around it.
    """
    if isinstance(cache, PlainCache):
        cache.check_model(model)


def check_follows(cache: object, used: str, *, allowed: tuple[str, ...] = USED) -> StoredTokens:
    """Check that a prompt may be appended to a cache.

    Args:
        cache: The cache.
        used: What to do if the cache already contains tokens: "refuse", "continue" or "branch".
        allowed: Allowed values of `used`.

    Returns:
        The cache.

    Raises:
        ValueError: The cache was not made by `attach`, or contains several sequences. Or it
            contains tokens and `used` is "refuse". Or `used` is not in `allowed`.
        UnsupportedError: `used` is "branch", and the model has linear attention.
        RuntimeError: The `attach` context has ended, or a forward pass has failed half way.
    """
    if not isinstance(cache, StoredTokens):
        raise ValueError(
            f"cache: got {type(cache).__name__}, allowed is a cache of attach(): "
            "with attach(model) as cache"
        )
    check.one_of("used", used, allowed)
    cache.check_usable()
    length = cache.get_seq_length()
    if length and used == "refuse":
        others = " or ".join(f'used="{name}"' for name in allowed if name != "refuse")
        raise ValueError(
            f"cache: got a cache with {length} tokens; to continue after these tokens, pass "
            f"{others}; to begin with an empty cache, call cache.reset()"
        )
    if isinstance(cache, PlainCache):
        batch = cache.sequences
    else:
        batch = max((layer.batch_size for layer in cache.attention_layers()), default=1)
    if batch > 1:
        raise ValueError(f"cache: got a cache of {batch} sequences, allowed is 1")
    overwrites = isinstance(cache, IndexCache) and cache.overwrites
    if used == "branch" and overwrites:
        raise UnsupportedError(
            'used: got "branch" for a model with linear attention, whose state cannot be restored; '
            'pass used="continue" and copy.deepcopy(cache), which leaves the cache unchanged'
        )
    return cache


class CannotForgetError(UnsupportedError):
    """Raised if the chat template changes an earlier message, but the cache cannot remove the
    tokens of this message."""


@contextmanager
def following(cache: StoredTokens, used: str, keep: int | None = None) -> Iterator[StoredTokens]:
    """Context manager that restores the cache after an error, or if `used` is "branch".

    Args:
        cache: The cache to which the prompt is appended.
        used: "branch" also restores the cache if there is no error. "continue" and "refuse" do not.
            (`check_follows` has checked that the cache is empty if the value is "refuse".)
        keep: Number of tokens to which the cache is truncated at the beginning. None keeps all
            tokens.

    Yields:
        The cache.

    Raises:
        CannotForgetError: The cache cannot forget the tokens after `keep`.
    """
    ids, conversation, done = cache.ids, cache.conversation, False
    cuts = keep is not None and keep < cache.get_seq_length()
    # If tokens are removed, restore the cache from a fork. A checkpoint is not enough, because new
    # tokens overwrite the removed ones.
    fork: Any = cache.fork() if cuts else None
    before: Any = None if cuts else cache.checkpoint()
    try:
        if keep is not None and cuts:
            _cut(cache, keep)
        yield cache
        done = used != "branch"
    finally:
        if not done:
            if fork is None:
                cache.rollback(before)
            else:
                cache.restore(fork)
            cache.ids, cache.conversation = ids, conversation


def _cut(cache: StoredTokens, keep: int) -> None:
    """Truncate a cache with known token ids to its first `keep` tokens."""
    length, ids = cache.get_seq_length(), cache.ids
    assert ids is not None
    try:
        cache.crop(keep - length)
    except (RuntimeError, ValueError) as error:
        raise CannotForgetError(
            "prompt: got a conversation whose tokens differ from those in the cache, from token "
            f"{keep} of {length} on. Tokens cannot be removed from this cache (a full sliding "
            "window has discarded older tokens, or linear attention has overwritten its state). "
            "Call cache.reset() and pass the whole conversation"
        ) from error
    cache.ids = ids[:keep]


def past_ids(cache: Any) -> Tensor | None:
    """Return the ids int64 `[N]` of the tokens in the cache, or None if the ids are unknown."""
    if not cache.get_seq_length():
        return torch.empty(0, dtype=torch.int64)
    return getattr(cache, "ids", None)


def remember(
    cache: StoredTokens, past: Tensor | None, ids: Tensor, messages: Messages | None = None
) -> None:
    """Record the ids and chat messages of the tokens in a cache.

    Args:
        cache: The cache, which already contains the tokens.
        past: Ids int64 `[P]` of the tokens before this call. If None, nothing is recorded.
        ids: Int64 `[N]`, the ids that this call has appended.
        messages: All messages of the chat, or None if the tokens are not a chat.
    """
    if past is not None:
        cache.ids = torch.cat([past.to(ids), ids])
        cache.conversation = None if messages is None else Conversation(cache.ids, messages)


def check_past_known(config: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if an option depends on the ids of earlier tokens, which are unknown."""
    for name, unused in HISTORY_OPTIONS.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value != unused:
            raise ValueError(
                f"{name}: got {value!r}, allowed is {unused!r}, because {name} needs the ids of "
                "all tokens, and calls other than kvhf.read and kvhf.generate filled this cache"
            )


# Continue the tokens in a cache


class KnowsTokens(Protocol):
    """Protocol for a cache or a decoder session that records the ids and messages of its tokens."""

    ids: Tensor | None
    conversation: Conversation | None


class Turn(NamedTuple):
    """How a prompt continues the tokens in a cache.

    Args:
        keep: Number of tokens of the cache to keep. Later tokens are removed.
        ids: Int64 `[N]`, the ids to append after the kept tokens.
        messages: All messages of the chat, or None if the prompt is text or ids.
    """

    keep: int
    ids: Tensor
    messages: Messages | None

    def answered(self, text: str) -> Messages | None:
        """Append an answer to the messages.

        Args:
            text: The text of the answer.

        Returns:
            The messages with the answer, or None if there are no messages.
        """
        if self.messages is None:
            return None
        return answered(self.messages, text)


def answered(messages: Messages, text: str) -> Messages:
    """Add an answer to messages. If the last message is the beginning of the answer, the result has
    both in one message."""
    *before, last = messages
    if last.get("role") == "assistant":
        return [*before, {**last, "content": str(last.get("content") or "") + text}]
    return [*messages, {"role": "assistant", "content": text}]


HISTORY_ROLES = {"system", "developer", "assistant"}
"""Roles by which a list of messages is recognized as a whole conversation.

A list of new messages has only the roles `user` and `tool`.
"""


def next_turn(
    tokenizer: Any,
    prompt: Prompt | RenderedChat,
    past: KnowsTokens,
    length: int,
    *,
    cue: bool = True,
) -> Turn:
    """Determine which tokens of a cache to keep for a prompt, and which ids to append.

    Text and ids are appended after all tokens. Messages can be new messages, or a whole
    conversation. They are a whole conversation if they begin with all messages in the cache (of
    which the last may have become longer), or if a message has a role of `HISTORY_ROLES`. The chat
    template is applied to the whole conversation, and the longest common prefix of its ids and the
    ids in the cache is kept.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Text, messages, ids int64 `[N]`, or a rendered conversation, which needs no relation
            to the stored one.
        past: The cache or session.
        length: Number of tokens in `past`.
        cue: Whether to add the generation prompt of the chat template after the messages.

    Returns:
        The number of tokens to keep, and the ids to append.

    Raises:
        ValueError: The prompt consists of messages, and the cache contains unknown tokens or
            another conversation. Or the chat template rejects the messages.
        TypeError: The prompt is neither text, messages nor a tensor.
    """
    if isinstance(prompt, RenderedChat):
        stored = torch.empty(0) if past.ids is None else past.ids
        keep = common_length([stored, prompt.ids])
        return _continued(keep, prompt.ids, deepcopy(prompt.messages))
    if isinstance(prompt, str | Tensor) or not length:
        ids = encode_prompt(tokenizer, prompt, follows=length > 0, cue=cue)
        messages = None if isinstance(prompt, str | Tensor) else deepcopy(check_messages(prompt))
        return Turn(length, ids, messages)
    prompt = check_messages(prompt)
    if past.ids is None:
        raise ValueError(
            f"prompt: got messages, but the conversation in the cache is unknown, because calls "
            f"other than read and generate have added some of its {length} tokens; pass text or ids"
        )
    known = messages_of(past.ids, past.conversation)
    messages = deepcopy(_whole(prompt, known))
    ids = encode_prompt(tokenizer, messages, cue=cue)
    keep = common_length([past.ids, ids])
    if known is None and keep < length and not (keep and _is_history(messages)):
        raise ValueError(
            f"prompt: got messages, but the {length} tokens in the cache do not come from "
            "messages, and the chat template does not continue them; pass text, ids, or a whole "
            "conversation that begins with the first token in the cache"
        )
    return _continued(keep, ids, messages)


def _continued(keep: int, ids: Tensor, messages: Messages | None) -> Turn:
    """Make a `Turn` that keeps the first `keep` tokens of the cache, and reads the rest of `ids`.

    `ids` are the tokens of the whole conversation. The cache already stores the first `keep` of
    them.
    """
    if keep == len(ids):
        # let the model read the last two tokens again: it must read at least one token, and a
        # forward pass of a single token would be a decode step, which searches the index
        keep = max(keep - 2, 0)
    return Turn(keep, ids[keep:], messages)


def _whole(prompt: Messages, known: Messages | None) -> Messages:
    """Return the whole conversation: the messages in the cache, followed by new messages.

    A prompt that is itself a whole conversation is returned unchanged. Raises ValueError if its
    first message differs from the first message in the cache.
    """
    if known is None or begins_with(prompt, known):
        return prompt
    if not _is_history(prompt):
        return [*known, *prompt]
    if not _same(prompt[0], known[0]):
        raise ValueError(
            f"prompt: got a whole conversation (it has the role {_role(prompt)!r}) that begins "
            f"with {_shown(prompt[0])}, but the conversation in the cache begins with "
            f"{_shown(known[0])}; pass a conversation with the same beginning, or only new "
            "messages, or call cache.reset() first"
        )
    return prompt


def _is_history(messages: Messages) -> bool:
    return any(message.get("role") in HISTORY_ROLES for message in messages)


def _role(messages: Messages) -> str:
    """Find the message that shows that `messages` is a whole conversation. Return its role.

    This is the first message with a role in `HISTORY_ROLES`. New messages do not have these roles.
    """
    return next(str(m["role"]) for m in messages if m.get("role") in HISTORY_ROLES)


def begins_with(messages: Messages, others: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if `messages` begins with the messages `others`. The last message of `others` may
    have a longer text in `messages`."""
    if len(messages) < len(others):
        return False
    *before, last = others
    if not all(map(_same, messages, before)):
        return False
    one = messages[len(before)]
    text, beginning = one.get("content"), last.get("content")
    goes_on = isinstance(text, str) and isinstance(beginning, str) and text.startswith(beginning)
    return _same(one, last) or (goes_on and one.get("role") == last.get("role"))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("role", "content"))


def _shown(message: Mapping[str, Any]) -> str:
    """Shorten a message to 40 characters, for an error text."""
    text = str(message.get("content"))
    return f"{message.get('role')}: {text if len(text) <= 40 else text[:40] + '…'!r}"

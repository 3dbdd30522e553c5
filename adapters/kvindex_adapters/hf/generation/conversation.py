"""Continue the tokens or the conversation that a cache stores, or branch from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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

USED = ("refuse", "continue", "branch")
"""Values of the option `used`: how `generate` treats a cache that stores tokens."""

HISTORY_OPTIONS: dict[str, Any] = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0)
"""Options of `model.generate` that read ids before the prompt -> the value that turns each off."""


def check_follows(cache: object, used: str, *, allowed: tuple[str, ...] = USED) -> IndexCache:
    """Check that a prompt may be read into a cache.

    Args:
        cache: The cache.
        used: The option of `generate`.
        allowed: Allowed values of `used`.

    Returns:
        The cache.

    Raises:
        ValueError: The cache does not come from `attach`, stores several sequences, or stores
            tokens and `used` is "refuse"; or `used` is wrong.
        UnsupportedError: `used` is "branch", and the model has linear attention.
        RuntimeError: The context of `attach` has ended, or a step has failed half way.
    """
    if not isinstance(cache, IndexCache):
        raise ValueError(
            f"cache: got {type(cache).__name__}, allowed is what attach() gave: "
            "with attach(model) as cache"
        )
    check.one_of("used", used, allowed)
    cache.check_usable()
    length = cache.get_seq_length()
    if length and used == "refuse":
        others = " or ".join(f'used="{name}"' for name in allowed if name != "refuse")
        raise ValueError(
            f"cache: got one that holds {length} tokens, allowed is an empty one; for a prompt "
            f"that follows them pass {others}, to start again call cache.reset()"
        )
    batch = max((layer.batch_size for layer in cache.attention_layers()), default=1)
    if batch > 1:
        raise ValueError(f"cache: got one of {batch} sequences, allowed is one sequence")
    if used == "branch" and any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        raise UnsupportedError(
            'used: got "branch", allowed is "continue" for a model with linear attention, whose '
            "state cannot go back; pass a copy.deepcopy of the cache to keep it as it is"
        )
    return cache


class CannotForgetError(UnsupportedError):
    """The chat template changes earlier turns, and this cache cannot remove their tokens."""


@contextmanager
def following(cache: IndexCache, used: str, keep: int | None = None) -> Iterator[IndexCache]:
    """Yield the cache, and restore it after a failure or a branch.

    Args:
        cache: The cache that the prompt follows.
        used: "continue" or "branch", as in `generate`; "refuse" for an empty cache.
        keep: Number of first tokens to which the cache is cropped at the beginning; None keeps all.

    Yields:
        The cache.

    Raises:
        CannotForgetError: The cache cannot forget the tokens after `keep`.
    """
    ids, conversation, done = cache.ids, cache.conversation, False
    cuts = keep is not None and keep < cache.get_seq_length()
    # a checkpoint becomes invalid once tokens are removed and new tokens overwrite their rows
    fork = cache.fork() if cuts else None
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


def _cut(cache: IndexCache, keep: int) -> None:
    """Crop a cache whose ids are known to its first `keep` tokens."""
    length, ids = cache.get_seq_length(), cache.ids
    assert ids is not None
    try:
        cache.crop(keep - length)
    except (RuntimeError, ValueError) as error:
        raise CannotForgetError(
            "prompt: got a conversation for which the chat template produces other tokens than the "
            f"cache stores, from token {keep} of {length} on. This cache cannot forget tokens "
            "(full sliding windows have lost older rows, and linear attention overwrites its "
            "state), so allowed is a conversation that begins with all stored tokens; or call "
            "cache.reset() and pass the whole conversation"
        ) from error
    cache.ids = ids[:keep]


def past_ids(cache: Any) -> Tensor | None:
    """Return the ids int64 `[N]` of the cache's tokens, or None if they are not known."""
    if not cache.get_seq_length():
        return torch.empty(0, dtype=torch.int64)
    return getattr(cache, "ids", None)


def remember(
    cache: IndexCache, past: Tensor | None, ids: Tensor, messages: Messages | None = None
) -> None:
    """Record the ids and messages that a cache stores now.

    Args:
        cache: The cache, which already stores the tokens.
        past: Ids int64 `[P]` of the tokens before the call. If None, nothing is recorded.
        ids: Int64 `[N]`, the ids of the tokens of this call.
        messages: The messages of the whole conversation, or None if the tokens are not one.
    """
    if past is not None:
        cache.ids = torch.cat([past.to(ids), ids])
        cache.conversation = None if messages is None else Conversation(cache.ids, messages)


def check_past_known(config: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if an option reads ids before the prompt, which are unknown."""
    for name, unused in HISTORY_OPTIONS.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value != unused:
            raise ValueError(
                f"{name}: got {value!r}, allowed is {unused!r} with a cache that holds tokens of "
                "other calls than kvhf.read and kvhf.generate: it reads the ids of these tokens"
            )


# Continuing the tokens that a cache stores


class KnowsTokens(Protocol):
    """A cache, or a session of the decoder, that records which tokens it stores."""

    ids: Tensor | None
    conversation: Conversation | None


class Turn(NamedTuple):
    """How a prompt continues the stored tokens.

    Args:
        keep: The first `keep` stored tokens stay; the others are removed.
        ids: Int64 `[N]`, the ids to read after them.
        messages: The messages of the whole conversation, or None if the prompt is text or ids.
    """

    keep: int
    ids: Tensor
    messages: Messages | None

    def answered(self, text: str) -> Messages | None:
        """Add an answer to the messages.

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
"""Roles that only occur in a whole conversation, because new messages come from users and tools."""


def next_turn(
    tokenizer: Any,
    prompt: Prompt | RenderedChat,
    past: KnowsTokens,
    length: int,
    *,
    cue: bool = True,
) -> Turn:
    """Find how a prompt continues the stored tokens.

    Text and ids are appended. Messages are either new messages or the whole conversation. They are
    the whole conversation if they begin with all stored messages (the last of these may be longer
    now), or if one of them has a role of `HISTORY_ROLES`. The chat template is applied to the whole
    conversation, and the longest prefix of its ids that is already stored is kept.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Text, messages, ids int64 `[N]`, or a rendered conversation, which needs no relation
            to the stored one.
        past: The cache or session.
        length: Number of tokens that `past` stores.
        cue: Whether messages get the generation prompt of the chat template.

    Returns:
        The tokens to keep, and the ids to read.

    Raises:
        ValueError: The stored conversation is unknown, or differs from the one in the prompt; also
            what `encode_prompt` raises.
        TypeError: The prompt is of another kind.
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
            f"prompt: got messages, allowed is text or ids with a cache of {length} tokens that "
            "were not put there by read and generate: the conversation so far is not known"
        )
    known = messages_of(past.ids, past.conversation)
    messages = deepcopy(_whole(prompt, known))
    ids = encode_prompt(tokenizer, messages, cue=cue)
    keep = common_length([past.ids, ids])
    if known is None and keep < length and not (keep and _is_history(messages)):
        raise ValueError(
            f"prompt: got messages, with which the chat template does not continue the {length} "
            "tokens of the cache, because those do not come from messages; allowed are text, ids, "
            "or the whole conversation, from the first token of the cache on"
        )
    return _continued(keep, ids, messages)


def _continued(keep: int, ids: Tensor, messages: Messages) -> Turn:
    """Keep the first `keep` of the ids, which are stored, and read the others."""
    if keep == len(ids):
        keep = max(keep - 2, 0)  # read two tokens or more: a step of one would search
    return Turn(keep, ids[keep:], messages)


def _whole(prompt: Messages, known: Messages | None) -> Messages:
    """Join the stored messages and those of a prompt to the whole conversation.

    Raises ValueError if the prompt is itself a whole conversation that does not begin with the
    stored messages.
    """
    if known is None or _begins_with(prompt, known):
        return prompt
    if not _is_history(prompt):
        return [*known, *prompt]
    if not _same(prompt[0], known[0]):
        raise ValueError(
            f"prompt: got messages with the role {_role(prompt)!r}, so a whole conversation, which "
            f"begins with {_shown(prompt[0])}; allowed is one that begins like the conversation of "
            f"the cache, with {_shown(known[0])}, or only new messages; to begin another "
            "conversation, call cache.reset()"
        )
    return prompt


def _is_history(messages: Messages) -> bool:
    return any(message.get("role") in HISTORY_ROLES for message in messages)


def _role(messages: Messages) -> str:
    """Return the first role that only occurs in a whole conversation."""
    return next(str(m["role"]) for m in messages if m.get("role") in HISTORY_ROLES)


def _begins_with(messages: Messages, others: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if `messages` begin with `others`. The last of these may be longer in
    `messages`."""
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

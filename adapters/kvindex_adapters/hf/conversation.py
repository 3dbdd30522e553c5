"""Prompts that continue a conversation in a cache with tokens, or branch from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.prompt import (
    Conversation,
    Messages,
    Prompt,
    check_messages,
    common_length,
    encode_prompt,
    messages_of,
)
from kvindex_adapters.hf.unsupported import UnsupportedError

USED = ("refuse", "continue", "branch")
"""What `generate` may do with a cache that holds tokens."""

HISTORY_OPTIONS: dict[str, Any] = dict(repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0)
"""Options of `model.generate` that look at ids before the prompt -> value without effect."""


def check_follows(cache: object, used: str, *, allowed: tuple[str, ...] = USED) -> IndexCache:
    """`cache`, if a prompt may be read into it. Raises ValueError, or RuntimeError once closed."""
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
            f"that follows them say {others}, to begin anew cache.reset()"
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


@contextmanager
def following(cache: IndexCache, used: str, keep: int | None = None) -> Iterator[IndexCache]:
    """Give the cache, and restore it after a failure or a branch.

    keep: tokens of the cache that stay, the first ones; None for all. Raises UnsupportedError for a
    cache that cannot forget the others.
    """
    ids, conversation, done = cache.ids, cache.conversation, False
    cuts = keep is not None and keep < cache.get_seq_length()
    # a checkpoint does not hold once tokens are removed and others written in their place
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
    """Keep the first `keep` tokens of a cache whose ids are known."""
    length, ids = cache.get_seq_length(), cache.ids
    assert ids is not None
    try:
        cache.crop(keep - length)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f"prompt: got a conversation of which the chat template makes other tokens than the "
            f"cache stores, from token {keep} of {length} on. This cache cannot forget tokens "
            "(sliding windows that are full have lost older rows, and linear attention overwrites "
            "its state), so allowed is a conversation that begins with all of them; or call "
            "cache.reset() and pass the whole conversation"
        ) from error
    cache.ids = ids[:keep]


def past_ids(cache: Any) -> Tensor | None:
    """Ids int64 `[N]` of the cache's tokens, or None where others put tokens there."""
    if not cache.get_seq_length():
        return torch.empty(0, dtype=torch.int64)
    return getattr(cache, "ids", None)


def remember(
    cache: IndexCache, past: Tensor | None, ids: Tensor, messages: Messages | None = None
) -> None:
    """Record that the cache holds ids `[N]` after the past.

    messages: of the whole conversation, or None where the tokens are not those of one.
    """
    if past is not None:
        cache.ids = torch.cat([past.to(ids), ids])
        cache.conversation = None if messages is None else Conversation(cache.ids, messages)


def check_past_known(config: Any, options: dict[str, Any]) -> None:
    """Raises ValueError for options that look at past ids, which are unknown."""
    for name, unused in HISTORY_OPTIONS.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value != unused:
            raise ValueError(
                f"{name}: got {value!r}, allowed is {unused!r} with a cache that holds tokens of "
                "other calls than kvhf.read and kvhf.generate: it looks at ids of the past"
            )


# What follows the tokens that a cache stores


class Remembers(Protocol):
    """A cache, or a session of the decoder, as far as it knows its tokens."""

    ids: Tensor | None
    conversation: Conversation | None


class Turn(NamedTuple):
    """How a prompt goes on from stored tokens.

    keep: how many of them stay, the first ones; ids: int64 `[N]`, which follow those; messages: of
    the whole conversation, or None where the prompt is not of messages.
    """

    keep: int
    ids: Tensor
    messages: Messages | None

    def answered(self, text: str) -> Messages | None:
        """The messages with an answer after them."""
        if self.messages is None:
            return None
        return [*self.messages, {"role": "assistant", "content": text}]


HISTORY = {"system", "developer", "assistant"}
"""Roles of messages that only a whole conversation has: new messages come from users and tools."""


def next_turn(
    tokenizer: Any, prompt: Prompt, past: Remembers, length: int, *, cue: bool = True
) -> Turn:
    """How a prompt goes on from the `length` tokens that `past` stores.

    Text and ids are appended. Messages are either new ones or the whole conversation: they are the
    whole where they begin with all messages before (the last of which may go on), or where one of
    them is of a system or an assistant. The chat template is applied to the whole conversation, and
    the longest prefix of its ids that is stored is kept.

    cue: messages end with the cue to answer. Raises ValueError where the conversation before is
    not known or is another one, and as `encode_prompt`.
    """
    if isinstance(prompt, str | Tensor) or not length:
        ids = encode_prompt(tokenizer, prompt, follows=length > 0, cue=cue)
        messages = None if isinstance(prompt, str | Tensor) else deepcopy(check_messages(prompt))
        return Turn(length, ids, messages)
    prompt = check_messages(prompt)
    if past.ids is None:
        raise ValueError(
            f"prompt: got messages, allowed is text or ids with a cache of {length} tokens that "
            "others than read and generate have put there: the conversation so far is not known"
        )
    known = messages_of(past.ids, past.conversation)
    messages = deepcopy(_whole(prompt, known))
    ids = encode_prompt(tokenizer, messages, cue=cue)
    keep = common_length([past.ids, ids])
    if known is None and keep < length and not (keep and _is_history(messages)):
        raise ValueError(
            f"prompt: got messages, which the chat template does not make to follow the {length} "
            "tokens of the cache: those are not of messages. Allowed are text, ids, or the whole "
            "conversation that the cache stores and what follows it"
        )
    if keep == len(ids):
        keep = max(keep - 2, 0)  # what is read must not be empty; one token would search
    return Turn(keep, ids[keep:], messages)


def _whole(prompt: Messages, known: Messages | None) -> Messages:
    """The messages of the whole conversation, from a prompt and those that are stored.

    Raises ValueError where the prompt is a whole conversation, but another one.
    """
    if known is None or _begins_with(prompt, known):
        return prompt
    if not _is_history(prompt):
        return [*known, *prompt]
    if not _same(prompt[0], known[0]):
        raise ValueError(
            f"prompt: got messages with one of the role {_role(prompt)!r}, so a whole "
            f"conversation, which begins with {_shown(prompt[0])}; allowed is one that begins as "
            f"that of the cache does, with {_shown(known[0])}, or new messages alone; to begin "
            "another conversation reset the cache"
        )
    return prompt


def _is_history(messages: Messages) -> bool:
    return any(message.get("role") in HISTORY for message in messages)


def _role(messages: Messages) -> str:
    """The first role that only a whole conversation has."""
    return next(str(m["role"]) for m in messages if m.get("role") in HISTORY)


def _begins_with(messages: Messages, others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages begin with others; the text of the last of those may go on."""
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
    """A message, of which the text may be long."""
    text = str(message.get("content"))
    return f"{message.get('role')}: {text if len(text) <= 40 else text[:40] + '…'!r}"

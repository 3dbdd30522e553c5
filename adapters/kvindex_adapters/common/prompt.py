"""Convert a prompt (a text, chat messages, or token ids) to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvindex.core import check

Messages = list[dict[str, Any]]
"""The messages of a chat in order, each with a role and a content."""

Prompt = str | Messages | Tensor
"""Plain text, messages for the tokenizer's chat template, or token ids int64 `[N]`."""


class Conversation(NamedTuple):
    """The messages of a chat, and the ids of the tokens that a cache contains for them.

    The ids are int64 `[N]`.
    """

    ids: Tensor
    messages: Messages


@dataclass(frozen=True)
class RenderedChat:
    """A whole conversation to which the chat template was applied already.

    Args:
        ids: Int64 `[N]`, the ids of the conversation, generation prompt included.
        messages: The messages of the conversation, or None if the ids end inside a message.
    """

    ids: Tensor
    messages: Messages | None


def render_chat(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any], *, cue: bool = True
) -> RenderedChat:
    """Apply the chat template to a whole conversation.

    If the last message is from the assistant, it is the beginning of an answer: the template leaves
    it open, so that the model continues it.

    Args:
        tokenizer: The model's tokenizer.
        messages: The messages of the conversation.
        options: Further keyword arguments of `tokenizer.apply_chat_template`, for example `tools`
            or `enable_thinking`.
        cue: Whether to add the generation prompt after the last message. It is never added if the
            last message is from the assistant.

    Returns:
        Messages and ids.

    Raises:
        TypeError: `messages` is not a list of messages.
        ValueError: There is no message, or the template does not accept them.
    """
    messages = check_messages(messages)
    if messages[-1].get("role") == "assistant":
        options, cue = {**options, "continue_final_message": True}, False
    ids = tokenizer(_rendered(tokenizer, messages, cue, options), add_special_tokens=False)
    return RenderedChat(torch.tensor(ids["input_ids"], dtype=torch.int64), messages)


def messages_of(ids: Tensor | None, conversation: Conversation | None) -> Messages | None:
    """Return the chat messages whose tokens a cache contains.

    Args:
        ids: Int64 `[N]`, the ids of all tokens in the cache, or None if unknown.
        conversation: The last conversation that was recorded for this cache, or None.

    Returns:
        The messages of `conversation`, or None if the cache contains any other tokens.
    """
    if ids is None or conversation is None or conversation.ids is not ids:
        return None
    return conversation.messages


def encode_prompt(
    tokenizer: Any, prompt: Prompt, *, follows: bool = False, cue: bool = True
) -> Tensor:
    """Convert a prompt to token ids.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Text, chat messages, or ids int64 `[N]`, which are returned unchanged.
        follows: Whether the prompt continues a sequence. If so, a text gets no special tokens such
            as BOS.
        cue: Whether to add the generation prompt of the chat template after the messages.

    Returns:
        Ids int64 `[N]`.

    Raises:
        TypeError: The prompt is neither text, messages nor a tensor.
        ValueError: The chat template does not accept the messages.
    """
    if isinstance(prompt, Tensor):
        return check.tensor("prompt", prompt, {"N": None}, torch.int64)
    if isinstance(prompt, str):
        encoded = tokenizer(prompt, add_special_tokens=False) if follows else tokenizer(prompt)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)
    text = _rendered(tokenizer, check_messages(prompt), cue)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def check_messages(prompt: object) -> Messages:
    """Check that a prompt is a list of messages.

    Args:
        prompt: A prompt that is neither text nor ids.

    Returns:
        The messages.

    Raises:
        TypeError: The prompt is not a list of messages.
        ValueError: The list is empty.
    """
    if not isinstance(prompt, Sequence) or not all(isinstance(one, Mapping) for one in prompt):
        kind = type(prompt).__name__
        kind += f" of {type(prompt[0]).__name__}" if isinstance(prompt, Sequence) else ""
        raise TypeError(
            f"prompt: got {kind}, allowed is a text, a list of messages (dicts with role and "
            "content), or a tensor of token ids, int64 [N]"
        )
    if not prompt:
        raise ValueError("prompt: got no messages, allowed is at least one")
    return list(prompt)


def common_length(prompts: Sequence[Tensor]) -> int:
    """Return the length of the longest common prefix of prompts, int64 `[N]` each."""
    length = 0
    for column in zip(*(prompt.tolist() for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def _rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    cue: bool,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Apply the tokenizer's chat template. Raises ValueError if it does not accept the messages."""
    from jinja2 import TemplateError  # installed with torch and transformers

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=cue, **(options or {})
        )
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"prompt: got messages with the roles {roles}, but the tokenizer's chat template "
            f"rejects them: {error}"
        ) from error
    return text

"""Encode prompts, and stack prompts of different lengths with padding on the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvindex_adapters.common.prompt import Prompt, encode_prompt
from kvindex_adapters.common.prompt_chunks import check_prompt
from kvindex_adapters.decoder.config import DecoderConfig

Prompts = list[str] | list[list[dict[str, str]]] | list[Tensor]
"""Several prompts of one type: texts, lists of chat messages, or tensors of token ids."""


class Batch(NamedTuple):
    """Padded token ids int64 `[B, N]`, and the number of padding tokens in each sequence."""

    ids: Tensor
    padding: list[int]


def is_one(prompt: Prompt | Prompts) -> bool:
    """Return True for a single prompt (text, chat messages or ids), False for a list of prompts."""
    return not isinstance(prompt, list) or isinstance(next(iter(prompt), None), Mapping)


def prompts_of(prompt: Prompt | Prompts) -> list[Any]:
    """Return a list of prompts. A single prompt becomes a list of length 1."""
    return [prompt] if is_one(prompt) else list(prompt)


def encode(tokenizer: Any, prompts: Sequence[Any], config: DecoderConfig) -> list[Tensor]:
    """Convert each prompt to token ids.

    Args:
        tokenizer: The model's tokenizer; None if all prompts are ids.
        prompts: Texts, lists of chat messages, or tensors of ids.
        config: Sizes of the model. Ids are checked against the size of the vocabulary.

    Returns:
        Ids int64 `[N]` of each prompt.

    Raises:
        ValueError: There is no prompt, a prompt is empty, an id is outside of the vocabulary, or
            the chat template rejects the messages.
        TypeError: A prompt is neither text, messages nor a tensor.
    """
    if not len(prompts):
        raise ValueError("prompts: got none, allowed is at least one")
    check_tokenizer(tokenizer, prompts)
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for row in rows:
        check_prompt(row, config.vocabulary)
    return rows


def check_tokenizer(tokenizer: Any, prompts: Sequence[Any]) -> None:
    """Check that there is a tokenizer if a prompt is text or messages.

    Args:
        tokenizer: The decoder's tokenizer, or None.
        prompts: Texts, lists of chat messages, or tensors of ids.

    Raises:
        ValueError: There is no tokenizer, and a prompt is not a tensor of ids.
    """
    if tokenizer is None and not all(isinstance(prompt, Tensor) for prompt in prompts):
        kinds = sorted({type(prompt).__name__ for prompt in prompts})
        raise ValueError(
            f"prompt: got {', '.join(kinds)}, but the decoder has no tokenizer; pass token ids"
        )


def left_padded(rows: Sequence[Tensor], device: torch.device) -> Batch:
    """Stack sequences of ids, int64 `[N]` each. Shorter sequences are padded with zeros on the
    left."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    padded = [
        functional.pad(row.to(device), (count, 0)) for row, count in zip(rows, padding, strict=True)
    ]
    return Batch(torch.stack(padded), padding)

"""Drafts of instances: their texts, before these are encoded and adjusted to a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from kvindex_adapters.common.prompt import encode_prompt
from kvindex_adapters.evaluate.tasks.instance import Instance, Metric, Question
from kvindex_adapters.evaluate.tasks.scoring import contains


@dataclass(frozen=True)
class Asked:
    """A question as text, which follows the context's text directly.

    Args:
        text: The question.
        answers: As in `Question`.
        max_new_tokens: As in `Question`.
        metric: As in `Question`.
        begin: Beginning of the answer, which is part of the prompt.
        cue: Text before the answer if there is no chat template.
    """

    text: str
    answers: tuple[str, ...]
    max_new_tokens: int = 32
    metric: Metric = contains
    begin: str = ""
    cue: str = "\n\nAnswer: "


@dataclass(frozen=True)
class Draft:
    """A context as text, and the questions about it."""

    context: str
    questions: tuple[Asked, ...]

    def depth(self) -> float | None:
        """Return the fraction of the context's characters before the answer.

        The result is None unless one question asks for one text that occurs once in the context.
        """
        wanted = [text for asked in self.questions for text in asked.answers]
        exact = self.questions[0].metric is contains and len(wanted) == 1
        if not exact or self.context.count(wanted[0]) != 1:
            return None
        return self.context.index(wanted[0]) / len(self.context)


def encode(tokenizer: Any, draft: Draft, *, task: str, seed: int) -> Instance:
    """Encode a draft. The ids of the context are the common prefix of all prompts.

    One of these prompts has no question, so that the context contains no part of a question.
    """
    prompts = [_prompt(tokenizer, draft, asked) for asked in draft.questions]
    shared = _shared_length([_prompt(tokenizer, draft, Asked("", ())), *prompts])
    questions = tuple(
        Question(prompt[shared:], asked.answers, asked.max_new_tokens, asked.metric)
        for asked, prompt in zip(draft.questions, prompts, strict=True)
    )
    return Instance(task, seed, prompts[0][:shared], questions, draft.depth())


def longest(tokenizer: Any, draft: Draft) -> int:
    """Return the number of tokens of the prompt with the longest question."""
    alone = Draft("", draft.questions)
    asked = max(draft.questions, key=lambda asked: len(_prompt(tokenizer, alone, asked)))
    return len(_prompt(tokenizer, draft, asked))


def most_parts(
    length: Callable[[int], int], tokens: int, *, least: int = 1, most: int | None = None
) -> int:
    """Return the largest number of parts of text for which `length` is at most `tokens`.

    Args:
        length: Function from a number of parts to a length in tokens.
        tokens: Largest length.
        least: Smallest number to return.
        most: Largest number to return, or None.

    Raises:
        ValueError: Even the smallest number makes a text that is too long.
    """
    low, size, high = least, length(least), None if most is None else most + 1
    if size > tokens:
        raise ValueError(f"tokens: got {tokens}, allowed is at least {size} here")
    while high is None or high - low > 1:
        guess = max(low + 1, low * tokens // size)  # assumes that length grows proportionally
        if high is not None and guess >= high:
            guess = (low + high) // 2
        if (now := length(guess)) <= tokens:
            low, size = guess, now
        else:
            high = guess
    return low


def _prompt(tokenizer: Any, draft: Draft, asked: Asked) -> Tensor:
    """Encode a text as a user message, or as plain text without a chat template: int64 `[N]`."""
    text = draft.context + asked.text
    if not tokenizer.chat_template:
        cued = text + asked.cue
        return encode_prompt(tokenizer, cued + asked.begin if asked.begin else cued.rstrip())
    ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
    return torch.cat([ids, encode_prompt(tokenizer, asked.begin, follows=True)])


def _shared_length(prompts: list[Tensor]) -> int:
    """Return the length of the common prefix of all prompts `[N]`."""
    columns = zip(*(prompt.tolist() for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))

"""Write a prompt of a task as text, choose its length, and encode it as token ids."""

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
    """A question as text, before it is encoded as token ids.

    Args:
        text: The question. It is appended to the context without a separator.
        answers: Right answers, which the metric compares with the answer of the model.
        max_new_tokens: Maximum length of the answer in tokens.
        metric: Function that computes the score of an answer.
        begin: First words of the answer. They are a part of the prompt.
        cue: Text between question and answer, for a model without a chat template.
    """

    text: str
    answers: tuple[str, ...]
    max_new_tokens: int = 32
    metric: Metric = contains
    begin: str = ""
    cue: str = "\n\nAnswer: "


@dataclass(frozen=True)
class Draft:
    """A prompt of a task as text: a context, and one or more questions about the context."""

    context: str
    questions: tuple[Asked, ...]

    def depth(self) -> float | None:
        """Return the position of the answer in the context, from 0 (beginning) to 1 (end).

        The result is None if there are several answers, or if the answer does not occur exactly
        once in the context.
        """
        wanted = [text for asked in self.questions for text in asked.answers]
        exact = self.questions[0].metric is contains and len(wanted) == 1
        if not exact or self.context.count(wanted[0]) != 1:
            return None
        return self.context.index(wanted[0]) / len(self.context)


def encode(tokenizer: Any, draft: Draft, *, task: str, seed: int) -> Instance:
    """Encode a draft as token ids.

    The context is the longest common beginning of the ids of all prompts, one prompt per question.
    The comparison also includes a prompt with an empty question, so that the context contains no
    part of a question.
    """
    prompts = [_prompt(tokenizer, draft, asked) for asked in draft.questions]
    shared = _shared_length([_prompt(tokenizer, draft, Asked("", ())), *prompts])
    questions = tuple(
        Question(prompt[shared:], asked.answers, asked.max_new_tokens, asked.metric)
        for asked, prompt in zip(draft.questions, prompts, strict=True)
    )
    return Instance(task, seed, prompts[0][:shared], questions, draft.depth())


def longest(tokenizer: Any, draft: Draft) -> int:
    """Return the number of tokens of the longest prompt: the context and its longest question."""
    alone = Draft("", draft.questions)
    asked = max(draft.questions, key=lambda asked: len(_prompt(tokenizer, alone, asked)))
    return len(_prompt(tokenizer, draft, asked))


def most_parts(
    length: Callable[[int], int], tokens: int, *, least: int = 1, most: int | None = None
) -> int:
    """Return how many parts (such as paragraphs) a prompt of at most `tokens` tokens can have.

    Args:
        length: Function that takes a number of parts, and returns the prompt's length in tokens.
        tokens: Maximum length of the prompt in tokens.
        least: Smallest allowed number of parts.
        most: Largest allowed number of parts, or None for no limit.

    Raises:
        ValueError: Even a prompt with `least` parts is too long.
    """
    low, size, high = least, length(least), None if most is None else most + 1
    if size > tokens:
        raise ValueError(
            f"tokens: got {tokens}, allowed is at least {size}, the length of the task's shortest "
            "prompt"
        )
    while high is None or high - low > 1:
        guess = max(low + 1, low * tokens // size)  # assume that length grows proportionally
        if high is not None and guess >= high:
            guess = (low + high) // 2
        if (now := length(guess)) <= tokens:
            low, size = guess, now
        else:
            high = guess
    return low


def _prompt(tokenizer: Any, draft: Draft, asked: Asked) -> Tensor:
    """Return the token ids of context and question, int64 `[N]`.

    They are encoded as a user message, or as plain text if the tokenizer has no chat template.
    """
    text = draft.context + asked.text
    if not tokenizer.chat_template:
        cued = text + asked.cue
        return encode_prompt(tokenizer, cued + asked.begin if asked.begin else cued.rstrip())
    ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
    return torch.cat([ids, encode_prompt(tokenizer, asked.begin, follows=True)])


def _shared_length(prompts: list[Tensor]) -> int:
    """Return the number of tokens at the beginning that are the same in all prompts."""
    columns = zip(*(prompt.tolist() for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))

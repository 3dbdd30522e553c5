"""The demo's task: facts hidden in a long text, and a question about each.

The task follows the single-needle task of RULER (Hsieh et al., 2024). Its questions are worded in
such a way that SmolLM2-135M answers them correctly with full attention. The caller provides the
text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvindex_adapters.common.prompt import common_length, encode_prompt

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")


@dataclass(frozen=True)
class Needle:
    """One hidden fact and the question about it.

    Args:
        key: The word that the question names.
        value: The number that is the answer to the question.
    """

    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The sentence that is hidden in the text."""
        return f"The special magic number for {self.key} is {self.value}."

    @property
    def question(self) -> str:
        """The question whose answer is the hidden fact."""
        return f"What is the special magic number for {self.key} that the text mentions?"

    def found(self, answer: str) -> bool:
        """Return True if the answer contains the value."""
        return self.value in answer


@dataclass(frozen=True)
class Hidden:
    """A document with hidden facts, and one prompt per question about it.

    Args:
        needles: The hidden facts.
        prompts: Ids int64 `[N]` of the document and the question, for each needle.
    """

    needles: list[Needle]
    prompts: list[Tensor]

    @property
    def shared(self) -> int:
        """Length in tokens of the common prefix of all prompts, which contains the document.

        At least two tokens of each prompt come after this prefix.
        """
        return min(common_length(self.prompts), *(len(ids) - 2 for ids in self.prompts))


def hide(tokenizer: Any, text: Sequence[str], *, tokens: int, seed: int, count: int = 1) -> Hidden:
    """Make prompts of at most `tokens` tokens.

    A prompt contains paragraphs of the text in random order, and the facts between them. If the
    text is too short, the prompts are shorter.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        text: The paragraphs.
        tokens: Maximum length of a prompt.
        seed: Seed for the facts, their places and the order of the paragraphs.
        count: Number of facts, from 1 to 8.

    Returns:
        The facts and the prompts.

    Raises:
        ValueError: There is no room for any paragraph.
    """
    rng = random.Random(seed)
    keys = rng.sample(KEYS, count)
    needles = [Needle(key, str(rng.randint(10**6, 10**7 - 1))) for key in keys]
    sentences = [needle.sentence for needle in needles]
    room = tokens - max(len(_prompt(tokenizer, sentences, needle)) for needle in needles)
    chosen: list[str] = []
    for paragraph in rng.sample(list(text), len(text)):
        room -= len(tokenizer(paragraph + "\n\n", add_special_tokens=False)["input_ids"])
        if room < 0:
            break
        chosen.append(paragraph)
    depths = sorted(rng.random() for _ in needles)
    while chosen:
        body = list(chosen)
        for sentence, depth in reversed(list(zip(sentences, depths, strict=True))):
            body.insert(round(depth * len(chosen)), sentence)
        prompts = [_prompt(tokenizer, body, needle) for needle in needles]
        if max(map(len, prompts)) <= tokens:  # joined paragraphs may have a few more tokens
            return Hidden(needles, prompts)
        chosen.pop()
    raise ValueError(
        f"tokens: got {tokens}, which is too short for a prompt with even one paragraph of the "
        "text; pass a larger number"
    )


def _prompt(tokenizer: Any, body: list[str], needle: Needle) -> Tensor:
    content = "\n\n".join([*body, needle.question])
    return encode_prompt(tokenizer, [{"role": "user", "content": content}])

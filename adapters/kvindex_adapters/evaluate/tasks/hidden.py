"""The task of `kvindex demo`: a fact (needle) is hidden in a long text, and a question asks for it.

The task follows the single-needle task of RULER (Hsieh et al., 2024), in words with which the model
SmolLM2-135M answers correctly with full attention.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvindex_adapters.common.prompt import encode_prompt

KEYS = ("harbor", "lantern", "meadow", "copper", "violin", "orchard", "glacier", "compass")


@dataclass(frozen=True)
class Needle:
    """A prompt with a hidden fact: the number of a word.

    Args:
        ids: Token ids of the prompt, int64 `[N]`.
        key: The word that the question names.
        value: The number of the word, which is the right answer.
    """

    ids: Tensor
    key: str
    value: str

    def found(self, answer: str) -> bool:
        """Return True if a model's answer contains the right number."""
        return self.value in answer


def hide(tokenizer: Any, text: Sequence[str], *, tokens: int, seed: int) -> Needle:
    """Make a prompt of at most `tokens` tokens from paragraphs in random order and a hidden fact.

    Args:
        tokenizer: The tokenizer of the model.
        text: The paragraphs. If they are few, the prompt is shorter than `tokens`.
        tokens: Maximum length of the prompt in tokens.
        seed: Random seed that chooses the fact, its position and the order of the paragraphs.

    Raises:
        ValueError: `tokens` is too small for the fact and a paragraph.
    """
    rng = random.Random(seed)
    key, value = rng.choice(KEYS), str(rng.randint(10**6, 10**7 - 1))
    needle = f"The special magic number for {key} is {value}."
    room = tokens - len(_prompt(tokenizer, [needle], key))
    chosen: list[str] = []
    for paragraph in rng.sample(list(text), len(text)):
        room -= len(tokenizer(paragraph + "\n\n", add_special_tokens=False)["input_ids"])
        if room < 0:
            break
        chosen.append(paragraph)
    depth = rng.random()
    while chosen:
        at = round(depth * len(chosen))
        ids = _prompt(tokenizer, [*chosen[:at], needle, *chosen[at:]], key)
        if len(ids) <= tokens:  # joined paragraphs may have more tokens than separate ones
            return Needle(ids, key, value)
        chosen.pop()
    raise ValueError(
        f"tokens: got {tokens}, which is too small for the question and a paragraph of the text; "
        "pass more tokens"
    )


def _prompt(tokenizer: Any, body: list[str], key: str) -> Tensor:
    text = "\n\n".join(body)
    content = f"{text}\n\nWhat is the special magic number for {key} that the text mentions?"
    return encode_prompt(tokenizer, [{"role": "user", "content": content}])

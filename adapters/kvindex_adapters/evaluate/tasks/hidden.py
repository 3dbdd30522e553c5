"""The demo's needle: one fact hidden in a long text, and a question about it.

The task follows the single-needle task of RULER (Hsieh et al., 2024), with a wording to which
SmolLM2-135M finds the answer with full attention. The caller provides the text.
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
    """A prompt with a needle: ids int64 `[N]`, the word to ask for, and its value."""

    ids: Tensor
    key: str
    value: str

    def found(self, answer: str) -> bool:
        """Return True if the answer contains the value."""
        return self.value in answer


def hide(tokenizer: Any, text: Sequence[str], *, tokens: int, seed: int) -> Needle:
    """Make a prompt of at most `tokens` tokens: paragraphs in random order, and a needle.

    A short text gives a shorter prompt.

    Raises:
        ValueError: There is no room for any paragraph.
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
        if len(ids) <= tokens:  # joined paragraphs may have a few more tokens
            return Needle(ids, key, value)
        chosen.pop()
    raise ValueError(f"tokens: got {tokens}, allowed is enough for a paragraph of the text")


def _prompt(tokenizer: Any, body: list[str], key: str) -> Tensor:
    text = "\n\n".join(body)
    content = f"{text}\n\nWhat is the special magic number for {key} that the text mentions?"
    return encode_prompt(tokenizer, [{"role": "user", "content": content}])

"""Aggregation tasks, after RULER: find the words that appear most often in a long list."""

from __future__ import annotations

import random
from itertools import count

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.vocabulary import coined

COMMON, COMMON_TIMES, OTHER_TIMES = 5, 20, 2
"""Numbers of the task `common-words`, as in RULER.

`COMMON` words appear `COMMON_TIMES` times each, and the question asks for them. Every other word
appears `OTHER_TIMES` times.
"""

RANKS = 3
"""Number of words that the task `frequent-words` asks for, as in RULER."""

ENOUGH = 64
"""Smallest number of words in a list in which the most frequent words have different counts."""


@task("common-words", "the five words of a list that appear twenty times; all others appear twice")
def common(rng: random.Random, parts: int) -> Draft:
    """Make a list in which five words appear 20 times, and `parts` other words twice."""
    found = coined(rng, COMMON + parts)
    counts = [COMMON_TIMES] * COMMON + [OTHER_TIMES] * parts
    return _draft(rng, found, counts, COMMON)


@task("frequent-words", "the three words that appear most often, by Zipf's law", least=ENOUGH)
def frequent(rng: random.Random, parts: int) -> Draft:
    """Make a list of `parts` words in which the `r`-th most frequent word has the fraction
    `6 / (π r)²` of all entries (Zipf's law)."""
    counts: list[int] = []
    for rank in count(1):
        counts.append(int(parts * 0.608 / rank**2))  # 0.608 is 6 / π²
        if counts[-1] <= 1:
            break
    counts += [1] * (parts - sum(counts))
    return _draft(rng, coined(rng, len(counts)), counts, RANKS)


def _draft(rng: random.Random, found: list[str], counts: list[int], asked: int) -> Draft:
    """Make a shuffled list in which each word appears as often as its count says.

    The question asks for the first `asked` words of `found`, which are the most frequent ones.
    """
    listed = [word for word, times in zip(found, counts, strict=True) for _ in range(times)]
    rng.shuffle(listed)
    text = f"\n\nWhich {asked} words appear most often in the list above?"
    begin = f"The {asked} words that appear most often in the list above are:"
    question = Asked(text, tuple(found[:asked]), max_new_tokens=48, begin=begin)
    return Draft(f"A list of words: {' '.join(listed)}", (question,))

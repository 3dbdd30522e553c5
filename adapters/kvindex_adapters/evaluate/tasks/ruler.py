"""The 13 tasks of RULER (Hsieh et al., 2024), made by the package nvidia-long-context-eval.

Texts, answers, scores, lengths of answers and the first words of answers are as published. Two
things differ. The length of a prompt does not include the answer, and each prompt has as many parts
of filler text as fit into this length. With the same seed and the same number of parts, the
published generator makes the same prompt. In the tasks `qa`, seed `n` asks question number `n`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft, encode, longest, most_parts
from kvindex_adapters.evaluate.tasks.instance import Instance
from kvindex_adapters.evaluate.tasks.registry import Task, register
from kvindex_adapters.evaluate.tasks.ruler_package import generator, missing, published, seeded
from kvindex_adapters.evaluate.tasks.scoring import contains, contains_any

Sample = tuple[str, list[str]]
"""A published prompt, which ends with the first words of the answer, and the right answers."""

TASKS = {
    "niah-single-1": "a word's number, among sentences that repeat",
    "niah-single-2": "a word's number, in essays",
    "niah-single-3": "a word's UUID, in essays",
    "niah-multikey-1": "a word's number, in essays with three other words' numbers",
    "niah-multikey-2": "a word's number, among other words' numbers only",
    "niah-multikey-3": "the UUID of a UUID, among other pairs of UUIDs only",
    "niah-multivalue": "a word's four numbers, in essays",
    "niah-multiquery": "four words' numbers, in essays",
    "vt": "five variables of a chain that passes on one value, among sentences that repeat",
    "cwe": "the ten most frequent words of a list",
    "fwe": "the three most frequent made-up words of a text",
    "qa-1": "a question of SQuAD, its paragraph among others",
    "qa-2": "a question of HotpotQA, its paragraphs among others",
}
"""Maps the published name of each task, written with hyphens, to a description of its question."""

EXAMPLE_TOKENS = 500
"""Maximum length in tokens of the example, with its answer, that precedes a text of the task `vt`
(variable tracking)."""

EXAMPLE_STEP = 5
"""The number of repeated sentences in the example of the task `vt` is a multiple of this number."""

STEM = 6
"""A published prompt is split where its question or the beginning of its answer is found.

The search uses only this number of characters from the beginning of the question or answer.
"""


@dataclass(frozen=True)
class Source:
    """Makes prompts of one task of RULER with one seed.

    The length of a prompt is set by its number of parts of filler text, such as words or documents.

    Args:
        sample: Function that makes a prompt with the given number of parts.
        least: Smallest allowed number of parts.
        most: Largest allowed number of parts, or None for no limit.
    """

    sample: Callable[[int], Sample]
    least: int = 1
    most: int | None = None


def make(name: str, tokenizer: Any, tokens: int, seed: int) -> Instance:
    """Make a prompt of the task with a published name.

    Args:
        name: Published name of the task, such as "niah_single_1".
        tokenizer: A tokenizer of transformers.
        tokens: Maximum length of the prompt in tokens. If the texts of the package are too short,
            the prompt is shorter.
        seed: Seed of the random numbers.

    Raises:
        ValueError: Even the shortest prompt of the task has more than `tokens` tokens.
    """
    found = source(name, tokenizer, tokens, seed)

    def draft(parts: int) -> Draft:
        with seeded(seed):
            return _draft(name, *found.sample(parts))

    def length(parts: int) -> int:
        return longest(tokenizer, draft(parts))

    parts = most_parts(length, tokens, least=found.least, most=found.most)
    return encode(tokenizer, draft(parts), task=_registered(name), seed=seed)


def source(name: str, tokenizer: Any, tokens: int, seed: int) -> Source:
    """Return a `Source` that makes the prompts of the task `name` with RULER's own generator.

    `seed` is the seed of the generator's random numbers.
    """
    script = generator(name)
    script.args.random_seed, script.args.max_seq_length = seed, tokens
    return _SOURCES[published(name)["task"]](script, tokenizer, seed)


def _needles(script: ModuleType, tokenizer: Any, seed: int) -> Source:
    essays = script.args.type_haystack == "essay"
    return Source(script.generate_input_output, most=len(script.haystack) if essays else None)


def _variables(script: ModuleType, tokenizer: Any, seed: int) -> Source:
    sizes = script.args.num_chains, script.args.num_hops

    def sample(parts: int) -> Sample:
        example = script.randomize_icl(_example(script, tokenizer))
        text, names = script.generate_input_output(parts, *sizes)
        return f" {example}\n\n{text}", names

    return Source(sample)


def _example(script: ModuleType, tokenizer: Any) -> str:
    """Return the solved example with which a prompt of variable tracking begins.

    The variable names of the example are shorter than those of the question.
    """

    def written(steps: int) -> str:
        text, names = script.generate_input_output(
            EXAMPLE_STEP * steps, script.args.num_chains, script.args.num_hops, is_icl=True
        )
        return f"{text} {' '.join(names)}\n\n"

    def length(steps: int) -> int:
        return len(tokenizer.tokenize(written(steps)))

    room = EXAMPLE_TOKENS - script.args.tokens_to_generate
    return written(most_parts(length, room))


def _common_words(script: ModuleType, tokenizer: Any, seed: int) -> Source:
    """Return a `Source` that makes the prompts of the task `cwe` (common words).

    The words are first shuffled with the seed, as in the published script.
    """
    script.words.sort()
    random.Random(seed).shuffle(script.words)
    return Source(script.generate_input_output, script.args.num_cw, len(script.words))


def _frequent_words(script: ModuleType, tokenizer: Any, seed: int) -> Source:
    """Return a `Source` that makes the prompts of the task `fwe` (frequent words).

    A prompt has at least 100 words. With fewer words, two of the most frequent words might occur
    equally often.
    """
    args = script.args
    options = {"vocab_size": args.max_seq_length // 50, "alpha": args.alpha}

    def sample(parts: int) -> Sample:
        text, words, _ = script.generate_input_output(
            args.max_seq_length, num_words=parts, coded_wordlen=args.coded_wordlen, **options
        )
        return text, words

    return Source(sample, least=100)


def _documents(script: ModuleType, tokenizer: Any, seed: int) -> Source:
    number = seed % len(script.QAS)
    needed = len(script.QAS[number]["context"])
    return Source(partial(script.generate_input_output, number), needed, len(script.DOCS))


_SOURCES: dict[str, Callable[[ModuleType, Any, int], Source]] = {
    "niah": _needles,
    "variable_tracking": _variables,
    "common_words_extraction": _common_words,
    "freq_words_extraction": _frequent_words,
    "qa": _documents,
}


def _draft(name: str, text: str, references: list[str]) -> Draft:
    """Split a published prompt into context, question, and the first words of the answer."""
    task = published(name)
    question = text.rindex(task["template"].partition("{context}")[2][:STEM])
    answer = text.rindex(task["answer_prefix"][:STEM])
    asked = Asked(
        text[question:answer],
        tuple(references),
        max_new_tokens=task["tokens_to_generate"],
        metric=contains_any if task["task"] == "qa" else contains,
        begin=text[answer:],
        cue="",
    )
    return Draft(text[:question], (asked,))


def _registered(name: str) -> str:
    return f"ruler-{name.replace('_', '-')}"


for _name, _asks in TASKS.items():
    register(Task(f"ruler-{_name}", _asks, partial(make, _name.replace("-", "_")), missing))

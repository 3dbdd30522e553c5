"""Measure how many drafted tokens a model accepts, and how often its tokens differ.

    python -m benchmarks.speculation [--topic NAME …] [--tokens N …] [--new N] [--lookup N|auto …]
        [--full N|auto …] [--temperature T …] [--questions N] [--seconds S] [--dtype …]
        [--lora FILE] [--device …] [--json OUT]

The decoder reads the beginning of a text, once with an index and once with full attention. The text
is a topic of the Python language reference, and the topics that follow it in alphabetical order. It
then answers each question about the text in these ways:

- `index`: with the index, one token at a time.
- `lookup N`: with the index and drafts of `N` tokens by prompt lookup.
- `full`: with full attention, one token at a time.
- `verified N`: with drafts of `N` tokens that the model writes with the index, and full attention
  verifies.

For each answer, the script reports the counts of `Acceptance`, and `same`: how many tokens at the
beginning equal those of one token at a time (`index` for `lookup`, `full` for `verified`). Sampled
tokens of `verified` use other random numbers than `full`, so they are not compared. `token_s` is
the mean time per token after the first one, and `processor_s` the mean processor time of all
threads, which other programs on the machine change less.

The results are written after each answer. For each text, no answer is started later than
`--seconds` seconds after the text was read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch

from benchmarks.common.reading import add_model, described, loaded, write
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.common.speculation import AUTO
from kvindex_adapters.decoder import Decoder, OpenSession, Sampling
from kvindex_adapters.hf.generate import Generation

QUESTIONS = (
    "What is this text about? Quote its most important sentences.",
    "List the rules that the text states, in its own words.",
    "Repeat two examples of code from the text, and explain each of them.",
)

SEED = 1


def text_from(topic: str) -> str:
    """Return a topic of the Python language reference, followed by those after it."""
    names = sorted(topics)
    first = names.index(topic)
    return "\n\n".join(topics[name] for name in names[first:] + names[:first])


def count_or_auto(text: str) -> int | str:
    """Parse a number of drafted tokens, or "auto"."""
    return text if text == AUTO else int(text)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--topic", nargs="+", choices=sorted(topics), default=["compound"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096])
    parser.add_argument("--new", type=int, default=100, help="Tokens of each answer")
    parser.add_argument("--lookup", nargs="*", type=count_or_auto, default=[4, AUTO])
    parser.add_argument("--full", nargs="*", type=count_or_auto, default=[6, AUTO])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--k", type=int, default=DEFAULT_K)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_model(parser)
    return parser.parse_args(given)


def ways(given: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name of each way, the name of the way to compare it with, and its options.

    The first word of a name says which session answers.
    """
    for name in ("index", "full"):
        yield name, "", {}
    for count in given.lookup:
        yield f"lookup {count}", "index", dict(speculative_tokens=count)
    for count in given.full:
        yield f"verified {count}", "full", dict(speculative_tokens=count, verify="full")


class Clock:
    """Measures the processor time of the tokens after the first one. Pass it as `on_progress`."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        self._count = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Record the processor time when a token arrives."""
        if phase == "decode":
            self._last = time.process_time()
            self._first = self._first or self._last
            self._count = max(done, self._count)

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first one."""
        return (self._last - self._first) / max(self._count - 1, 1)


def same(one: Generation, other: Generation) -> int:
    """Return how many tokens at the beginning of two answers are equal."""
    pairs = zip(one.answer_ids.tolist(), other.answer_ids.tolist(), strict=False)
    for place, (mine, theirs) in enumerate(pairs):
        if mine != theirs:
            return place
    return min(len(one.answer_ids), len(other.answer_ids))


def measured(
    given: argparse.Namespace, decoder: Decoder, sessions: dict[str, OpenSession], end: float
) -> Iterator[dict[str, Any]]:
    """Yield the results of all answers about one text, which `sessions` have read."""
    for question in QUESTIONS[: given.questions]:
        for temperature in given.temperature:
            sampling = Sampling(temperature, top_p=0.9 if temperature else None, seed=SEED)
            answers: dict[str, Generation] = {}
            for name, reference, options in ways(given):
                if time.monotonic() > end:
                    return
                opened = sessions["full" if name == "full" else "index"]
                clock = Clock()
                answer = answers[name] = decoder.generate(
                    [{"role": "user", "content": question}],
                    session=opened.fork(),
                    sampling=sampling,
                    max_new_tokens=given.new,
                    on_progress=clock,
                    **options,
                )
                cell = {
                    "question": question,
                    "temperature": temperature,
                    "way": name,
                    "new": len(answer.answer_ids),
                    "token_s": answer.token_s,
                    "processor_s": clock.per_token,
                }
                if answer.acceptance is not None:
                    cell |= vars(answer.acceptance)
                    cell["tokens_per_step"] = answer.acceptance.tokens_per_step
                if reference and not (temperature and reference == "full"):
                    cell["same"] = same(answer, answers[reference])
                    cell["compared"] = len(answers[reference].answer_ids)
                yield cell


def main(given: list[str] | None = None) -> None:
    """Measure, print a line for each answer, and write the results."""
    options = arguments(given)
    model, tokenizer = loaded(options, dtype=getattr(torch, options.dtype))
    decoder = Decoder.of(model, tokenizer)
    result = {**described(options), "index": options.index, "k": options.k, "dtype": options.dtype}
    cells: list[dict[str, Any]] = []
    for topic in options.topic:
        ids = tokenizer(text_from(topic), add_special_tokens=False)["input_ids"]
        for tokens in options.tokens:
            if len(ids) < tokens:
                raise SystemExit(f"--tokens: got {tokens}, but all topics have {len(ids)} tokens")
            text = tokenizer.decode(ids[:tokens])
            sessions = {
                "index": decoder.session(index=options.index, k=options.k),
                "full": decoder.session(index=None),
            }
            for session in sessions.values():
                decoder.read([{"role": "user", "content": text}], session)
            end = time.monotonic() + options.seconds
            for cell in measured(options, decoder, sessions, end):
                cells.append({"topic": topic, "tokens": tokens, **cell})
                print(
                    ", ".join(f"{name}: {value}" for name, value in cells[-1].items()), flush=True
                )
                write({**result, "cells": cells}, options.json)


if __name__ == "__main__":
    main()

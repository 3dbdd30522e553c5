"""Measure KL divergence from full attention, equal predictions and recall, on a fixed text.

With each index, the model reads 4,000 tokens of the Python language reference, and then the next
200 tokens one by one. With full attention, it reads all these tokens in one forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

from rich.progress import Progress
from torch import Tensor

from benchmarks import report
from benchmarks.common.reading import SEED, described, ids_of, loaded, write
from kvindex_adapters.evaluate.fidelity import teacher_forced
from kvindex_adapters.evaluate.texts import python_reference

PROMPT, CONTINUATION, K = 4000, 200, 100
INDEXES = (
    *(
        "exact",
        "pariskv",
        "pariskv:preset=fast+sample",
        "pariskv:preset=accurate",
        "pariskv:preset=paper",
    ),
    "pariskv:preset=fast:group=mean_query",  # the published group policy
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `fidelity` to its parser."""
    parser.add_argument(
        "--index", nargs="+", default=INDEXES, help="Names and options of the indexes to measure"
    )


def text_ids(tokenizer: Any, count: int, seed: int) -> Tensor:
    """Return `count` token ids of the Python language reference, int64 `[count]`.

    First the paragraphs of the reference are brought into a random order, which `seed` determines.
    """
    text = python_reference()
    random.Random(seed).shuffle(text)
    return ids_of(tokenizer, "\n\n".join(text), count)


def run(given: argparse.Namespace) -> None:
    """Run the command `fidelity`: measure the indexes, then print and write the results."""
    model, tokenizer = loaded(given)
    about = {"text": "pydoc_data.topics, paragraphs in random order", "prompt_tokens": PROMPT}
    about |= {"steps": CONTINUATION, "k": K, "seed": SEED}
    result: dict[str, Any] = {**described(given), **about, "indexes": {}}
    ids = text_ids(tokenizer, PROMPT + CONTINUATION, SEED)
    with Progress() as progress:
        for index in given.index:
            task = progress.add_task(index, total=CONTINUATION)
            found = teacher_forced(
                *(model, ids[:PROMPT], ids[PROMPT:]),
                **dict(index=index, k=K),
                on_progress=lambda done, _, task=task: progress.update(task, completed=done),
            )
            result["indexes"][index] = dataclasses.asdict(found)
            write(result, given.json)
    print(report.TABLES["fidelity"](result))
